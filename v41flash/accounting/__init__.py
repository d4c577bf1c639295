"""What a model costs, by arithmetic on its configuration: no arrays, standard library only.

* `parameters`: total, and activated per prefill and decode token, by component; optimizer state.
* `cache`: bytes of the global cache, of the window state, of what is kept between requests.
* `flops`: prefill and decode against context length, by component and precision.
* `comparisons`: the same of earlier models of the family, from small records.
* `rows`: all of it as named figures with unit and source (`python -m eval.accounting`).
"""
