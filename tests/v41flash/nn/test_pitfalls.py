"""Mistakes that others made implementing this family, and the test that would catch each here."""

import ast
import collections
import functools
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from tests.v41flash.nn import samples
from v41flash import presets
from v41flash.checkpoints import names
from v41flash.kernels import Kernels
from v41flash.nn.context import make_context
from v41flash.nn.csa2 import CSA2

TESTS = pathlib.Path(__file__).parents[2]
GOLDEN = "test_golden.py::test_every_recorded_family_is_reproduced"
NN = "v41flash/nn/"
OPS = "pallas_kernels/"

COVERED = {
    "the indexer sees future groups": (
        f"{NN}test_packing.py::test_logits_do_not_depend_on_later_tokens",
        f"{NN}test_context.py::test_visible_groups",
    ),
    "padded mask columns let every query see every entry": (
        f"{NN}test_packing.py::test_packed_documents_are_as_if_alone",
    ),
    "padding is pooled into compressed entries": (
        f"{NN}test_packing.py::test_padding_does_not_matter",
    ),
    "rotate-half instead of adjacent pairs": (
        f"{NN}test_rope.py::test_rotation_and_its_inverse_are_the_recorded_ones",
    ),
    "eps on post, Sinkhorn in the wrong order, comb not transposed": (
        GOLDEN,
        f"{NN}test_stack.py::test_scanned_groups_without_rounding",
    ),
    "YaRN's attention factor": (f"{NN}test_rope.py::test_yarn_ramp_and_no_attention_factor",),
    "entries rotated at another position, or the output not rotated back": (GOLDEN,),
    "-1 clipped to entry 0": (GOLDEN, f"{OPS}test_sparse_attention.py::test_equals_loop"),
    "NaN among scores": (f"{OPS}test_topk.py::test_special_values",),
    "indexer scores of all queries at once": (
        f"{NN}test_memory.py::test_no_array_is_as_large_as_queries_times_entries",
        f"{NN}test_memory.py::test_memory_is_linear_in_the_row_and_below_the_limit",
    ),
    "results depend on how many tokens are processed together": (
        f"{NN}test_packing.py::test_packed_documents_are_as_if_alone",
    ),
    "ties at exactly zero broken by row width": (
        f"{OPS}test_indexer.py::test_packed_documents_select_what_they_select_alone",
        f"{OPS}test_indexer.py::test_signed_zero_scores_tie",
    ),
    "index_topk hard-coded": (GOLDEN, f"{NN}test_stack.py::test_scanned_groups_without_rounding"),
    "hyper-connections in bfloat16, or the carried pre cast": (
        f"{NN}test_mhc.py::test_coefficients_are_float32_on_bfloat16_streams",
    ),
    "index score other than a weighted sum of ReLUs": (
        f"{NN}test_csa2.py::test_the_pool_restricts_reindex_layers_alone",
    ),
    "SwiGLU limit missing, also of the shared expert, or the gate cut from below": (
        f"{NN}test_moe.py::test_equals_a_loop_over_tokens",
        f"{NN}test_moe.py::test_the_limit_clamps_the_gate_from_above_and_the_input_from_both_sides",
    ),
    "sinks never initialised": (f"{NN}test_pitfalls.py::test_sinks_start_at_zero",),
    "prefixes of some residue, shorter than m or the window, or across top-k": (
        f"{NN}test_packing.py::test_logits_do_not_depend_on_later_tokens",
    ),
    "Engram multipliers from the whole vocabulary, history across documents": (
        "v41flash/text/test_engram_hash.py::test_released_tables_and_rows",
        f"{NN}test_engram.py::test_history_ends_at_the_start_of_a_document",
    ),
    "fake quantisation left out": (
        GOLDEN,
        f"{NN}test_csa2.py::test_a_format_rounds_what_it_names_and_nothing_else",
    ),
    "a compressor for every compressed layer": (
        f"{NN}test_pitfalls.py::test_four_layers_own_a_cache_and_eight_an_indexer",
    ),
    "replay that changes more than decoder windows": (
        f"{NN}test_stack.py::test_replay_cuts_the_windows_of_the_decoder_alone",
        f"{NN}test_context.py::test_windows",
    ),
    "indexer teacher from a softmax of its own, or no indexer loss": (
        f"{OPS}test_sparse_attention.py::test_selected_mass",
        f"{NN}test_gradients.py::test_the_indexer_learns_from_its_own_loss_alone",
    ),
    "routed scaling on some layers only": (GOLDEN,),
    "gradients of all-zero rows through an eps of 1e-20": (
        f"{NN}test_gradients.py::test_a_row_of_padding_gives_finite_gradients",
    ),
    "head read-out and query norm of the previous model": (
        GOLDEN,
        f"{NN}test_stack.py::test_scanned_groups_without_rounding",
    ),
}


@functools.cache
def functions(path):
    """name -> whether the function as a whole is marked slow."""
    tree = ast.parse(path.read_text()).body
    return {
        node.name: any(ast.unparse(mark) == "pytest.mark.slow" for mark in node.decorator_list)
        for node in tree
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("mistake", COVERED)
def test_the_covering_tests_exist_and_not_all_are_slow(mistake):
    slow = []
    for test in COVERED[mistake]:
        path, name = test.split("::")
        assert name in functions(TESTS / path), test
        slow.append(functions(TESTS / path)[name])
    assert not all(slow)


def test_four_layers_own_a_cache_and_eight_an_indexer():
    config = presets.v41_flash()
    owners = collections.defaultdict(list)
    for spec in config.layers:
        for source in names.layer_sources(config, spec):
            owners["/".join(source.path)].append(spec.index)
    assert owners["attn/compressor/wkv"] == [2, 8, 14, 20]
    assert owners["attn/compressor/wgate"] == [2, 8, 14]
    assert owners["attn/indexer/wk"] == owners["attn/indexer/k_norm"] == [2, 8, 14, 20]
    assert owners["attn/indexer/wq_b"] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert owners["engram/table"] == [1, 14]


def test_sinks_start_at_zero():
    config = samples.two_layers()
    row = jnp.zeros((1, 8), jnp.int32)
    context = make_context(config, row, row + 1, None)
    module = CSA2(config, config.layers[0], Kernels())
    x = jnp.ones((*row.shape, config.hidden_size))
    init = jax.jit(module.init, compiler_options=samples.QUICK_COMPILE)
    sink = nn.unbox(init(jax.random.key(0), x, None, context)["params"]["sink"])
    assert sink.shape == (config.num_attention_heads,) and not sink.any()
