"""Random configurations for hypothesis: schedules that can work, and values of every kind."""

import dataclasses

from hypothesis import strategies as st

from tests.train import micro
from v41flash.config import ModelConfig

# What a mistyped or miscalculated value may be.
ODD_VALUES = st.one_of(
    st.integers(-3, 9),
    st.sampled_from([2**31, 2**63, -(2**40), 1 << 100]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.booleans(),
    st.none(),
    st.text(max_size=4),
    st.sampled_from(["fp4", "mxfp4", "none", "bfloat16", "float32", "float64", "zero"]),
    st.lists(st.integers(-2, 5), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
FIELDS = [field.name for field in dataclasses.fields(ModelConfig)]


@st.composite
def schedules(draw):
    """Overrides that make another schedule: windows, an encoder, a decoder, its index sources."""
    windows = draw(st.integers(0, 2))
    encoders = draw(st.lists(st.integers(1, 2), max_size=2))  # layers of every encoder source
    ratio = draw(st.sampled_from([2, 4, 8]))
    decoder = draw(st.integers(1, 3))
    sources, at = [], windows
    for size in encoders:
        sources.append(at)
        at += size
    first = at
    sources.append(first)
    reindex = draw(st.sets(st.integers(first + 1, first + 3), max_size=2))
    reindex = sorted(layer for layer in reindex if layer < first + decoder)
    return {
        "num_hidden_layers": first + decoder,
        "compress_ratios": (0,) * windows + (ratio,) * (first - windows) + (1,) * decoder,
        "kv_source_layer_ids": tuple(sources),
        "index_source_layer_ids": (*sources, *reindex),
        "candidate_source_layer_id": first if reindex else None,
    }


@st.composite
def widths(draw):
    """Overrides of sizes and switches."""
    heads = draw(st.sampled_from([1, 2, 4]))
    groups = draw(st.sampled_from([g for g in (1, 2, 4) if heads % g == 0]))
    experts = draw(st.integers(1, 5))
    return {
        "num_attention_heads": heads,
        "o_groups": groups,
        "hidden_size": draw(st.sampled_from([8, 32, 40])),
        "head_dim": draw(st.sampled_from([32, 64])),
        "qk_rope_head_dim": draw(st.sampled_from([8, 16])),
        "q_lora_rank": draw(st.sampled_from([8, 32])),
        "sliding_window": draw(st.integers(1, 9)),
        "index_n_heads": draw(st.integers(1, 3)),
        "index_topk": draw(st.integers(1, 20)),
        "candidate_topk_blocks": draw(st.integers(1, 4)),
        "candidate_block_size": draw(st.sampled_from([1, 2, 4, 8])),
        "n_routed_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "n_shared_experts": 1,
        "hc_mult": draw(st.integers(1, 4)),
        "hc_sinkhorn_iters": draw(st.integers(1, 3)),
        "main_kv_format": draw(st.sampled_from(["fp4", "none"])),
        "window_kv_format": draw(st.sampled_from(["fp8", "none"])),
        "index_format": draw(st.sampled_from(["mxfp4", "none"])),
        "use_candidate_pool": draw(st.booleans()),
        "dense_selection": draw(st.booleans()),
        "replay_segment": draw(st.sampled_from([0, 8, 16])),
        "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
    }


# The smallest schedule.
ONE_LAYER = {
    "num_hidden_layers": 1,
    "compress_ratios": (1,),
    "kv_source_layer_ids": (0,),
    "index_source_layer_ids": (0,),
    "candidate_source_layer_id": None,
}


@st.composite
def models(draw, *, odd=2, schedule=None):
    """Fields of a ModelConfig: a schedule, sizes, and up to `odd` fields with an odd value.

    Where a `schedule` is given it is that one, without Engram.
    """
    values = micro.model().to_dict()
    if schedule or draw(st.booleans()):
        values |= dict(
            engram_layer_ids=(), engram_num_embeddings=(), engram_max_ngram_size=0,
            engram_n_heads=0, engram_head_dim=0, engram_vocab_size=0,
            engram_compressed_vocab_size=0,
        )  # fmt: skip
    values |= schedule or draw(schedules())
    values |= draw(widths())
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=odd, unique=True)):
        values[name] = draw(ODD_VALUES)
    return values
