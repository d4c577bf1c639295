"""Accounting against what it describes: parameter trees, recorded files, packed rows, optimizer
states, XLA's own count. The published numbers are in tests/eval/test_accounting.py.
"""

import collections
import dataclasses
import functools
import json
import math
import pathlib
import struct
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import quickstart
from pallas_kernels import fp4, indexer, sparse_attention
from pallas_kernels.grouped_matmul.reference import block_rows
from v41flash import presets
from v41flash.accounting import cache, flops, parameters
from v41flash.cache import CompressorState, GlobalCache, WindowCache
from v41flash.checkpoints import inventory, names
from v41flash.config import ModelConfig
from v41flash.nn.ced import CED, logits
from v41flash.optim import v41_optimizer

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
MODELS = {
    "v41_flash": presets.v41_flash,
    "tiny": presets.tiny,
    "quickstart": lambda: ModelConfig.from_dict(quickstart.get_config().model.to_dict()),
}


def abstract_inputs(config, tokens):
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    rows = (1, tokens, config.num_engram_sites, config.engram_rows_per_token)
    return ids, ids, ids, jax.ShapeDtypeStruct(rows, jnp.int32)


@functools.cache
def tree(model):
    """The real parameter tree, shapes only."""
    config = MODELS[model]()
    init = functools.partial(CED(config).init, jax.random.key(0))
    return nn.unbox(jax.eval_shape(init, *abstract_inputs(config, 8))["params"])


def component(path):
    """What a parameter of the tree is counted as, by its path."""
    keys = [entry.key for entry in path]
    if keys[0] == "images":
        return "images"
    if keys == ["embed"] or keys == ["head"]:
        return {"embed": "embedding", "head": "head"}[keys[0]]
    if keys[-1] == "norm" and (len(keys) == 1 or keys[-2].startswith("hc_")):
        return "norms"
    if "engram" in keys:
        return "engram_tables" if keys[-1] == "table" else "engram_projections"
    if "compressor" in keys:
        return "compressors"
    if "indexer" in keys:
        return "index_keys" if keys[-1] in ("wk", "k_norm") else "index_queries"
    if "router" in keys:
        return "gates"
    if "ffn" in keys:
        return "shared_experts" if keys[-1].startswith("shared") else "routed_experts"
    return "mhc" if keys[-2].startswith("hc_") else "attention"


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_those_of_the_tree(model):
    found = collections.Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree(model)):
        found[component(path)] += math.prod(leaf.shape)
    counted = parameters.total(MODELS[model]())
    text = {name: n for name, n in counted.items() if name not in (*parameters.VISION, "draft")}
    images = sum(counted.get(name, 0) for name in parameters.VISION)
    assert found.pop("images", 0) == images
    assert text == dict(found)


@pytest.mark.parametrize(
    ("folder", "file"), [("storage_i", "model"), ("layout_i", "weights")], ids=str
)
def test_inventory_is_that_of_recorded_files(folder, file):
    config = ModelConfig.from_hf(json.loads((GOLDEN / folder / "config.json").read_text()))
    with (GOLDEN / folder / f"{file}.safetensors").open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(size))
    header.pop("__metadata__")
    recorded = {
        name: (tuple(entry["shape"]), entry["dtype"], end - start)
        for name, entry in header.items()
        for start, end in [entry["data_offsets"]]
    }
    listed = list(inventory.inventory(config))
    assert {
        tensor.name: (tensor.shape, tensor.dtype, tensor.bytes) for tensor in listed
    } == recorded
    assert len(listed) == len(recorded)
    assert inventory.totals(config) == (sum(t.bytes for t in listed), len(listed))


def test_experts_without_four_bits_are_stored_like_linear_weights():
    published = presets.v41_flash()
    stored = dataclasses.replace(published.quantization_config, expert_dtype=None)
    config = dataclasses.replace(published, quantization_config=stored)
    tensors = {tensor.name: tensor for tensor in inventory.inventory(config)}
    assert tensors["layers.3.ffn.experts.7.w2.weight"] == (
        "layers.3.ffn.experts.7.w2.weight",
        (5120, 2304),
        "F8_E4M3",
    )
    assert tensors["layers.3.ffn.experts.7.w2.scale"].shape == (160, 72)


