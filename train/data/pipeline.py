"""From `config.data` to packed batches: the only module of `train.data` that a training loop calls.

    data = pipeline.from_config(config.data, model_config)
    iterator = data.train_iterator(start_step=0, host_index=0, host_count=1)
    batch = next(iterator)                       # this host's slice of the global batch
    batch, host_fields = pipeline.split_host_fields(batch)
    saved = iterator.state()                     # JSON-able, {"step": 1, "fingerprint": "..."}
    iterator.set_state(saved)
    for batch in data.heldout_batches(limit=8):  # at most 8 batches, the same ones every time
        ...

A batch is a dict of NumPy arrays (B rows of this host, T = sequence_length, S Engram sites,
R table rows per token and site):

    tokens        i32[B,T]       padding holds the pad token
    targets       i32[B,T]       the token that follows in the same document
    loss_mask     f32[B,T]       1 where there is a target, 0 on padding
    segment_ids   i32[B,T]       1, 2, .. per document piece in the row; 0 on padding
    positions     i32[B,T]       0-based inside the piece; 0 on padding
    engram_rows   i32[B,T,S,R]   offset included
    document_ids  i64[B,T//8]    host field: ids of the row's documents in order, -1 padded
    row_bytes     i64[B]         host field: bytes of text that the row's targets stand for

The batch at step s depends on the data, `seed`, `batch_size`, `sequence_length`, `pack_window` and
s alone; host h of n gets rows [h*B/n, (h+1)*B/n) of it.

Keys of `config.data` (`default_config()` returns them):

    kind               "builtin"  builtin | text | jsonl | parquet | array_record
    path               ""         a file, a folder or a glob (not for builtin)
    pattern            ""         glob inside the folder; "" = the kind's own (text: every file)
    text_field         "text"     field of a row; "" = ArrayRecord records are themselves text
    tokenizer          "byte"     "byte" | "published" | path of a tokenizer.json
    sequence_length    256        tokens a row, a multiple of 8
    batch_size         8          rows of the global batch
    held_out_fraction  0.05       documents kept for evaluation, chosen by document hash
    seed               0          order of documents and rows
    cache_dir          ""         tokenised corpora; "" = v41flash in $XDG_CACHE_HOME or ~/.cache
    pack_window        4096       document pieces that are packed together
    prefetch           4          batches prepared ahead by threads; 0 = none
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grain
import numpy as np
from ml_collections import ConfigDict

from train.data import packing, sources
from train.data import store as store_lib
from v41flash.text import canonical
from v41flash.text import tokenizer as tokenizer_lib
from v41flash.text.engram_hash import EngramHasher
from v41flash.text.tokenizer import Tokenizer

# For error reports and bits per byte on the host; the model never sees them.
HOST_FIELDS = ("document_ids", "row_bytes")
Batch = dict[str, np.ndarray]

_MAX_PREFETCH_THREADS = 4
# grain wants a length; this many steps are never reached.
_ENDLESS = 1 << 40


def default_config() -> ConfigDict:
    """The `data` section with its defaults; the module docstring says what every key means."""
    return ConfigDict(
        dict(
            kind="builtin",
            path="",
            pattern="",
            text_field="text",
            tokenizer="byte",
            sequence_length=256,
            batch_size=8,
            held_out_fraction=0.05,
            seed=0,
            cache_dir="",
            pack_window=4096,
            prefetch=4,
        )
    )


def split_host_fields(batch: Batch) -> tuple[Batch, Batch]:
    """Splits a batch into what goes to the device and what stays on the host."""
    device = {name: value for name, value in batch.items() if name not in HOST_FIELDS}
    return device, {name: batch[name] for name in HOST_FIELDS}


class _Epochs:
    """Rows 0, 1, 2, .. of an endless sequence of epochs, each shuffled and packed anew."""

    def __init__(self, lengths: np.ndarray, sequence_length: int, seed: int, window: int):
        self._lengths = lengths
        self._arguments = dict(seed=seed, window=window)
        self._sequence_length = sequence_length
        self._first_row = [0]  # of every epoch packed so far, and the one after
        self._plans: dict[int, packing.Plan] = {}
        self._lock = threading.Lock()  # prefetch threads share the plans

    def _plan(self, epoch: int) -> packing.Plan:
        if epoch not in self._plans:
            plan = packing.pack(
                self._lengths, self._sequence_length, epoch=epoch, **self._arguments
            )
            self._plans[epoch] = plan
            # Prefetch threads are a few batches apart, so they share two or three epochs.
            while len(self._plans) > 3:
                del self._plans[next(iter(self._plans))]  # the one packed first
            if epoch == len(self._first_row) - 1:
                self._first_row.append(self._first_row[-1] + plan.num_rows)
        return self._plans[epoch]

    def plan(self, epoch: int) -> packing.Plan:
        with self._lock:
            return self._plan(epoch)

    def locate(self, row: int) -> tuple[packing.Plan, int]:
        """The plan that holds a row, and the row's number in it."""
        with self._lock:
            # Packing decides how many rows an epoch has, so all before it get packed once.
            while self._first_row[-1] <= row:
                self._plan(len(self._first_row) - 1)
            epoch = int(np.searchsorted(self._first_row, row, side="right")) - 1
            return self._plan(epoch), row - self._first_row[epoch]


