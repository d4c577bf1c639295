"""Documents, tokenised store, packing and the grain pipeline; `pipeline` is what a loop calls."""
