"""Checks the model against a folder of recorded numbers.

    python -m tests.golden_check tests/golden/layout_i

The folder holds `config.json` (published key names), `weights.safetensors` (published tensor names,
float32), `token_map.json` and recorded runs: `*_fakequant.npz` and `*_noquant.npz` with the arrays
of every layer, `*_decode.npz` with the last logits of every prefix, `*_multimodal.npz` with images
(its folder may hold only `weights_extra.safetensors`, the rest one folder above). Without
`weights.safetensors` it is a folder in the published storage, and `*_storage.npz` holds dequantised
weights and runs with them. One line is printed per family of arrays with its worst error; the exit
status is 1 if one is off.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from pallas_kernels import indexer as indexer_op
from tests import golden_multimodal, golden_storage
from tests.v41flash.nn.samples import QUICK_COMPILE
from v41flash.checkpoints import names
from v41flash.checkpoints.published import Published
from v41flash.config import ModelConfig
from v41flash.image_rows import TEXT
from v41flash.nn import ced
from v41flash.nn.vision import ImageBatch
from v41flash.text.engram_hash import EngramHasher

# Recorded with float32 arithmetic in another order of operations: |x - y| <= atol + rtol * |y|.
# Streams reach several tens; selections and ids must be equal.
TOLERANCE = {"logits": (1e-4, 0.0), "default": (2e-4, 1e-4)}


# Of a `*_storage.npz`: the published engine's own run; what of it is compared, see
# `golden_storage`.
_ENGINE = "official_bf16."


class Family(NamedTuple):
    """Result of comparing all arrays of one kind.

    Attributes:
        name: key without its layer prefix.
        arrays: how many were compared.
        error: worst |x - y|, or number of unequal elements where they are discrete.
        worst: worst ratio of error to tolerance; at most 1 where the family is right.
        where: key of the worst array.
    """

    name: str
    arrays: int
    error: float
    worst: float
    where: str


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """A folder of recorded numbers: configuration and weights."""

    folder: pathlib.Path
    config: ModelConfig
    params: Any
    hasher: EngramHasher
    compressed_ids: np.ndarray
    published: Published | None

    @classmethod
    def load(cls, folder: pathlib.Path) -> Recorded:
        """Reads `folder`; FileNotFoundError or ValueError names what is missing."""
        config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
        # A folder of runs with images holds only what the text model beside it lacks.
        extra = folder / "weights_extra.safetensors"
        base = folder.parent if extra.is_file() else folder
        file = base / "weights.safetensors"
        stored = sorted(base.glob("*.safetensors"))
        published = Published.open(folder) if stored and file not in stored else None
        weights = load_file(file) if published is None else published
        if extra.is_file():
            weights |= load_file(extra)

        def read(name: str) -> np.ndarray:
            if name not in weights:
                raise ValueError(f"{file}: holds no tensor {name!r}")
            if published is not None:
                return published.values(name).astype(np.float32)
            return weights[name]

        token_map = json.loads((base / "token_map.json").read_text())
        params = jax.tree.map(jnp.asarray, names.to_params(config, read))
        hasher = EngramHasher.from_config(config, token_map["pad_compressed_id"])
        ids = np.asarray(token_map["compressed_id"])
        return cls(folder, config, params, hasher, ids, published)

    def model(self, fake_quantize: bool) -> ced.CED:
        """The model in float32, with or without fake quantisation."""
        config = dataclasses.replace(self.config, dtype="float32")
        if not fake_quantize:
            none = {"main_kv_format": "none", "window_kv_format": "none", "index_format": "none"}
            config = dataclasses.replace(config, **none)
        return ced.CED(config)

    def inputs(
        self, tokens: np.ndarray, length: int, images: ImageBatch | None = None
    ) -> tuple[Any, ...]:
        """Model inputs of the first `length` tokens: a batch of one row, the rest padding."""
        row = np.arange(len(tokens), dtype=np.int32)[None]
        segment_ids = (row < length).astype(np.int32)
        positions = row * segment_ids
        dead = None if images is None else images.source != TEXT
        rows = self.hasher.rows(self.compressed_ids[tokens][None], positions, dead)
        return tokens[None].astype(np.int32), positions, segment_ids, rows, images

    @functools.cache  # noqa: B019 (a folder lives as long as the check that reads it)
    def forward(self, fake_quantize: bool) -> Callable[..., Any]:
        """jitted (params, *inputs) -> (intermediates, hidden [1, T, d], logits [1, T, V])."""
        model = self.model(fake_quantize)

        def forward(params: Any, *inputs: jax.Array) -> Any:
            outputs, state = model.apply({"params": params}, *inputs, mutable=["intermediates"])
            return state["intermediates"], outputs.hidden, ced.logits(params, outputs.hidden)

        # Without any optimisation, XLA sums the image encoder's long products one term at a time.
        level = {"xla_backend_optimization_level": "1"} if self.config.vision else {}
        return jax.jit(forward, compiler_options=QUICK_COMPILE | level)

    def run(
        self,
        fake_quantize: bool,
        tokens: np.ndarray,
        length: int | None = None,
        images: ImageBatch | None = None,
    ) -> tuple[dict[str, Any], np.ndarray]:
        """(intermediates, logits [length, V]) of a forward pass over the first `length` tokens."""
        length = len(tokens) if length is None else length
        inputs = self.inputs(tokens, length, images)
        kept, hidden, logits = jax.device_get(self.forward(fake_quantize)(self.params, *inputs))
        kept |= {"hidden": (hidden,), "inputs": inputs}
        return kept, logits[0, :length]


class Layer:
    """Intermediates of one layer, out of their stacked axes and without the batch axis."""

    def __init__(self, recorded: Recorded, kept: dict[str, Any], layer: int):
        keys, self._index = names.place(recorded.config, layer)
        self._kept = kept[keys[0]][keys[1]]

    def __getitem__(self, path: str) -> np.ndarray:
        node = self._kept
        for key in path.split("/"):
            node = node[key]
        return node[0][self._index][0]


# Recorded key -> where the model leaves that value.
DIRECT = {
    "x_in": "hc_attn/streams",
    "x_mid": "hc_ffn/streams",
    **{f"{hc}.{c}": f"{hc}/{c}" for hc in ("hc_attn", "hc_ffn") for c in ("pre", "post", "comb")},
    "attn.in": "hc_attn/x",
    "attn.q": "attn/q",
    "attn.win_kv": "attn/win_kv",
    "attn.latent": "attn/latent",
    "attn.comp_kv": "attn/comp_kv",
    "attn.o_rot": "attn/o_rot",
    "attn.out": "attn_out",
    "idx.k": "attn/indexer/k",
    "idx.q": "attn/indexer/q",
    "idx.w": "attn/indexer/w",
    "ffn.in": "hc_ffn/x",
    "ffn.out": "ffn_out",
    "ffn.scores": "ffn/router/scores",
    "engram.gate": "engram/gate",
    "engram.x_before": "engram/x_before",
}
TOP = {"embed": "embed", "final_norm": "hidden"}


def _selection(layer: Layer, length: int, entries: int) -> np.ndarray:
    mask = np.zeros((length, entries + 1), bool)
    indices = layer["attn/indices"][:length]
    np.put_along_axis(mask, np.where(indices < 0, entries, indices), True, axis=1)
    return mask[:, :entries]


def _pool_mask(layer: Layer, length: int, entries: int, size: int) -> np.ndarray:
    blocks = layer["attn/pool_blocks"][:length]
    count = -(-entries // size)
    kept = np.zeros((length, count + 1), bool)
    np.put_along_axis(kept, np.where(blocks < 0, count, blocks), True, axis=1)
    return np.repeat(kept[:, :count], size, axis=1)[:, :entries]


def _index_scores(layer: Layer, source: Layer, length: int, entries: int, m: int) -> np.ndarray:
    hi = (np.arange(length, dtype=np.int32)[None] + 1) // m
    q, w = layer["attn/indexer/q"][None, :length], layer["attn/indexer/w"][None, :length]
    keys = source["attn/indexer/k"][None, :entries]
    return np.asarray(indexer_op.scores(q, w, keys, np.zeros_like(hi), hi))[0]


def _gap(score: np.ndarray, selected: np.ndarray, reachable: np.ndarray) -> np.ndarray:
    """Smallest selected minus largest unselected reachable score; +inf where none is left out."""
    low = np.where(selected, score, np.inf).min(-1)
    high = np.where(reachable & ~selected, score, -np.inf).max(-1)
    return np.where(high == -np.inf, np.inf, low - high)


def computed(
    recorded: Recorded, kept: dict[str, Any], logits: np.ndarray, tokens: np.ndarray, key: str
) -> np.ndarray:
    """Our value of the recorded array `key` (see `KEYS.md` beside the recorded folders).

    Raises:
        KeyError: the model has no such value.
    """
    config, length = recorded.config, len(tokens)
    if key == "logits":
        return logits
    if key == "compressed_ids":
        return recorded.compressed_ids[tokens]
    if key in TOP:
        return kept[TOP[key]][0][0, :length]
    name = _family(key)
    number = int(key[1:3]) if name != key else config.num_hidden_layers
    if number >= config.num_hidden_layers:
        raise KeyError(key)
    if name == "x_out":
        return kept["x_out"][0][0, :length]
    layer = Layer(recorded, kept, number)
    spec = config.layers[number]
    entries = length // spec.ratio if spec.ratio else 0
    if name in DIRECT:
        grouped = name in ("attn.latent", "attn.comp_kv", "idx.k")
        return layer[DIRECT[name]][: entries if grouped else length]
    if name == "engram.hash_ids":
        return kept["inputs"][3][0, :, spec.engram]
    if name in ("ffn.topk_idx", "ffn.topk_w"):
        chosen = layer["ffn/router/topk_idx"][:length]
        order = np.argsort(chosen, axis=-1)
        values = chosen if name == "ffn.topk_idx" else layer["ffn/router/topk_w"][:length]
        return np.take_along_axis(values, order, axis=-1)
    if name == "idx.topk_mask":
        return _selection(layer, length, entries)
    if name == "idx.cand":
        return _pool_mask(layer, length, entries, config.candidate_block_size)
    if not spec.ratio:
        raise KeyError(key)
    source = Layer(recorded, kept, spec.kv_source)
    score = _index_scores(layer, source, length, entries, spec.ratio)
    if name == "idx.score":
        return score
    if name == "idx.gap":
        reachable = score > -np.inf
        if spec.pool == "use":
            pool = Layer(recorded, kept, config.candidate_source_layer_id)
            reachable &= _pool_mask(pool, length, entries, config.candidate_block_size)
        return _gap(score, _selection(layer, length, entries), reachable)
    raise KeyError(key)


def compare(key: str, ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """(error, ratio of error to tolerance) of one array; see `Family`."""
    if ours.shape != theirs.shape:
        return np.inf, np.inf
    if theirs.dtype.kind in "bi":
        unequal = int(np.sum(ours != theirs))
        return unequal, np.inf if unequal else 0.0
    atol, rtol = TOLERANCE["logits" if key.endswith("logits") else "default"]
    same = ours == theirs
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(ours - theirs))
        ratio = np.where(same, 0.0, error / (atol + rtol * np.abs(theirs)))
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    return float(np.nan_to_num(error, nan=np.inf).max()), float(ratio.max())


def _family(key: str) -> str:
    return key[4:] if key[0] == "L" and key[1:3].isdigit() and key[3] == "." else key


def _load(run: pathlib.Path, *needed: str) -> Any:
    arrays = np.load(run, allow_pickle=False)
    missing = [key for key in needed if key not in arrays]
    if missing:
        raise ValueError(f"{run}: holds no array {missing[0]!r}")
    return arrays


def check_arrays(
    run: pathlib.Path, arrays: Mapping[str, np.ndarray], value: Callable[[str], np.ndarray]
) -> list[Family]:
    """Compares recorded arrays with `value` of their keys, which raises KeyError without one."""
    families: dict[str, Family] = {}
    for key, theirs in arrays.items():
        try:
            ours = value(key)
        except KeyError:
            raise ValueError(f"{run}: holds {key!r}, which this model does not have") from None
        error, ratio = compare(key, ours, theirs)
        name = _family(key)
        before = families.get(name, Family(name, 0, 0.0, 0.0, key))
        where = key if ratio > before.worst else before.where
        families[name] = Family(
            name, before.arrays + 1, max(before.error, error), max(before.worst, ratio), where
        )
    return list(families.values())


def check_run(recorded: Recorded, run: pathlib.Path, fake_quantize: bool) -> list[Family]:
    """Compares every array of a recorded forward pass."""
    arrays = dict(_load(run, "tokens"))
    tokens = arrays.pop("tokens")
    kept, logits = recorded.run(fake_quantize, tokens)
    return check_arrays(run, arrays, lambda key: computed(recorded, kept, logits, tokens, key))


def check_storage(recorded: Recorded, run: pathlib.Path) -> Iterator[Family]:
    """Compares the weights of a folder in the published storage, and runs with them in float32."""
    arrays = dict(_load(run, "tokens"))
    tokens = arrays.pop("tokens")
    published = recorded.published
    if published is None:
        raise ValueError(f"{run}: belongs to a folder in the published storage")
    checked = golden_storage.check_weights(published, recorded.folder / "dequant_check.json")
    yield Family("weights", *checked)
    kept, logits = recorded.run(False, tokens)
    plain = functools.partial(computed, recorded, kept, logits, tokens)
    rounded = functools.partial(computed, recorded, *recorded.run(True, tokens), tokens)

    hidden = golden_storage.draft_hidden(published, lambda layer: plain(f"L{layer:02d}.x_in"))
    parts = {
        "dequantised.": published.values,
        "fp32_noquant.": plain,
        "fp32_fakequant.": rounded,
        "spec.fp32_noquant.": golden_storage.draft_values(published, tokens, hidden),
    }
    for part, value in parts.items():
        for family in check_arrays(run, _taken(arrays, part), value):
            yield family._replace(name=part + family.name)
    if "mm.tokens" in arrays:
        for family in check_multimodal(recorded, run, _taken(arrays, "mm.")):
            yield family._replace(name="mm." + family.name)
    engine = _taken(arrays, _ENGINE)
    for result in golden_storage.check_engine(published, engine, len(tokens)):
        family = Family(*result)
        yield family._replace(name=_ENGINE + family.name)
    for key in arrays:
        raise ValueError(f"{run}: holds {key!r}, which this check does not know")


def _taken(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The arrays whose keys begin with `prefix`, without it; they leave `arrays`."""
    keys = [key for key in arrays if key.startswith(prefix)]
    return {key.removeprefix(prefix): arrays.pop(key) for key in keys}


