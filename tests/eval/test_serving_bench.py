"""The model that serving is timed on."""

import dataclasses

from eval import serving_bench
from v41flash import presets


def test_widths_and_schedule_are_the_published_ones(capsys):
    ours, published = serving_bench.bench_model(), presets.v41_flash()
    cut = {
        "hidden_size",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "compress_ratios",
        "num_nextn_predict_layers",
        "vision",
        "engram_vocab_size",
        "engram_num_embeddings",
    }
    differing = {
        field.name
        for field in dataclasses.fields(ours)
        if vars(ours)[field.name] != vars(published)[field.name]
    }
    assert differing == cut
    assert ours.layers == published.layers
    assert serving_bench.main(["--what=nothing"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
