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
    loss_mask     f32[B,T]       1 where there is a target, 0 on padding and where it is a prompt's
    segment_ids   i32[B,T]       1, 2, .. per document piece in the row; 0 on padding
    positions     i32[B,T]       0-based inside the piece; 0 on padding
    engram_rows   i32[B,T,S,R]   offset included
    image_*       with images: see `v41flash.nn.vision.ImageBatch`
    document_ids  i64[B,T//8]    host field: ids of the row's documents in order, -1 padded
    row_bytes     i64[B]         host field: bytes of text that the row's targets stand for

The batch at step s depends on the data, `seed`, `batch_size`, `sequence_length`, `pack_window` and
s alone; host h of n gets rows [h*B/n, (h+1)*B/n) of it.

Keys of `config.data` (`default_config()` returns them):

    kind               "builtin"  builtin | digits | long_context | text | jsonl | parquet |
                                  array_record
    path               ""         a file, a folder or a glob (not for builtin and digits); tasks and
                                  a length, "needle,copy:256", for long_context
    pattern            ""         glob inside the folder; "" = the kind's own (text: every file)
    text_field         "text"     field of a row; "" = ArrayRecord records are themselves text
    prompt_field       ""         field of a row's prompt: read before the text, not learnt; "" =
                                  there is none. Both are encoded as they stand, after bos
    image_field        ""         field of a row's images (`train.data.images`); "" = text alone
    image_marker       "<image>"  stands in the text where an image goes
    image_slots        1          slots of images a row; documents with images are never cut
    image_slot_tokens  1024       image tokens a slot: one image or several
    bad_images         "error"    "error", or "skip": leave out rows with an unusable image
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
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import grain
import numpy as np
from ml_collections import ConfigDict

from train.data import packing, sources
from train.data import store as store_lib
from train.data.images import ImageFields, ImageLayout, row_limit, usable
from train.data.stream import Batch, Epochs, Steps, TrainIterator
from v41flash.config import ModelConfig
from v41flash.errors import InputError
from v41flash.image_rows import TEXT, RowImage
from v41flash.text import canonical
from v41flash.text import tokenizer as tokenizer_lib
from v41flash.text.engram_hash import EngramHasher
from v41flash.text.tokenizer import Tokenizer

# For error reports and bits per byte on the host; the model never sees them.
HOST_FIELDS = ("document_ids", "row_bytes")


def default_config() -> ConfigDict:
    """The `data` section with its defaults; the module docstring says what every key means."""
    return ConfigDict(
        dict(
            kind="builtin",
            path="",
            pattern="",
            text_field="text",
            prompt_field="",
            image_field="",
            image_marker="<image>",
            image_slots=1,
            image_slot_tokens=1024,
            bad_images="error",
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


def _piece_bytes(size: int, tokens: int, prompt: int, start: int, length: int) -> int:
    """Bytes of text that a piece's targets stand for; all pieces of a document add up to `size`.

    A document's bytes are shared out evenly over its tokens but bos, prompt and eos, so that with
    one token a byte every piece has exactly its own.
    """
    text = max(tokens - 2 - prompt, 1)
    first, last = (min(max(at - prompt, 0), text) for at in (start, start + length))
    return size * last // text - size * first // text


def _build_batch(
    store: store_lib.Store,
    documents: np.ndarray,
    rows: list[tuple[packing.Plan, int]],
    sequence_length: int,
    pad_id: int,
    layout: ImageLayout | None,
) -> Batch:
    """Packs `rows`: plan and row number each; a row past the plan's end is all padding."""
    pictures: list[list[RowImage]] = [[] for _ in rows]
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
            prompt = store.prompt_length(document)
            batch["loss_mask"][b, place] = np.arange(start, start + length) >= prompt
            batch["segment_ids"][b, place] = segment + 1
            batch["positions"][b, place] = np.arange(length)
            batch["document_ids"][b, segment] = store.document_ids[document]
            size = int(store.document_bytes[document])
            batch["row_bytes"][b] += _piece_bytes(size, len(tokens), prompt, start, length)
            if store.images is not None:
                pictures[b] += [
                    store.images.row_image(layout.vision, number, place.start)
                    for number in store.images.of(document)
                ]
    return batch if layout is None else layout.add(batch, pictures)


def check_hosts(batch_size: int, host_count: int) -> int:
    """Rows of one host.

    Raises:
        InputError: they do not divide.
    """
    if batch_size % host_count:
        raise InputError(
            f"data.batch_size={batch_size}: must be a multiple of the {host_count} hosts"
        )
    return batch_size // host_count


@dataclasses.dataclass(frozen=True)
class Data:
    """Everything that a training loop needs from `config.data`.

    Attributes:
        config: the section it was made from.
        tokenizer: text to ids and back.
        token_map: i32[tokenizer.vocab_size], token id -> canonical id.
        hasher: Engram rows of the model.
        store: the tokenised corpus.
        layout: the room for images in a batch; None where the corpus is text alone.
    """

    config: ConfigDict
    tokenizer: Tokenizer
    token_map: np.ndarray
    hasher: EngramHasher
    store: store_lib.Store
    layout: ImageLayout | None = None

    @property
    def fingerprint(self) -> str:
        """Equal exactly where the stream of training documents is."""
        config = self.config
        return (
            f"train-{self.store.fingerprint}-{config.held_out_fraction}-{config.seed}-"
            f"{config.pack_window}"
        )

    def documents(self, split: str) -> np.ndarray:
        """Indices of a split's documents in the store; split is "train" or "heldout".

        Documents with images that do not fit one row are left out.
        """
        documents = self.store.split(split, self.config.held_out_fraction)
        return documents[self._fitting[documents]]

    @functools.cached_property
    def _fitting(self) -> np.ndarray:
        store, length = self.store, self.config.sequence_length
        if store.images is None:
            return np.ones(len(store.document_ids), bool)
        return usable(store.lengths, store.images, length, self.layout)

    def _limit(self, documents: np.ndarray) -> packing.Limit | None:
        images = self.store.images
        return None if images is None else row_limit(images, documents, self.layout)

    @functools.cached_property
    def _epochs(self) -> Epochs:
        documents, config = self.documents("train"), self.config
        return Epochs(
            self.store.lengths[documents],
            config.sequence_length,
            config.seed,
            config.pack_window,
            self._limit(documents),
        )

    @functools.cached_property
    def _heldout_plan(self) -> packing.Plan:
        documents, length = self.documents("heldout"), self.config.sequence_length
        lengths, limit = self.store.lengths[documents], self._limit(documents)
        return packing.pack(lengths, length, seed=0, epoch=0, limit=limit)

    def engram_rows(
        self, tokens: np.ndarray, positions: np.ndarray, images: np.ndarray | None = None
    ) -> np.ndarray:
        """Table rows i32[B,T,S,R] of token ids and positions, i32[B,T] each.

        Args:
            tokens: ids.
            positions: inside their document.
            images: bool[B,T], tokens of images, at which the look-back latches; None: no image.
        """
        if images is not None:
            # They hash as padding, and need not be ids of the tokenizer.
            tokens = np.where(images, self.tokenizer.pad_id, tokens)
        return self.hasher.rows(self.token_map[tokens], positions, images)

    def train_iterator(
        self, start_step: int = 0, *, host_index: int = 0, host_count: int = 1
    ) -> TrainIterator:
        """Endless shuffled training batches from `start_step` on, this host's slices.

        A stage of training that changes `sequence_length` or `batch_size` has its own Data and goes
        on at its first step. Its batches are again a function of the step, but the epoch's rows are
        others, so some documents of the epoch in which it begins come twice and others not at all.
        """
        config, epochs, documents = self.config, self._epochs, self.documents("train")
        local = check_hosts(config.batch_size, host_count)
        epochs.plan(0)  # a slow first pack shows here, not in a prefetch thread

        def build(step: int) -> Batch:
            first = step * config.batch_size + host_index * local
            rows = [epochs.locate(row) for row in range(first, first + local)]
            return self._batch(documents, rows)

        description = f"{config.batch_size}x{config.sequence_length} steps of {self.fingerprint}"
        dataset = grain.MapDataset.source(Steps(build, description)).map(self._with_engram_rows)
        return TrainIterator(dataset, start_step, config.prefetch, self.fingerprint)

    def heldout_batches(
        self, limit: int | None = None, *, host_index: int = 0, host_count: int = 1
    ) -> Iterator[Batch]:
        """The held-out documents once, in an order that never changes.

        Pieces of all documents are shuffled once and for all, so a limited number of batches is a
        fair sample of the split; the last batch is filled up with padding rows. The bits per byte
        of what was read are the summed losses over ln 2 and over the summed `row_bytes`.

        Args:
            limit: the largest number of batches, None for all.
            host_index: which slice of the global batch this process gets.
            host_count: number of slices.

        Yields:
            Batches of this host's rows; every host gets the same number of them.
        """
        size, plan = self.config.batch_size, self._heldout_plan
        local = check_hosts(size, host_count)
        documents = self.documents("heldout")
        for step in range(self._heldout_count(limit)):
            first = step * size + host_index * local
            rows = [(plan, row) for row in range(first, first + local)]
            yield self._with_engram_rows(self._batch(documents, rows))

    def heldout_texts(self, limit: int | None = None) -> list[tuple[bytes, bytes]]:
        """What the targets of `heldout_batches(limit)` spell, for models that work on bytes.

        Returns:
            For every piece with targets (the text of the one token that it shows before its first
            target, the text of its targets), UTF-8, in the batches' order.
        """
        plan, documents = self._heldout_plan, self.documents("heldout")
        rows = min(plan.num_rows, self._heldout_count(limit) * self.config.batch_size)
        texts = []
        for piece in range(plan.row_first[rows]):
            document = documents[plan.document[piece]]
            tokens, end = self.store.document_tokens(document), plan.start[piece] + 1
            end += plan.length[piece]
            start = max(plan.start[piece], self.store.prompt_length(document))
            shown, targets = tokens[start : start + 1], tokens[start + 1 : end]
            if len(targets):
                texts.append((self._text(shown), self._text(targets)))
        return texts

    def train_texts(self) -> list[bytes]:
        """UTF-8 text of every training document."""
        return [self._text(self.store.document_tokens(i)) for i in self.documents("train")]

    def _text(self, tokens: np.ndarray) -> bytes:
        if self.store.images is not None:
            tokens = tokens[tokens != self.store.meta["image_token"]]
        if isinstance(self.tokenizer, tokenizer_lib.ByteTokenizer):
            # A piece may end inside a character.
            return self.tokenizer.decode_bytes(tokens)
        return self.tokenizer.decode(tokens).encode("utf-8")

    def _heldout_count(self, limit: int | None) -> int:
        batches = -(-self._heldout_plan.num_rows // self.config.batch_size)
        return batches if limit is None else min(batches, limit)

    def _batch(self, documents: np.ndarray, rows: list[tuple[packing.Plan, int]]) -> Batch:
        length = self.config.sequence_length
        pad = self.tokenizer.pad_id
        return _build_batch(self.store, documents, rows, length, pad, self.layout)

    def _with_engram_rows(self, batch: Batch) -> Batch:
        images = None if self.layout is None else batch["image_source"] != TEXT
        rows = self.engram_rows(batch["tokens"], batch["positions"], images)
        return batch | {"engram_rows": rows}

    def epoch_rows(self) -> tuple[int, float]:
        """Rows of the first training epoch, and the share of their tokens that is padding."""
        plan = self._epochs.plan(0)
        return plan.num_rows, plan.padding_rate

    def describe(self) -> str:
        """A few lines for the start of a run: corpus, split, tokens, packing, what was skipped."""
        store, config = self.store, self.config
        held_out = self.documents("heldout")
        rows, padding = self.epoch_rows()
        size, tokens = int(store.document_bytes.sum()), len(store.tokens)
        if store.prompt_tokens is not None:
            tokens -= int(store.prompt_tokens.sum())
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
        if store.images is not None:
            count, left_out = len(store.images.image_starts), int((~self._fitting).sum())
            lines.append(
                f"  {count:,} images, {int(store.images.sizes.sum()):,} image tokens; "
                f"{left_out:,} documents left out whose images do not fit a row"
            )
        if store.prompt_tokens is not None:
            lines.append(f"  {store.prompt_tokens.sum():,} tokens of prompts, not learnt")
        if store.meta["repeated_documents"]:
            lines.append(f"  left out {store.meta['repeated_documents']:,} repeated documents")
        if store.skipped:
            lines.append(f"  skipped {store.skipped}")
        return "\n".join(lines)


def default_cache_dir() -> Path:
    """Where tokenised corpora go when config.data.cache_dir is empty."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "v41flash"


def check_config(config: ConfigDict) -> None:
    """Checks all of a `config.data` that can be checked without opening anything.

    Raises:
        InputError: one line that names the key, its value and what would be right.
    """
    expected = set(default_config())
    if set(config) != expected:
        odd = ", ".join(sorted(set(config) ^ expected))
        raise InputError(
            f"config.data: unknown or missing keys {odd}; it has {', '.join(sorted(expected))}"
        )
    for key, least in (
        ("batch_size", 1),
        ("sequence_length", packing.ALIGNMENT),
        ("pack_window", 1),
        ("prefetch", 0),
        ("seed", 0),
        ("image_slots", 1),
        ("image_slot_tokens", 1),
    ):
        if config[key] < least:
            raise InputError(f"data.{key}={config[key]}: must be at least {least}")
    if config.sequence_length % packing.ALIGNMENT:
        raise InputError(
            f"data.sequence_length={config.sequence_length}: must be a multiple of "
            f"{packing.ALIGNMENT}"
        )
    if not 0 < config.held_out_fraction < 1:
        raise InputError(
            f"data.held_out_fraction={config.held_out_fraction}: must be above 0 and below 1 (a "
            "run ends with a held-out evaluation)"
        )
    if config.bad_images not in ("error", "skip"):
        raise InputError(f"data.bad_images={config.bad_images!r}: must be 'error' or 'skip'")
    if config.image_field and not config.image_marker:
        raise InputError("data.image_marker is empty: must be what stands in the text for an image")
    if config.kind == "digits" and not config.image_field:
        raise InputError('data.image_field is empty: data.kind="digits" has images, name a field')
    if config.kind not in sources.KINDS:
        raise InputError(f"data.kind={config.kind!r}: must be one of {', '.join(sources.KINDS)}")


@dataclasses.dataclass(frozen=True)
class _Corpus:
    """What many `Data` may share: documents as token ids."""

    tokenizer: Tokenizer
    token_map: np.ndarray
    store: store_lib.Store


def _image_fields(config: ConfigDict, model: ModelConfig) -> ImageFields | None:
    if not config.image_field:
        return None
    if model.vision is None:
        raise InputError(
            f"data.image_field={config.image_field!r}: model.vision is None, so this model takes "
            "no images"
        )
    return ImageFields(
        field=config.image_field,
        marker=config.image_marker,
        vision=model.vision,
        token_id=model.image_token_id,
        strict=config.bad_images == "error",
    )


def _open_corpus(config: ConfigDict, model: ModelConfig) -> _Corpus:
    tokenizer = tokenizer_lib.load(
        config.tokenizer,
        bos_id=model.bos_token_id,
        eos_id=model.eos_token_id,
        pad_id=model.pad_token_id,
    )
    source = sources.open_source(
        config.kind,
        config.path,
        config.pattern,
        config.text_field,
        _image_fields(config, model),
        config.prompt_field,
    )
    cache_dir = Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"data.cache_dir={str(cache_dir)!r}: cannot be made: {error.strerror}"
        ) from error
    try:
        token_map = canonical.canonical_map(tokenizer, cache_dir)
    except ValueError as error:  # it names the file that is damaged
        raise InputError(str(error)) from error
    return _Corpus(tokenizer, token_map, store_lib.open_or_build(source, tokenizer, cache_dir))


def _check_vocabulary(config: ConfigDict, model: ModelConfig, corpus: _Corpus) -> None:
    if model.vocab_size < corpus.tokenizer.vocab_size:
        raise InputError(
            f"model.vocab_size={model.vocab_size}: the tokenizer {config.tokenizer!r} has "
            f"{corpus.tokenizer.vocab_size} tokens"
        )
    compressed = int(corpus.token_map.max()) + 1
    if model.engram_layer_ids and model.engram_compressed_vocab_size != compressed:
        raise InputError(
            f"model.engram_compressed_vocab_size={model.engram_compressed_vocab_size}: the "
            f"tokenizer {config.tokenizer!r} has {compressed} canonical ids"
        )
    if not 0 <= model.engram_pad_token_id < len(corpus.token_map):
        raise InputError(
            f"model.engram_pad_token_id={model.engram_pad_token_id}: the tokenizer "
            f"{config.tokenizer!r} has ids 0 .. {len(corpus.token_map) - 1}"
        )


def _open(config: ConfigDict, model: ModelConfig, corpus: _Corpus) -> Data:
    _check_vocabulary(config, model, corpus)
    pad = int(corpus.token_map[model.engram_pad_token_id])
    try:
        hasher = EngramHasher.from_config(model, pad)
    except ValueError as error:  # it says which of the model's sizes are not those of its primes
        raise InputError(f"model: {error}") from error
    layout = None
    if config.image_field:
        layout = ImageLayout(model.vision, config.image_slots, config.image_slot_tokens)
    data = Data(config, corpus.tokenizer, corpus.token_map, hasher, corpus.store, layout)
    for split in ("train", "heldout"):
        if not len(data.documents(split)):
            raise InputError(
                f"data.held_out_fraction={config.held_out_fraction}: the {split} split has no "
                f"documents that fit a row ({len(corpus.store.document_ids)} in all)"
            )
    return data


def from_sections(sections: Sequence[tuple[ConfigDict, ModelConfig]]) -> list[Data]:
    """`from_config` of each (data section, model); equal corpora are opened once and shared."""
    for config, _ in sections:
        check_config(config)
    corpora: dict[tuple, _Corpus] = {}
    opened = []
    for config, model in sections:
        key = (
            *(config.kind, config.path, config.pattern, config.text_field, config.prompt_field),
            *(config.tokenizer, config.cache_dir),
            _image_fields(config, model),
            *(model.bos_token_id, model.eos_token_id, model.pad_token_id),
        )
        if key not in corpora:
            corpora[key] = _open_corpus(config, model)
        opened.append(_open(config, model, corpora[key]))
    return opened


def from_config(data_config: ConfigDict, model_config: ModelConfig) -> Data:
    """Opens (or first builds) the corpus and everything around it.

    Args:
        data_config: `config.data`, exactly the keys of `default_config()`.
        model_config: its vocabulary, special ids and Engram sizes must fit the tokenizer.

    Returns:
        The data; neither of its splits is empty.

    Raises:
        InputError: a key, file or size that does not fit; one line that names it.
    """
    return from_sections([(data_config, model_config)])[0]