@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_is_read_from_the_inventory_once(model):
    config = MODELS[model]()
    read = collections.Counter({"embed.weight": 1, "norm.weight": 1, "head.weight": 1})
    for spec in config.layers:
        for source in names.layer_sources(config, spec):
            read.update(source.names)
    listed = collections.Counter(
        weight.name.format(expert)
        for weight in inventory.text_weights(config)
        for expert in range(weight.copies)
    )
    assert read == listed


def array_bytes(state):
    """Bytes of the arrays of an abstract state; step counters are left out."""
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.shape
    )


@pytest.mark.parametrize("model", ["tiny", "quickstart"])
def test_optimizer_bytes_are_those_of_the_states(model):
    config, params = MODELS[model](), tree(model)
    state = jax.eval_shape(v41_optimizer(1e-3).init, params)
    assert parameters.optimizer_bytes(config) == array_bytes(state)
    state = jax.eval_shape(optax.adamw(1e-3).init, params)
    assert parameters.adam_bytes(config) == array_bytes(state)


@pytest.mark.parametrize("row_format", ["fp4", "mxfp4", "fp8"])
@pytest.mark.parametrize("width", [32, 128, 512])
def test_row_bytes_are_those_of_packed_rows(row_format, width):
    packed = jax.eval_shape(lambda x: fp4.pack(x, row_format), jnp.zeros((3, width)))
    assert packed.dtype == jnp.uint8
    assert cache.row_bytes(row_format, width, "bfloat16") == packed.shape[-1]


@pytest.mark.parametrize(
    "config",
    [
        presets.v41_flash(),
        presets.tiny(),
        presets.tiny(main_kv_format="none", index_format="none", window_kv_format="none"),
    ],
    ids=["v41_flash", "tiny", "not packed"],
)
def test_cache_bytes_are_those_of_the_arrays(config):
    table = np.zeros((1, 1), np.int32)
    pages = jax.eval_shape(lambda: GlobalCache.create(config, 1, table))
    assert array_bytes((pages.main, pages.keys)) == cache.global_bytes(config, 128)
    assert pages.bytes_per_token == cache.global_bytes_per_token(config)
    window = jax.eval_shape(lambda: WindowCache.create(config, 1))
    assert array_bytes(window.rows) == cache.window_bytes(config)
    waiting = jax.eval_shape(lambda: CompressorState.create(config, 1))
    assert array_bytes(waiting) == cache.partial_group_bytes(config)


def test_a_partial_group_is_not_in_the_cache():
    config = presets.v41_flash()
    each = 288 + 68
    assert [cache.global_bytes(config, tokens) for tokens in range(4)] == [
        0,
        each,
        (3 + 2) * each,
        (3 + 3) * each,
    ]


@given(
    start=st.integers(0, 70),
    length=st.integers(0, 70),
    replay=st.booleans(),
    dense=st.booleans(),
    layer=st.integers(0, 7),
)
def test_keys_are_those_counted_one_by_one(start, length, replay, dense, layer):
    config = presets.tiny(dense_selection=dense)
    spec = config.layers[layer]
    window = selected = scored = 0
    for position in range(start, start + length):
        first = start if replay else 0
        window += sum(position - config.sliding_window < s for s in range(first, position + 1))
        if spec.ratio:
            visible = sum(1 for end in range(position + 1) if end % spec.ratio == spec.ratio - 1)
            selected += visible if dense else min(visible, config.index_topk)
            if spec.mode in ("full", "reindex"):
                pooled = spec.pool == "use" and not dense
                scored += min(visible, 3 * 2) if pooled else visible
    met = flops.keys(config, spec, start, start + length, replay=replay)
    assert met == (window, selected, scored)


def test_decoding_every_token_is_the_exact_prefill_and_a_head_each():
    config = presets.tiny()
    steps = sum((flops.decode(config, context) for context in range(1, 31)), flops.Costs())
    whole = flops.all_layers(config, 30) + flops.head(config, 30)
    assert steps == pytest.approx(whole)
    core = whole["attention_core", "bf16"] + whole["index_scores", "fp4"]
    assert flops.attention(config, 30) == core


def test_a_prompt_within_the_replayed_tokens_runs_all_layers():
    config = presets.tiny()
    window = config.sliding_window
    assert flops.prefill(config, window) == flops.all_layers(config, window)
    longer = 10 * window
    assert flops.total(flops.prefill(config, longer)) < flops.total(
        flops.all_layers(config, longer)
    )


def xla_flops(function, *arguments):
    """XLA's count for the lowered function; the body of a loop counts once."""
    return jax.jit(function).lower(*arguments).cost_analysis()["flops"]


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


