"""The OpenAI-compatible HTTP endpoint behind `python -m eval.serve`."""