def check_multimodal(
    recorded: Recorded, run: pathlib.Path, arrays: dict[str, np.ndarray]
) -> list[Family]:
    """Compares a recorded run with images: without fake quantisation, and the logits of two others.

    `fakequant.logits` are those with it, `ignoring_images.logits` those of the same ids as text.
    """
    tokens, vision = arrays.pop("tokens"), recorded.config.vision
    if vision is None:
        raise ValueError(f"{run}: a run with images, and the model has no image encoder")
    images = golden_multimodal.recorded_images(vision, arrays)
    batch = golden_multimodal.image_batch(vision, images, len(tokens))
    arrays = {k: v for k, v in arrays.items() if not k.endswith(golden_multimodal.GIVEN)}
    kept, logits = recorded.run(False, tokens, images=batch)

    def value(key: str) -> np.ndarray:
        if key == "token_types":
            return golden_multimodal.token_types(batch.source[0])
        if key == "fp32_noquant.logits":
            return logits
        if key == "ignoring_images.logits":
            return recorded.run(False, tokens)[1]
        if key.startswith("image"):
            return golden_multimodal.image_value(vision, images, kept, key)
        return computed(recorded, kept, logits, tokens, key)

    quantised = arrays.pop("fakequant.logits", None)
    families = check_arrays(run, arrays, value)
    if quantised is not None:
        logits = recorded.run(True, tokens, images=batch)[1]
        families.append(_without_flips("fakequant.logits", logits, quantised))
    return families


