"""How well a model reads pages of handwritten digits that it has not seen.

    python -m eval.digits --workdir=DIR [--pages=500] [--json=FILE]

DIR is a run of configs/digits.py. Every held-out page is read twice, by the likeliest token at each
place: with its own image, and with that of another page, which tells how much of the answer comes
from the image. Of a page that is read right every digit is, and their number.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from eval.tasks import digit_pages
from v41flash import command_line
from v41flash.errors import InputError
from v41flash.image_files import from_bytes, to_patches
from v41flash.image_rows import TEXT, RowImage, assemble
from v41flash.nn import ced
from v41flash.nn.vision import ImageBatch
from v41flash.serving.run import Run
from v41flash.text.engram_hash import EngramHasher

_MOST_DIGITS = max(digit_pages.LINES) * max(digit_pages.COLUMNS)


class Reader:
    """Reads pages, a batch at a time, with a forward pass over all of it for every digit."""

    def __init__(self, run: Run):
        """A model with an image encoder, trained on bytes.

        Raises:
            InputError: a model without.
        """
        config = run.config
        if config.vision is None:
            raise InputError("model.vision is None: this model reads no pages")
        self._run = run
        pad = int(run.token_map[config.engram_pad_token_id])
        self._hasher = EngramHasher.from_config(config, pad)
        model = ced.CED(config, run.kernels)

        @jax.jit
        def last_token(params, tokens, positions, segment_ids, rows, images, last):
            hidden = model.apply(
                {"params": params}, tokens, positions, segment_ids, rows, images
            ).hidden
            hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
            return jnp.argmax(ced.logits(params, hidden), axis=-1)

        self._last_token = last_token

    def read(self, pngs: Sequence[bytes]) -> list[str]:
        """The texts of pages, at most `_MOST_DIGITS` + 1 characters each."""
        config, tokenizer = self._run.config, self._run.tokenizer
        patches = [to_patches(config.vision, from_bytes(png)) for png in pngs]
        ends = np.array([1 + page.plan.span for page in patches])
        length = -(-(int(ends.max()) + _MOST_DIGITS + 1) // ced.ALIGNMENT) * ced.ALIGNMENT
        tokens = np.full((len(pngs), length), tokenizer.pad_id, np.int32)
        tokens[:, 0] = tokenizer.bos_id
        slot = max(len(page.pixels) for page in patches)
        rows = [[RowImage(1, page)] for page in patches]
        images = ImageBatch(*assemble(config.vision, rows, length, 1, slot))
        seen = images.source != TEXT
        tokens[seen] = config.image_token_id
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
        each = np.arange(len(pngs))
        for _ in range(_MOST_DIGITS + 1):
            known = np.where(seen, tokenizer.pad_id, tokens)
            engram_rows = self._hasher.rows(self._run.token_map[known], positions, seen)
            segment_ids = (positions < ends[:, None]).astype(np.int32)
            inputs = tokens, positions, segment_ids, engram_rows, images, ends - 1
            tokens[each, ends] = self._last_token(self._run.params, *inputs)
            ends = ends + 1
        return [self._text(row[row_seen.nonzero()[0][-1] + 1 :]) for row, row_seen in zip(
            tokens, seen, strict=True
        )]  # fmt: skip

    def _text(self, tokens: np.ndarray) -> str:
        stops = np.flatnonzero(tokens == self._run.tokenizer.eos_id)
        tokens = tokens[: stops[0] if stops.size else None]
        return self._run.tokenizer.decode(tokens[tokens < self._run.tokenizer.vocab_size])


def scores(read: Sequence[str], right: Sequence[str]) -> tuple[float, float]:
    """(share of pages that are right, share of digits that are right at their place)."""
    pages = np.mean([ours == theirs for ours, theirs in zip(read, right, strict=True)])
    hits = total = 0
    for ours, theirs in zip(read, right, strict=True):
        hits += sum(a == b for a, b in zip(ours, theirs, strict=False))
        total += len(theirs)
    return float(pages), hits / total


def evaluate(run: Run, count: int, batch: int = 100) -> dict[str, float | int]:
    """Scores on the first `count` held-out pages, with their own images and with others'."""
    pages = digit_pages.heldout_pages(count)
    reader = Reader(run)
    texts = [page.text for page in pages]
    result: dict[str, float | int] = {"pages": count, "step": run.step}
    # The next page's image: never a page's own.
    for name, shift in (("", 0), ("shuffled_", 1)):
        pngs = [pages[(i + shift) % count].png for i in range(count)]
        read = [t for i in range(0, count, batch) for t in reader.read(pngs[i : i + batch])]
        right = scores(read, texts)
        result |= {f"{name}pages_right": right[0], f"{name}digits_right": right[1]}
    return result


@command_line.program(__doc__)
def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "Folder of the run.", flag_values=values)
    flags.DEFINE_integer("pages", 500, "Held-out pages.", lower_bound=2, flag_values=values)
    flags.DEFINE_string("json", None, "File for the numbers.", flag_values=values)
    command_line.read(values, arguments, ("workdir",))
    result = evaluate(Run.load(values.workdir), values.pages)
    print(json.dumps(result))
    if values.json:
        Path(values.json).write_text(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