# XLA also counts elementwise work: softmax and sort here, rotations, norms, quantisers below.
OP_TOLERANCE = 0.03
MODEL_TOLERANCE = 0.03


def test_attention_core_agrees_with_xla():
    config = presets.v41_flash()
    spec = config.layers[3]
    context = 2048
    met = flops.keys(config, spec, context - 1, context)
    heads, dim = config.num_attention_heads, config.head_dim
    lo, ids = shape(1, 1, dtype=jnp.int32), shape(1, 1, config.index_topk, dtype=jnp.int32)
    counted = xla_flops(
        functools.partial(sparse_attention.sparse_attention, window=config.sliding_window),
        shape(1, 1, heads, dim),
        shape(1, config.sliding_window, dim),
        lo,
        lo,
        shape(1, context // 2, dim),
        ids,
        shape(heads),
    )
    ours = flops.query_side(config, spec, 1, met)["attention_core", "bf16"]
    assert counted == pytest.approx(ours, rel=OP_TOLERANCE)


def test_index_scores_agree_with_xla():
    config = presets.v41_flash()
    spec = config.layers[20]
    context = 4096
    met = flops.keys(config, spec, context - 1, context)
    heads, dim = config.index_n_heads, config.index_head_dim
    lo = shape(1, 1, dtype=jnp.int32)
    counted = xla_flops(
        indexer.scores,
        shape(1, 1, heads, dim),
        shape(1, 1, heads),
        shape(1, context, dim),
        lo,
        lo,
    )
    ours = flops.query_side(config, spec, 1, met)["index_scores", "fp4"]
    assert counted == pytest.approx(ours, rel=OP_TOLERANCE)


def test_flops_agree_with_a_compiled_forward_pass():
    # No repeated units and one Reuse layer at a time, since XLA counts the body of a loop once.
    config = presets.tiny(
        hidden_size=512,
        num_hidden_layers=5,
        compress_ratios=(0, 2, 1, 1, 1),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 4),
        candidate_source_layer_id=2,
        engram_layer_ids=(0, 2),
        num_attention_heads=8,
        head_dim=128,
        q_lora_rank=256,
        o_lora_rank=128,
        moe_intermediate_size=384,
        index_n_heads=8,
        sliding_window=16,
        index_topk=16,
        candidate_topk_blocks=8,
        candidate_block_size=4,
        # No products, but much to compile.
        main_kv_format="none",
        window_kv_format="none",
        index_format="none",
    )
    assert all(group.repeats == 1 and group.reuse <= 1 for group in config.groups)
    tokens = 32

    def forward(params, *inputs):
        return logits(params, CED(config).apply({"params": params}, *inputs).hidden)

    init = functools.partial(CED(config).init, jax.random.key(0))
    inputs = abstract_inputs(config, tokens)
    params = nn.unbox(jax.eval_shape(init, *inputs)["params"])
    compiled = jax.jit(forward).lower(params, *inputs).compile()

    expected = flops.head(config, tokens)
    for spec in config.layers:
        # The XLA definitions multiply masked keys too: all window rows that some query of the batch
        # sees, every selected slot, every index key, the whole pool.
        selected = config.index_topk if spec.ratio else 0
        scored = 0
        if spec.mode in ("full", "reindex"):
            pooled = config.candidate_topk_blocks * config.candidate_block_size
            scored = pooled if spec.pool == "use" else tokens // spec.ratio
        met = flops.Keys(*(tokens * keys for keys in (tokens, selected, scored)))
        expected += flops.query_side(config, spec, tokens, met)
        if spec.mode == "full":
            expected += flops.cache_side(config, spec, tokens)
    # The experts' products are a loop over blocks of rows.
    rows = tokens * config.num_experts_per_tok
    expected["routed_experts", "fp8"] *= block_rows(rows, config.n_routed_experts) / rows
    counted = compiled.cost_analysis()["flops"]
    assert counted == pytest.approx(flops.total(expected), rel=MODEL_TOLERANCE)


def test_accounting_needs_the_standard_library_alone():
    code = "import sys; from v41flash.accounting import rows; print(*sorted(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in result.stdout.split()}
    assert not loaded & {"jax", "jaxlib", "flax", "optax", "orbax", "numpy", "ml_collections"}
    ours = {name for name in result.stdout.split() if name.startswith("v41flash.")}
    assert {name.split(".")[1] for name in ours} == {
        "accounting",
        "checkpoints",
        "config",
        "config_checks",
    }
