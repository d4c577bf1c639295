"""Folders in the published layout for tests: the recorded one, and changed copies of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.conftest import GOLDEN
from v41flash.checkpoints.published import Published
from v41flash.checkpoints.tensor_files import Entry, Item, TensorFile, write

RECORDED = GOLDEN / "storage_i"
_FILES = ("config.json", "model.safetensors")


def copy(folder: Path) -> Path:
    """The recorded folder without its recorded runs."""
    folder.mkdir()
    for name in _FILES:
        shutil.copy(RECORDED / name, folder)
    return folder


def rewrite(path: Path, change) -> None:
    """Writes a tensor file again; `change` gets and returns {name: (entry, array)}."""
    file = TensorFile(path)
    tensors = {name: (entry, file.read(name)) for name, entry in file.entries.items()}
    items = [
        Item(name, entry.dtype, entry.shape, [array])
        for name, (entry, array) in change(tensors).items()
    ]
    write(path, items)


def change_config(folder: Path, **values) -> None:
    """Sets keys of a folder's `text_config`."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= values
    path.write_text(json.dumps(config))


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Everything in a folder's files: name -> dtype, shape, bytes."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = TensorFile(path)
        for name, entry in file.entries.items():
            found[name] = (entry.dtype, entry.shape, file.read(name).tobytes())
    return found


def write_tokenizer(path: Path) -> None:
    """Writes a tokenizer.json of 256 tokens, the recorded model's: three specials, then bytes."""
    specials = ["<bos>", "<eos>", "<pad>"]
    texts = specials + sorted(pre_tokenizers.ByteLevel.alphabet())[:-3]
    backend = Tokenizer(models.BPE({text: number for number, text in enumerate(texts)}, []))
    backend.add_special_tokens(specials)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(path))


__all__ = [
    "RECORDED",
    "Entry",
    "Published",
    "change_config",
    "copy",
    "rewrite",
    "tensors",
    "write_tokenizer",
]
