"""The smallest model and corpus on which a whole run makes sense; compiles in seconds."""

import dataclasses
import pathlib

from ml_collections import ConfigDict

from configs import _defaults
from v41flash import presets
from v41flash.text.engram_hash import table_primes

_WORDS = "the cat sat on a mat while nine dogs ran round their old house and barked".split()


def write_corpus(folder: pathlib.Path, documents: int = 24) -> None:
    """Text files of a few sentences, all different."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        words = [_WORDS[(number * 7 + k * (number + 3)) % len(_WORDS)] for k in range(60)]
        (folder / f"{number}.txt").write_text(f"{number}: " + " ".join(words))


def model():
    """Two layers: Full (m = 2) with Engram, Full (m = 1)."""
    primes = table_primes(31, 3, 1, 1)
    return dataclasses.replace(
        presets.tiny(),
        vocab_size=260,
        image_token_id=259,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        q_lora_rank=16,
        o_lora_rank=8,
        compress_ratios=(2, 1),
        kv_source_layer_ids=(0, 1),
        index_source_layer_ids=(0, 1),
        candidate_source_layer_id=None,
        n_routed_experts=4,
        moe_intermediate_size=16,
        hc_sinkhorn_iters=1,
        index_format="none",
        engram_layer_ids=(0,),
        engram_num_embeddings=tuple(sum(sum(order) for order in site) for site in primes),
        engram_max_ngram_size=3,
        engram_n_heads=1,
        engram_vocab_size=31,
        engram_compressed_vocab_size=230,
    )


def config(folder: pathlib.Path, *, write: bool = True) -> ConfigDict:
    """A whole configuration over a corpus that is written to `folder`, or lies there already."""
    if write:
        write_corpus(folder / "text")
    result = _defaults.get_config(model())
    result.data.kind = "text"
    result.data.path = str(folder / "text")
    result.data.cache_dir = str(folder / "cache")
    result.data.sequence_length = 32
    result.data.batch_size = 4
    result.data.held_out_fraction = 0.25
    result.data.prefetch = 0
    result.optimizer.learning_rate = 1e-2
    result.optimizer.warmup_steps = 2
    result.train.steps = 8
    result.train.log_every = 1
    result.train.checkpoint_every = 100
    result.eval.batches = 2
    result.eval.sample_tokens = 0
    result.eval.byte_ngram = False
    return result.lock()
