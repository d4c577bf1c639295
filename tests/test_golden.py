"""Recorded runs of the published code are reproduced, and the check that says so can say no."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests import golden_check
from tests.conftest import GOLDEN

# Families that each run must hold, so that an empty or renamed file cannot pass for a right one.
ALWAYS = {
    *("embed", "compressed_ids", "final_norm", "logits", "x_in", "x_out"),
    *("attn.win_kv", "attn.out", "attn.latent", "attn.comp_kv"),
    *("idx.k", "idx.q", "idx.w", "idx.score", "idx.cand", "idx.topk_mask", "idx.gap"),
    *("ffn.topk_idx", "ffn.topk_w", "ffn.out", "engram.hash_ids", "engram.gate"),
}
STRICT = ALWAYS | {
    *("attn.in", "attn.q", "attn.o_rot", "x_mid", "ffn.in", "ffn.scores", "engram.x_before"),
    *(f"hc_{part}.{name}" for part in ("attn", "ffn") for name in ("pre", "post", "comb")),
}


@pytest.fixture
def shared_compilation(recorded, monkeypatch):
    """Lets the command line use the session's compiled model: folders here have equal configs."""
    compiled = golden_check.Recorded.forward
    monkeypatch.setattr(golden_check.Recorded, "forward", lambda _, mode: compiled(recorded, mode))


@pytest.fixture
def one_run(tmp_path, shared_compilation):
    """A copy of the recorded folder with a single run in it."""
    source = GOLDEN / "layout_i"
    for name in ("config.json", "token_map.json", "weights.safetensors", "B_noquant.npz"):
        shutil.copy(source / name, tmp_path)
    return tmp_path


def run_check(folder, capsys):
    status = golden_check.main(["golden_check", str(folder)])
    return status, *capsys.readouterr()


def test_every_recorded_family_is_reproduced(shared_compilation):
    seen = {}
    for run, family in golden_check.check_folder(GOLDEN / "layout_i"):
        assert family.worst <= 1, f"{run} {family}"
        seen.setdefault(run, set()).add(family.name)
    assert seen["A_fakequant"] >= ALWAYS
    assert seen["B_noquant"] >= STRICT
    lengths = ("", "[:1]", "[:2]", "[:9]", "[:34]")
    modes = ("noquant", "fakequant")
    assert seen["E_decode"] == {f"prefill_logits.{mode}{n}" for mode in modes for n in lengths}


IMAGES = {f"image{i}.{name}" for i in (0, 1) for name in ("patches", "aligner.out", "vit.out")}
MULTIMODAL = IMAGES | {
    *("token_types", "embed", "x_in", "x_out", "attn.out", "ffn.topk_idx", "ffn.topk_w"),
    *("ffn.out", "engram.hash_ids", "engram.gate", "idx.topk_mask", "idx.cand", "logits"),
}


def test_images_are_reproduced():
    """Encoder, span, routing by a bias of its own, Engram shut; without the two other modes."""
    run = GOLDEN / "layout_i/multimodal/D_multimodal.npz"
    arrays = dict(np.load(run))
    for key in ("fakequant.logits", "ignoring_images.logits"):
        del arrays[key]
    recorded = golden_check.Recorded.load(run.parent)
    families = golden_check.check_multimodal(recorded, run, arrays)
    assert {family.name for family in families} >= MULTIMODAL
    for family in families:
        assert family.worst <= 1, family


@pytest.mark.slow
def test_images_are_reproduced_in_every_mode():
    seen = [family for _, family in golden_check.check_folder(GOLDEN / "layout_i/multimodal")]
    assert {family.name for family in seen} >= MULTIMODAL | {
        "fakequant.logits (4/5)",
        "ignoring_images.logits",
    }
    assert max(family.worst for family in seen) <= 1


@pytest.mark.parametrize("key", ["L05.idx.topk_mask", "L02.attn.comp_kv", "logits"])
def test_a_changed_array_fails_and_is_named(one_run, capsys, key):
    arrays = dict(np.load(one_run / "B_noquant.npz"))
    changed = arrays[key]
    changed.flat[7] = ~changed.flat[7] if changed.dtype == bool else changed.flat[7] + 1e-3
    np.savez(one_run / "B_noquant.npz", **arrays)
    status, out, _ = run_check(one_run, capsys)
    family = key[4:] if key.startswith("L") else key
    failing = [line for line in out.splitlines() if line.startswith("FAIL")]
    assert status == 1
    assert len(failing) == 1 and family in failing[0] and key in failing[0]


def test_a_changed_weight_fails(one_run, capsys):
    weights = load_file(one_run / "weights.safetensors")
    name = "layers.2.attn.indexer.weights_proj.weight"
    weights[name] = weights[name] * np.float32(1.01)
    save_file(weights, one_run / "weights.safetensors")
    status, out, _ = run_check(one_run, capsys)
    assert status == 1
    assert "FAIL" in out and "L02.idx.w" in out.splitlines()[-1]


def test_a_right_folder_passes(one_run, capsys):
    status, out, err = run_check(one_run, capsys)
    assert (status, err) == (0, "")
    assert all(line.startswith("ok") for line in out.splitlines())


@pytest.mark.parametrize(
    "key", ["L00.idx.k", "L00.idx.score", "L02.attn.mystery", "L77.x_in", "mystery"]
)
def test_an_array_that_the_model_lacks_is_one_line(one_run, capsys, key):
    file = one_run / "B_noquant.npz"
    np.savez(file, **dict(np.load(file)), **{key: np.zeros(3)})
    status, _, err = run_check(one_run, capsys)
    assert (status, err) == (
        1,
        f"golden_check: {file}: holds {key!r}, which this model does not have\n",
    )


def test_a_missing_tensor_is_one_line(one_run, capsys):
    file, name = one_run / "weights.safetensors", "layers.2.attn.indexer.wk.weight"
    weights = load_file(file)
    del weights[name]
    save_file(weights, file)
    status, _, err = run_check(one_run, capsys)
    assert (status, err) == (1, f"golden_check: {file}: holds no tensor {name!r}\n")


@pytest.mark.parametrize(
    "run, key", [("B_noquant", "tokens"), ("E_decode", "prefill_logits.noquant")]
)
def test_a_missing_array_is_one_line(one_run, capsys, run, key):
    (one_run / "B_noquant.npz").unlink()
    arrays = dict(np.load(GOLDEN / "layout_i" / f"{run}.npz"))
    del arrays[key]
    np.savez(one_run / f"{run}.npz", **arrays)
    status, _, err = run_check(one_run, capsys)
    assert (status, err) == (1, f"golden_check: {one_run / run}.npz: holds no array {key!r}\n")


@pytest.mark.parametrize("arguments", [[], ["a", "b"]])
def test_usage_is_status_2_and_one_line(arguments, capsys):
    assert golden_check.main(["golden_check", *arguments]) == 2
    assert capsys.readouterr().err == "usage: python -m tests.golden_check DIR\n"


def test_a_missing_folder_is_one_line(tmp_path, capsys):
    status, _, err = run_check(tmp_path / "nothing", capsys)
    assert status == 1
    assert len(err.splitlines()) == 1 and "nothing" in err


@pytest.mark.slow
def test_the_published_storage_is_reproduced():
    seen = set()
    for _, family in golden_check.check_folder(GOLDEN / "storage_i"):
        assert family.worst <= 1, family
        seen.add(family.name)
    wanted = ("weights", "fp32_noquant.logits", "fp32_noquant.x_in", "fp32_fakequant.logits")
    assert seen >= {*wanted, "dequantised.layers.0.engram.embed.weight", "mm.fp32_noquant.logits"}
