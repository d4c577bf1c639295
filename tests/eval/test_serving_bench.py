"""The model that serving is timed on."""

import dataclasses
import json

import pytest

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
    for wrong in (["--what=nothing"], ["--what=prefill", "--tokens=200", "--chunk=64"]):
        assert serving_bench.main(wrong) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
def test_everything_is_measured_on_a_small_model(tmp_path, monkeypatch):
    monkeypatch.setattr(serving_bench, "bench_model", presets.tiny)
    file = tmp_path / "rows.jsonl"
    common = [f"--json={file}", f"--lock={tmp_path / 'lock'}"]
    for flags in (
        ["--what=cache", "--tokens=1000"],
        ["--what=decode", "--contexts=200", "--batches=2"],
        ["--what=prefill", "--tokens=192", "--chunk=64"],
        ["--what=fill", "--tokens=200", "--chunk=64"],
    ):
        assert serving_bench.main(flags + common) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    by_kind = {what: [row for row in rows if row["what"] == what] for what in ("decode", "fill")}
    (decode,) = by_kind["decode"]
    assert 0 < decode["selection_attention_ms"] and 0 < decode["step_ms"]
    assert decode["batch"] == 2 and len(decode["first_tokens"]) == 8
    assert [row["tokens"] for row in by_kind["fill"]] == [64, 128, 200]
    assert by_kind["fill"][-1]["finite"]
    ways = [(row["layers"], row["finite"]) for row in rows if row["what"] == "prefill"]
    assert ways == [("encoder and replay", True), ("all", True)] * 2
