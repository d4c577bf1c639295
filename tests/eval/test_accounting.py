"""Every published or recorded number of the model against the accounting, and the command line."""

import contextlib
import io
import json
import pathlib

import pytest

from configs import v41_flash
from eval import accounting
from train.stages import resolve_stages
from v41flash import presets

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
COMMAND = [f"--config={CONFIGS / 'v41_flash.py'}"]
QUICKSTART = [f"--config={CONFIGS / 'quickstart.py'}"]

BILLION = 10**9
# name -> (figure as it is printed in the sources, its unit in base units).
PRINTED = {
    # The published figures.
    "kv.global": ("890", 1),
    "v4_flash.kv.global": ("3514.25", 1),
    "v1_67b.kv.global": ("389120", 1),
    "kv.v1_67b_ratio": ("437.2", 1),
    "kv.v4_flash_ratio": ("3.95", 1),
    "kv.persistent_share_of_v4_flash": ("0.13", 1),
    "parameters.backbone": ("551.57", BILLION),
    "parameters.engram_tables": ("196.61", BILLION),
    "activated.prefill": ("7.90", BILLION),
    "activated.decode": ("16.13", BILLION),
    "activated.prefill_share": ("0.510", 1),
    "flops.prefill_share.at_65536": ("0.5", 1),
    "layers.total": ("40", 1),
    "layers.encoder": ("20", 1),
    "layers.with_indexer": ("8", 1),
    "layers.with_cache": ("4", 1),
    "pool.candidates": ("16384", 1),
    "pool.share_of_longest_context": ("0.016", 1),
    "flops.decode_growth": ("1.253", 1),
    "main_kv.bound": ("22.6", 1),
    "main_kv.format_range": ("2688", 1),
    "mhc.traffic": ("51200", 1),
    "mhc.traffic_two_pass": ("102400", 1),
    "mhc.traffic_ratio": ("0.5", 1),
    "optimizer.tables_ratio": ("0.5000", 1),
    "checkpoint.bytes": ("510286023000", 1),
    "checkpoint.tensors": ("96085", 1),
    # Cache bytes in detail.
    "kv.entry": ("288", 1),
    "kv.index_key": ("68", 1),
    "kv.window_row": ("528", 1),
    "kv.entries_per_token": ("2.5", 1),
    "kv.main": ("720", 1),
    "kv.index": ("170", 1),
    "kv.entries_without_sharing": ("29", 1),
    "kv.without_sharing": ("10324", 1),
    "kv.sharing_ratio": ("11.6", 1),
    "kv.window_state": ("2703360", 1),
    "kv.global_at_longest_context": ("0.869", 2**30),
    "v4_flash.kv.entry": ("584", 1),
    "v4_flash.kv.csa_layers": ("21", 1),
    "v4_flash.kv.hca_layers": ("20", 1),
    "v4_flash.kv.csa": ("3423", 1),
    "v4_flash.kv.hca": ("91.25", 1),
    "v4_pro.kv.csa_layers": ("30", 1),
    "v4_pro.kv.hca_layers": ("31", 1),
    "v4_pro.kv.global": ("5031.44", 1),
    "v3_2.kv.global": ("48068", 1),
    # Parameters in detail.
    "layer.attention.wq_a": ("6553600", 1),
    "layer.attention.wq_b": ("41943040", 1),
    "layer.attention.wkv": ("2621440", 1),
    "layer.attention.wo_a": ("33554432", 1),
    "layer.attention.wo_b": ("41943040", 1),
    "layer.attention.small": ("1856", 1),
    "layer.attention": ("126617408", 1),
    "layer.expert": ("35389440", 1),
    "layer.gate": ("1966464", 1),
    "layer.mhc_per_sublayer": ("491547", 1),
    "parameters.routed_experts": ("543.5818", BILLION),
    "parameters.shared_experts": ("1.4156", BILLION),
    "parameters.attention": ("5.0647", BILLION),
    "parameters.gates": ("0.0787", BILLION),
    "parameters.mhc": ("0.0393", BILLION),
    "parameters.compressors": ("0.0184", BILLION),
    "parameters.indexers": ("0.0435", BILLION),
    "parameters.norms": ("0.0004", BILLION),
    "parameters.embedding_and_head": ("1.3238", BILLION),
    "parameters.engram_projections": ("0.3147", BILLION),
    "parameters.vision": ("0.4118", BILLION),
    "parameters.aligner": ("0.0734", BILLION),
    "parameters.backbone_layers": ("550.242", BILLION),
    "parameters.backbone_with_engram_projections": ("551.881", BILLION),
    "parameters.backbone_with_vision": ("552.366", BILLION),
    "parameters.backbone_and_tables": ("748.495", BILLION),
    "parameters.draft": ("14.225", BILLION),
    "parameters.checkpoint": ("763.205", BILLION),
    "activated.decode_layers": ("15.469", BILLION),
    "activated.decode_with_embedding": ("16.792", BILLION),
    "activated.prefill_with_embedding": ("8.557", BILLION),
    # The models to compare with.
    "v4_flash.parameters.routed_experts": ("277.025", BILLION),
    "v4_flash.parameters.attention": ("4.599", BILLION),
    "v4_flash.parameters.compressors_and_indexers": ("0.487", BILLION),
    "v4_flash.parameters.embedding_and_head": ("1.059", BILLION),
    "v4_flash.layer.attention": ("106956352", 1),
    "v4_flash.parameters": ("284.332", BILLION),
    "v4_flash.parameters_with_mtp": ("290.942", BILLION),
    "v4_flash.activated.layers": ("12.741", BILLION),
    "v4_flash.activated": ("13.270", BILLION),
    "v4_flash.activated.with_embedding": ("13.800", BILLION),
    "v4_pro.parameters.routed_experts": ("1547.396", BILLION),
    "v4_pro.parameters.attention": ("18.294", BILLION),
    "v4_pro.parameters.compressors_and_indexers": ("1.172", BILLION),
    "v4_pro.parameters.embedding_and_head": ("1.853", BILLION),
    "v4_pro.layer.attention": ("299894912", 1),
    "v4_pro.parameters": ("1572.997", BILLION),
    "v4_pro.parameters_with_mtp": ("1598.837", BILLION),
    "v4_pro.activated.layers": ("47.926", BILLION),
    "v4_pro.activated": ("48.852", BILLION),
    "v4_pro.activated.with_embedding": ("49.779", BILLION),
    # Engram.
    "engram.rows": ("768022850", 1),
    "engram.row_width": ("256", 1),
    "engram.layer_1.rows": ("384006168", 1),
    "engram.layer_14.rows": ("384016682", 1),
    "engram.layer_1.rows_from_primes": ("384006168", 1),
    "engram.layer_14.rows_from_primes": ("384016682", 1),
    "engram.multiplier_bound": ("46539438283891", 1),
    # YaRN.
    "yarn.low": ("15", 1),
    "yarn.high": ("25", 1),
}
SERIES = {
    "engram.layer_1.prime": [16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133]
    + [16000183],
    "engram.layer_14.prime": [16000477, 16000487, 16000499, 16000507, 16000511, 16000573]
    + [16000609, 16000627],
    "engram.layer_1.multiplier": [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    "engram.layer_14.multiplier": [67716810739261, 51510806800915, 30921347202721]
    + [82619226485591],
}
FREQUENCIES = {0: 1.0, 8: 0.05, 15: 0.003635539, 16: 0.002265625, 20: 0.0002969778}
FREQUENCIES |= {25: 5.372313e-06, 31: 5.680529e-07}


@pytest.fixture(scope="module")
def published():
    """The JSON of the command for the published model."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert accounting.main([*COMMAND, "--format=json"]) == 0
    return json.loads(output.getvalue())


@pytest.mark.parametrize("name", PRINTED)
def test_printed_figures(published, name):
    text, unit = PRINTED[name]
    digits = len(text.partition(".")[2])
    assert f"{published[name]['value'] / unit:.{digits}f}" == text


@pytest.mark.parametrize("name", SERIES)
def test_series(published, name):
    found = [published[f"{name}_{i}"]["value"] for i in range(len(SERIES[name]))]
    assert found == SERIES[name]


def test_rotary_frequencies(published):
    found = {i: published[f"yarn.frequency_{i}"]["value"] for i in FREQUENCIES}
    assert found == pytest.approx(FREQUENCIES, rel=2e-7)


def test_products_of_the_hash_fit_64_bits(published):
    for layer in (1, 14):
        assert published[f"engram.layer_{layer}.largest_product"]["value"] < 2**63


def test_every_row_has_value_unit_and_source(published):
    for name, row in published.items():
        assert set(row) == {"value", "unit", "source"}, name
        assert isinstance(row["value"], (int, float)) and row["unit"] and row["source"], name


def test_persistent_share_is_the_named_constant_and_the_cache(published):
    share = published["v4_flash.kv.global"]["value"] / published["v4_flash.kv.persistent"]["value"]
    assert share == accounting.comparisons.V4_PERSISTENT_GLOBAL_SHARE
    assert published["kv.persistent_share_of_v4_flash"]["value"] == share * 890 / 3514.25


def test_text_has_a_line_for_every_figure(capsys):
    assert accounting.main(QUICKSTART) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    table = accounting.figures(accounting.parse(QUICKSTART).model)
    assert [line.split()[0] for line in lines] == list(table)


def test_a_model_without_engram_and_compression_tables():
    config = presets.tiny(engram_layer_ids=(), engram_num_embeddings=(), rope_factor=1.0)
    table = accounting.figures(config)
    assert table["engram.rows"].value == 0
    assert not [name for name in table if name.startswith("engram.layer")]
    assert "yarn.low" not in table


def test_flags_change_the_model(capsys):
    command = [*COMMAND, "--config.model.main_kv_format=fp8", "--format=json"]
    assert accounting.main(command) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["kv.global"]["value"] == 2.5 * (528 + 68)


def test_plots(tmp_path, capsys):
    folder = tmp_path / "new" / "plots"
    assert accounting.main([*COMMAND, f"--plots={folder}"]) == 0
    written = sorted(path.name for path in folder.iterdir())
    assert written == ["decode_flops.png", "kv_bytes.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--config is missing"),
        (["--config=none.py"], "--config=none.py: there is no such file"),
        ([*COMMAND, "--format=xml"], "--format=xml"),
        ([*COMMAND, "--plot=x"], "plot"),
        ([*COMMAND, "more"], "'more' is no flag"),
        ([*COMMAND, "--config.model.hidden_sizes=3"], "hidden_size"),
        ([*COMMAND, "--config.model.hidden_size=big"], "--config.model.hidden_size=big"),
        ([*COMMAND, "--config.model.head_dim=500"], "model.head_dim = 500"),
        ([*COMMAND, f"--plots={__file__}/x"], "test_accounting.py/x: Not a directory"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(arguments, expected, capsys):
    assert accounting.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert expected in printed.err


def test_a_configuration_that_fails_is_a_mistake(tmp_path, capsys):
    (tmp_path / "broken.py").write_text("def get_config():\n    return 1 / 0\n")
    assert accounting.main([f"--config={tmp_path / 'broken.py'}"]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err
    (tmp_path / "other.py").write_text(
        "from ml_collections import ConfigDict\n\n\ndef get_config():\n    return ConfigDict()\n"
    )
    assert accounting.main([f"--config={tmp_path / 'other.py'}"]) == 2
    assert "no section model" in capsys.readouterr().err


def test_the_published_recipe_is_one_that_training_takes():
    first, thawed, last = resolve_stages(v41_flash.get_config())
    tokens = [
        stage.settings.data.batch_size * stage.settings.data.sequence_length
        for stage in (first, last)
    ]
    assert tokens[0] == tokens[1] == pytest.approx(100.6e6, rel=1e-3)
    assert last.settings.data.sequence_length == first.settings.model.max_position_embeddings
    optimizer = first.settings.optimizer
    assert first.settings.train.freeze_vision and not last.settings.train.freeze_vision
    assert thawed.start == optimizer.decay_from
    steps = (optimizer.decay_from, last.start, optimizer.decay_until, first.settings.train.steps)
    trillions = [step * tokens[0] / 1e12 for step in steps]
    assert trillions == pytest.approx([28, 34, 40, 45], rel=1e-4)