def _without_flips(key: str, ours: np.ndarray, theirs: np.ndarray) -> Family:
    """Compares logits whose weights were not chosen to stay clear of rounding boundaries.

    A value rounded the other way moves the rows that see it: a fifth of the rows may be off.
    """
    if ours.shape == theirs.shape:
        order = np.argsort(np.abs(ours - theirs).max(-1))[: -(-4 * len(ours) // 5)]
        ours, theirs = ours[order], theirs[order]
    return Family(f"{key} (4/5)", 1, *compare(key, ours, theirs), key)


def check_prefixes(recorded: Recorded, run: pathlib.Path) -> list[Family]:
    """Compares the last logits of prefills of the first L tokens, for every L.

    By causality they are the rows of one prefill of all tokens, and those of a few prefixes are
    also computed alone.
    """
    modes = ("noquant", "fakequant")
    arrays = _load(run, "tokens", *(f"prefill_logits.{mode}" for mode in modes))
    tokens = arrays["tokens"]
    families = []
    for mode in modes:
        theirs = arrays[f"prefill_logits.{mode}"]
        _, whole = recorded.run(mode == "fakequant", tokens)
        name = f"prefill_logits.{mode}"
        families.append(Family(name, 1, *compare("logits", whole, theirs), name))
        for length in (1, 2, 9, len(tokens) // 2):
            _, logits = recorded.run(mode == "fakequant", tokens, length)
            result = compare("logits", logits, theirs[:length])
            families.append(Family(f"{name}[:{length}]", 1, *result, name))
    return families


def check_folder(folder: pathlib.Path) -> Iterator[tuple[str, Family]]:
    """Yields (run, result) for every recorded run of `folder`."""
    recorded = Recorded.load(folder)
    runs = sorted(folder.glob("*.npz"))
    if not runs:
        raise FileNotFoundError(f"{folder}: holds no recorded run (*.npz)")
    for run in runs:
        if run.stem.endswith("_decode"):
            results = check_prefixes(recorded, run)
        elif run.stem.endswith("_multimodal"):
            results = check_multimodal(recorded, run, dict(_load(run, "tokens", "token_types")))
        elif run.stem.endswith(("_fakequant", "_noquant")):
            results = check_run(recorded, run, run.stem.endswith("_fakequant"))
        elif run.stem.endswith("_storage"):
            results = check_storage(recorded, run)
        else:
            kinds = "_fakequant, _noquant, _multimodal, _decode or _storage"
            raise ValueError(f"{run}: name must end in {kinds}")
        for family in results:
            yield run.stem, family


def main(argv: list[str]) -> int:
    """Command line: returns the exit status."""
    if len(argv) != 2:
        print("usage: python -m tests.golden_check DIR", file=sys.stderr)
        return 2
    try:
        for run, family in check_folder(pathlib.Path(argv[1])):
            right = family.worst <= 1
            print(
                f"{'ok  ' if right else 'FAIL'} {run:14s} {family.name:24s}"
                f" arrays {family.arrays:2d}"
                f"  worst error {family.error:.2e}  of tolerance {family.worst:.2f}"
                + ("" if right else f"  first at {family.where}")
            )
            if not right:
                return 1
    except (OSError, ValueError) as error:
        print(f"golden_check: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