def _build_batch(
    store: store_lib.Store,
    documents: np.ndarray,
    rows: list[tuple[packing.Plan, int]],
    sequence_length: int,
    pad_id: int,
) -> Batch:
    """Packs `rows`: plan and row number each; a row past the plan's end is all padding."""
    shape = (len(rows), sequence_length)
    batch = dict(
        tokens=np.full(shape, pad_id, np.int32),
        targets=np.full(shape, pad_id, np.int32),
        loss_mask=np.zeros(shape, np.float32),
        segment_ids=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        document_ids=np.full((len(rows), sequence_length // packing.ALIGNMENT), -1, np.int64),
        row_bytes=np.zeros(len(rows), np.int64),
    )
    for b, (plan, row) in enumerate(rows):
        if row >= plan.num_rows:
            continue
        for segment, piece in enumerate(range(plan.row_first[row], plan.row_first[row + 1])):
            document = documents[plan.document[piece]]
            start, length = int(plan.start[piece]), int(plan.length[piece])
            tokens = store.document_tokens(document)
            place = slice(int(plan.offset[piece]), int(plan.offset[piece]) + length)
            batch["tokens"][b, place] = tokens[start : start + length]
            batch["targets"][b, place] = tokens[start + 1 : start + length + 1]
            batch["loss_mask"][b, place] = 1
            batch["segment_ids"][b, place] = segment + 1
            batch["positions"][b, place] = np.arange(length)
            batch["document_ids"][b, segment] = store.document_ids[document]
            # A document's bytes are shared out over its targets; the pieces' shares add up exactly.
            size, targets = int(store.document_bytes[document]), len(tokens) - 1
            batch["row_bytes"][b] += size * (start + length) // targets - size * start // targets
    return batch


@dataclasses.dataclass(frozen=True)
class _EngramRows:
    """The grain map that adds `engram_rows`."""

    hasher: EngramHasher
    token_map: np.ndarray

    def __call__(self, batch: Batch) -> Batch:
        compressed = self.token_map[batch["tokens"]]
        return batch | {"engram_rows": self.hasher.rows(compressed, batch["positions"])}


class _Steps:
    """grain's random-access source: item s is this host's slice of the batch at step s."""

    def __init__(self, build, description: str):
        self._build = build
        self._description = description

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, step: int) -> Batch:
        return self._build(int(step))

    def __repr__(self) -> str:
        return self._description


class TrainIterator(Iterator[Batch]):
    """Endless batches from a given step on; its state is one step number."""

    def __init__(self, dataset: grain.MapDataset, start_step: int, prefetch: int, fingerprint: str):
        """Use `Data.train_iterator` or `make_dataset`."""
        self._dataset = dataset
        self._read_options = grain.ReadOptions(
            num_threads=min(prefetch, _MAX_PREFETCH_THREADS), prefetch_buffer_size=prefetch
        )
        self._fingerprint = fingerprint
        self._inner: Any = None
        self._seek(start_step)

    def _seek(self, step: int) -> None:
        if not 0 <= step < _ENDLESS:
            raise ValueError(f"step {step}: the data stream has steps 0 .. {_ENDLESS - 1}")
        self.close()
        self.step = step

    def __next__(self) -> Batch:
        """The batch of `self.step`; the step then moves on by one."""
        if self._inner is None:
            rest = self._dataset.slice(slice(self.step, None))
            self._inner = iter(rest.to_iter_dataset(self._read_options))
        batch = next(self._inner)
        self.step += 1
        return batch

    def next(self) -> Batch:
        """The same as `next(iterator)`."""
        return self.__next__()

    def state(self) -> dict[str, Any]:
        """JSON-able state: the step of the next batch, and what stream it counts in."""
        return {"step": self.step, "fingerprint": self._fingerprint}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state that `state()` returned, here or in another process.

        Raises:
            ValueError: the state counts in another stream (other documents, tokenizer, split, seed
                or pack_window; batch size and sequence length may change between stages).
        """
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(
                f"the saved data state belongs to the stream {state['fingerprint']!r}, "
                f"this run's is {self._fingerprint!r}: corpus or data settings "
                "changed since the checkpoint"
            )
        self._seek(int(state["step"]))

    def close(self) -> None:
        """Stops the prefetch threads; the iterator can still go on."""
        if self._inner is not None:
            self._inner.close()
            self._inner = None


def _check_hosts(batch_size: int, host_index: int, host_count: int) -> int:
    if batch_size < 1 or host_count < 1 or batch_size % host_count:
        raise ValueError(
            f"data.batch_size={batch_size}: must be a multiple of the {host_count} hosts"
        )
    if not 0 <= host_index < host_count:
        raise ValueError(f"host_index={host_index}: must be in 0 .. {host_count - 1}")
    return batch_size // host_count


def make_dataset(
    store: store_lib.Store,
    split: str,
    hasher: EngramHasher,
    token_map: np.ndarray,
    *,
    batch_size: int,
    sequence_length: int,
    seed: int,
    pad_id: int,
    held_out_fraction: float,
    pack_window: int = 4096,
    host_index: int = 0,
    host_count: int = 1,
    start_step: int = 0,
    prefetch: int = 4,
) -> TrainIterator:
    """Endless shuffled batches of a store's split.

    Args:
        store: the tokenised corpus.
        split: "train" or "heldout".
        hasher: computes `engram_rows`.
        token_map: i32[V], token id -> canonical id.
        batch_size: rows of the global batch, a multiple of `host_count`.
        sequence_length: tokens a row, a multiple of 8.
        seed: order of documents and rows.
        pad_id: token on padding.
        held_out_fraction: share of documents in "heldout".
        pack_window: pieces packed together.
        host_index: which slice of the global batch this process builds.
        host_count: number of slices.
        start_step: step of the first batch.
        prefetch: batches prepared ahead, 0 for none.

    Returns:
        The iterator.

    Raises:
        ValueError: a batch that does not divide over the hosts, an empty split, a bad length.
    """
    local = _check_hosts(batch_size, host_index, host_count)
    documents = store.split(split, held_out_fraction)
    if not len(documents):
        raise ValueError(
            f"the {split} split has no documents ({len(store.document_ids)} in all, "
            f"data.held_out_fraction={held_out_fraction})"
        )
    epochs = _Epochs(store.lengths[documents], sequence_length, seed, pack_window)
    epochs.plan(0)  # bad settings and a slow first pack show here, not in a prefetch thread

    def build(step: int) -> Batch:
        first = step * batch_size + host_index * local
        rows = [epochs.locate(row) for row in range(first, first + local)]
        return _build_batch(store, documents, rows, sequence_length, pad_id)

    fingerprint = f"{split}-{store.fingerprint}-{held_out_fraction}-{seed}-{pack_window}"
    source = _Steps(build, f"{batch_size}x{sequence_length} steps of {fingerprint}")
    dataset = grain.MapDataset.source(source).map(_EngramRows(hasher, token_map))
    return TrainIterator(dataset, start_step, prefetch, fingerprint)


def make_eval_batches(
    store: store_lib.Store,
    hasher: EngramHasher,
    token_map: np.ndarray,
    *,
    batch_size: int,
    sequence_length: int,
    pad_id: int,
    held_out_fraction: float,
    split: str = "heldout",
    limit: int | None = None,
    host_index: int = 0,
    host_count: int = 1,
) -> Iterator[Batch]:
    """A split once, in an order that never changes; the last batch is filled up with padding rows.

    Pieces of all documents are shuffled once and for all, so a limited number of batches is a fair
    sample of the split. Arguments as for `make_dataset`; `limit` is the largest number of batches.
    The bits per byte of what was read are the summed losses over ln 2 and over the summed
    `row_bytes`.

    Yields:
        Batches of this host's rows; every host gets the same number of them.
    """
    local = _check_hosts(batch_size, host_index, host_count)
    documents = store.split(split, held_out_fraction)
    plan = packing.pack(store.lengths[documents], sequence_length, seed=0, epoch=0)
    add_rows = _EngramRows(hasher, token_map)
    batches = -(-plan.num_rows // batch_size)
    for step in range(batches if limit is None else min(batches, limit)):
        first = step * batch_size + host_index * local
        rows = [(plan, row) for row in range(first, first + local)]
        yield add_rows(_build_batch(store, documents, rows, sequence_length, pad_id))


@dataclasses.dataclass(frozen=True)
class Data:
    """Everything that a training loop needs from `config.data`.

    Attributes:
        config: the section it was made from.
        tokenizer: text to ids and back.
        token_map: i32[tokenizer.vocab_size], token id -> canonical id.
        hasher: Engram rows of the model.
        store: the tokenised corpus.
    """

    config: ConfigDict
    tokenizer: Tokenizer
    token_map: np.ndarray
    hasher: EngramHasher
    store: store_lib.Store

    def train_iterator(
        self, start_step: int = 0, *, host_index: int = 0, host_count: int = 1
    ) -> TrainIterator:
        """Endless training batches from `start_step` on, this host's slices.

        A stage of training that changes `sequence_length` or `batch_size` makes its own Data and
        goes on at its first step. Its batches are again a function of the step, but the epoch's
        rows are others, so some documents of the epoch in which it begins come twice and others not
        at all.
        """
        return make_dataset(
            self.store,
            "train",
            self.hasher,
            self.token_map,
            batch_size=self.config.batch_size,
            sequence_length=self.config.sequence_length,
            seed=self.config.seed,
            pad_id=self.tokenizer.pad_id,
            held_out_fraction=self.config.held_out_fraction,
            pack_window=self.config.pack_window,
            host_index=host_index,
            host_count=host_count,
            start_step=start_step,
            prefetch=self.config.prefetch,
        )

    def heldout_batches(
        self, limit: int | None = None, *, host_index: int = 0, host_count: int = 1
    ) -> Iterator[Batch]:
        """The held-out documents once, at most `limit` batches, the same every time."""
        return make_eval_batches(
            self.store,
            self.hasher,
            self.token_map,
            batch_size=self.config.batch_size,
            sequence_length=self.config.sequence_length,
            pad_id=self.tokenizer.pad_id,
            held_out_fraction=self.config.held_out_fraction,
            limit=limit,
            host_index=host_index,
            host_count=host_count,
        )

    def epoch_rows(self) -> tuple[int, float]:
        """Rows of the first training epoch, and the share of their tokens that is padding."""
        documents = self.store.split("train", self.config.held_out_fraction)
        plan = packing.pack(
            self.store.lengths[documents],
            self.config.sequence_length,
            seed=self.config.seed,
            epoch=0,
            window=self.config.pack_window,
        )
        return plan.num_rows, plan.padding_rate

    def padding_rate(self) -> float:
        """Share of padding in the first training epoch."""
        return self.epoch_rows()[1]

    def document_bytes(self, split: str) -> list[bytes]:
        """The text of every document of a split, as UTF-8 (for models that are fitted on bytes)."""
        documents = self.store.split(split, self.config.held_out_fraction)
        return [
            self.tokenizer.decode(self.store.document_tokens(index)).encode("utf-8")
            for index in documents
        ]

    def describe(self) -> str:
        """A few lines for the start of a run: corpus, split, tokens, packing, what was skipped."""
        store, config = self.store, self.config
        held_out = store.split("heldout", config.held_out_fraction)
        rows, padding = self.epoch_rows()
        size, tokens = int(store.document_bytes.sum()), len(store.tokens)
        lines = [
            f"data: {config.kind} {config.path}".rstrip()
            + f", {len(store.document_ids):,} documents, {size / 1e6:.1f} MB",
            f"  tokenizer {config.tokenizer}: {tokens:,} tokens, {size / tokens:.2f} bytes a "
            f"token, canonical ids {int(self.token_map.max()) + 1:,}",
            f"  held out {len(held_out):,} documents, "
            f"{store.document_bytes[held_out].sum() / 1e6:.2f} MB",
            f"  an epoch: {rows:,} rows of {config.sequence_length}, {rows // config.batch_size:,} "
            f"steps of {config.batch_size} rows, padding {padding:.1%}",
        ]
        if store.meta["repeated_documents"]:
            lines.append(f"  left out {store.meta['repeated_documents']:,} repeated documents")
        if store.skipped:
            lines.append(f"  skipped {store.skipped}")
        return "\n".join(lines)


def default_cache_dir() -> Path:
    """Where tokenised corpora go when config.data.cache_dir is empty."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "v41flash"


def from_config(data_config: ConfigDict, model_config: Any) -> Data:
    """Opens (or first builds) the corpus and everything around it.

    Args:
        data_config: `config.data`, exactly the keys of `default_config()`.
        model_config: a ModelConfig; its vocabulary, special ids and Engram sizes must fit the
            tokenizer.

    Returns:
        The data.

    Raises:
        ValueError: a key, file or size that does not fit; one line that names it.
    """
    expected = set(default_config())
    if set(data_config) != expected:
        odd = ", ".join(sorted(set(data_config) ^ expected))
        raise ValueError(
            f"config.data: unknown or missing keys {odd}; it has {', '.join(sorted(expected))}"
        )
    for key in ("batch_size", "sequence_length", "pack_window"):
        if data_config[key] < 1:
            raise ValueError(f"data.{key}={data_config[key]}: must be at least 1")
    if data_config.prefetch < 0:
        raise ValueError(f"data.prefetch={data_config.prefetch}: must be 0 or more")
    tokenizer = tokenizer_lib.load(
        data_config.tokenizer,
        bos_id=model_config.bos_token_id,
        eos_id=model_config.eos_token_id,
        pad_id=model_config.pad_token_id,
    )
    if model_config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size={model_config.vocab_size}: the tokenizer {data_config.tokenizer!r} "
            f"has {tokenizer.vocab_size} tokens"
        )
    cache_dir = (
        Path(data_config.cache_dir).expanduser() if data_config.cache_dir else default_cache_dir()
    )
    token_map = canonical.canonical_map(tokenizer, cache_dir)
    compressed = int(token_map.max()) + 1
    if model_config.engram_layer_ids and model_config.engram_compressed_vocab_size != compressed:
        raise ValueError(
            f"model.engram_compressed_vocab_size={model_config.engram_compressed_vocab_size}: the "
            f"tokenizer {data_config.tokenizer!r} has {compressed} canonical ids"
        )
    hasher = EngramHasher.from_config(
        model_config, int(token_map[model_config.engram_pad_token_id])
    )
    source = sources.open_source(
        data_config.kind, data_config.path, data_config.pattern, data_config.text_field
    )
    store = store_lib.open_or_build(source, tokenizer, cache_dir)
    return Data(data_config, tokenizer, token_map, hasher, store)
