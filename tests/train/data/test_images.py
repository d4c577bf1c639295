"""Image-text corpora: rows with images become batches with images, or are counted."""

import base64
import dataclasses
import io
import json
import sys

import numpy as np
import pytest
from PIL import Image

from tests.train import micro
from tests.v41flash.nn.samples import VISION
from train.data import packing, pipeline, sources
from train.data.images import ImageFields
from v41flash.errors import InputError
from v41flash.image_files import from_bytes, to_patches
from v41flash.image_rows import FEATURES, START, TEXT

MODEL = dataclasses.replace(micro.model(), vision=VISION)
FIELDS = ImageFields("images", "<image>", VISION, 259, strict=False)
SIZES = ((42, 42), (84, 42), (42, 126), (100, 30))


def png(number, size=None):
    width, height = size or SIZES[number % len(SIZES)]
    rng = np.random.default_rng(number)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def frames():
    file = io.BytesIO()
    Image.new("RGB", (9, 9)).save(
        file, "GIF", save_all=True, append_images=[Image.new("RGB", (9, 9), "red")]
    )
    return file.getvalue()


def url(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


def write_rows(folder, rows):
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """40 rows: 0 to 2 images by path or data URL, and texts around them."""
    folder = tmp_path_factory.mktemp("images")
    rows = []
    for i in range(40):
        (folder / f"{i}.png").write_bytes(png(i))
        images = [f"{i}.png", url(png(i + 100))][: i % 3]
        rows.append({"text": f"row {i}: " + "<image> and ".join(["x"] * (1 + len(images))),
                     "images": images})  # fmt: skip
    return write_rows(folder, rows)


def config(corpus, tmp_path, **changes):
    result = pipeline.default_config()
    result.update(
        kind="jsonl", path=str(corpus), cache_dir=str(tmp_path / "cache"), image_field="images",
        sequence_length=64, batch_size=4, held_out_fraction=0.2, image_slots=2,
        image_slot_tokens=6, prefetch=0,
    )  # fmt: skip
    result.update(changes)
    return result


def open_data(corpus, tmp_path, **changes):
    return pipeline.from_config(config(corpus, tmp_path, **changes), MODEL)


def batches(data, count):
    iterator = data.train_iterator()
    result = [next(iterator) for _ in range(count)]
    iterator.close()
    return result


def test_every_image_stands_where_its_marker_stood(corpus, tmp_path):
    data = open_data(corpus, tmp_path)
    assert "images" in data.describe() and "0 documents left out" in data.describe()
    rows, _ = data.epoch_rows()
    seen = set()
    for batch in batches(data, -(-rows // 4)):
        assert batch["image_patches"].shape == (4, 2, 6, 9, 588)
        for b, t in zip(*np.where(batch["tokens"] == 0), strict=True):
            if batch["segment_ids"][b, t] == 0:
                continue
            end = t + int((batch["segment_ids"][b] == batch["segment_ids"][b, t]).sum())
            tokens, source = batch["tokens"][b, t:end], batch["image_source"][b, t:end]
            np.testing.assert_array_equal(tokens == 259, source != TEXT)
            text = data.tokenizer.decode(tokens[source == TEXT])
            number = int(text.split(":")[0].split()[1])
            images = [png(number), png(number + 100)][: number % 3]
            starts = np.flatnonzero(source == START)
            assert len(starts) == len(images)
            before = [data.tokenizer.decode(tokens[:s][source[:s] == TEXT]) for s in starts]
            assert before == [f"row {number}: x" + " and x" * i for i in range(len(images))]
            for start, image in zip(starts, images, strict=True):
                wanted = to_patches(VISION, from_bytes(image))
                mine = source[start : start + wanted.plan.span]
                place = mine[mine >= FEATURES] - FEATURES
                flat = batch["image_patches"][b].reshape(12, 9, 588)
                np.testing.assert_array_equal(flat[place], wanted.pixels)
            seen.add(number)
            # Loss on text alone; the look-back of Engram ends at an image.
            mask = batch["loss_mask"][b, t : end - 1]
            np.testing.assert_array_equal(mask, source[1:] == TEXT)
            dead = batch["image_source"][b, t:end] != TEXT
            known = np.where(dead, 2, tokens)
            expected = data.hasher.rows(
                data.token_map[known][None], np.arange(len(tokens))[None], dead[None]
            )
            np.testing.assert_array_equal(batch["engram_rows"][b, t:end], expected[0])
    assert len(seen) == len(data.documents("train"))


def test_batches_depend_on_the_step_alone(corpus, tmp_path):
    data = open_data(corpus, tmp_path)
    first, second = batches(data, 3)[2], next(data.train_iterator(2))
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    parts = [next(data.train_iterator(2, host_index=h, host_count=2)) for h in range(2)]
    for name in first:
        np.testing.assert_array_equal(np.concatenate([p[name] for p in parts]), first[name])


def test_text_without_images_is_packed_as_ever(corpus, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text(
        "\n".join(json.dumps({"text": f"{i} " + "word " * 30}) for i in range(30))
    )
    plain = open_data(tmp_path / "text", tmp_path, image_field="")
    mixed = open_data(tmp_path / "text", tmp_path)
    for a, b in zip(batches(plain, 4), batches(mixed, 4), strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
        assert not b["image_source"].any()


def test_rows_never_hold_more_images_than_slots(corpus, tmp_path):
    data = open_data(corpus, tmp_path, image_slots=1, image_slot_tokens=3)
    rows, _ = data.epoch_rows()
    found = 0
    for batch in batches(data, rows // 4):
        found += (batch["image_source"] == START).sum()
    assert found > 0
    # The documents whose two images need more than one slot of 3 are left out, and said to be.
    assert " documents left out whose images do not fit a row" in data.describe()
    assert len(data.documents("train")) < len(open_data(corpus, tmp_path).documents("train"))


def test_a_limit_moves_pieces_and_loses_none():
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 40, 200)
    weights = [[int(w)] * int(rng.integers(0, 3)) for w in rng.integers(1, 4, 200)]
    limit = packing.Limit(weights.__getitem__, lambda sizes: sum(sizes) <= 6)
    plan = packing.pack(lengths, 64, seed=3, epoch=0, limit=limit)
    assert sorted(plan.document.tolist()) == list(range(200))
    for row in range(plan.num_rows):
        here = slice(plan.row_first[row], plan.row_first[row + 1])
        assert sum(sum(weights[d]) for d in plan.document[here]) <= 6
        ends = plan.offset[here] + plan.length[here]
        assert (plan.offset[here][1:] >= ends[:-1]).all() and ends.max() <= 64


BAD = [
    ("gone.png", "cannot be read"),
    (url(b"no image"), "not an image"),
    (url(png(0)[:-40]), "damaged or cut short"),
    (url(frames()), "2 frames"),
    ("data:text/plain,hello", "must be a URL"),
    (7, "must be a path, a data URL or bytes"),
    ("/etc/hostname", "must lie inside"),
    ("../outside.png", "must lie inside"),
    ("a\0b.png", "cannot be read"),
]


@pytest.mark.parametrize("image, words", BAD)
def test_a_bad_image_is_an_error_that_names_it(tmp_path, image, words):
    rows = [{"text": "good"}, {"text": "<image>", "images": [image]}]
    folder = write_rows(tmp_path / "bad", rows)
    with pytest.raises(InputError, match=words) as caught:
        open_data(folder, tmp_path)
    assert "gone.png" in str(caught.value) or "rows.jsonl:2: image 0" in str(caught.value)
    assert 'data.bad_images="skip"' in str(caught.value)


def test_bad_images_are_counted_and_left_out(tmp_path):
    rows = [{"text": f"good {i} <image>", "images": url(png(i))} for i in range(20)]
    rows += [{"text": f"bad {i} <image>", "images": [image]} for i, (image, _) in enumerate(BAD)]
    rows += [{"text": "no marker", "images": [url(png(0))]}]
    folder = write_rows(tmp_path / "mixed", rows)
    data = open_data(folder, tmp_path, bad_images="skip")
    assert f"{len(BAD)} rows with an unusable image" in data.describe()
    assert "1 rows without one '<image>' for each image" in data.describe()
    assert len(data.store.document_ids) == 20


def test_a_path_leaves_its_folder_by_no_link(tmp_path):
    folder = write_rows(tmp_path / "rows", [{"text": "<image>", "images": "inner.png"}])
    (tmp_path / "outside.png").write_bytes(png(1))
    (folder / "own.png").write_bytes(png(2))
    (folder / "inner.png").symlink_to("own.png")
    source = sources.open_source("jsonl", str(folder), images=FIELDS)
    (only,) = source.documents(sources.Skipped())
    assert only.images[0].data == png(2)
    for target in ("../outside.png", "inner.png"):  # the second is a link to itself
        (folder / "inner.png").unlink()
        (folder / "inner.png").symlink_to(target)
        skipped = sources.Skipped()
        assert not list(source.documents(skipped))
        assert skipped.counts == {"rows with an unusable image": 1}


def test_without_pillow_no_row_is_blamed(tmp_path, monkeypatch):
    folder = write_rows(tmp_path / "rows", [{"text": "<image>", "images": url(png(0))}])
    source = sources.open_source("jsonl", str(folder), images=FIELDS)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(InputError, match="images need the package pillow"):
        list(source.documents(sources.Skipped()))


def test_parquet_with_images(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    images = [[{"bytes": png(0), "path": None}], [], [{"bytes": None, "path": "a.png"}] * 2, None]
    texts = ["<image>one", "two", "<image>three<image>", "four"]
    (tmp_path / "a.png").write_bytes(png(1))
    parquet.write_table(pyarrow.table({"text": texts, "images": images}), tmp_path / "rows.parquet")
    skipped = sources.Skipped()
    source = sources.open_source("parquet", str(tmp_path), images=FIELDS)
    found = list(source.documents(skipped))
    assert [d.texts for d in found] == [("", "one"), ("two",), ("", "three", ""), ("four",)]
    assert [[i.data for i in d.images] for d in found] == [[png(0)], [], [png(1)] * 2, []]
    assert not skipped.counts
    binary = tmp_path / "binary"
    binary.mkdir()
    parquet.write_table(
        pyarrow.table({"text": ["<image>"], "images": [png(3)]}), binary / "rows.parquet"
    )
    (only,) = sources.open_source("parquet", str(binary), images=FIELDS).documents(skipped)
    assert only.images[0].data == png(3)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(bad_images="maybe"), "data.bad_images='maybe': must be 'error' or 'skip'"),
        (dict(image_marker=""), "data.image_marker is empty"),
        (dict(image_slots=0), "data.image_slots=0: must be at least 1"),
        (dict(kind="digits", path="", image_field=""), "data.image_field is empty"),
        (dict(kind="digits"), 'data.kind="digits" takes no path'),
        (dict(image_slot_tokens=1), "no documents that fit a row|documents that fit"),
    ],
)
def test_refused_settings(tmp_path, changes, words):
    rows = [{"text": "<image>", "images": url(png(1))} for _ in range(2)]
    folder = write_rows(tmp_path / "rows", rows)
    with pytest.raises(InputError, match=words):
        open_data(folder, tmp_path, **changes)


def test_a_model_without_an_encoder_takes_no_images(corpus, tmp_path):
    with pytest.raises(InputError, match="data.image_field='images': model.vision is None"):
        pipeline.from_config(config(corpus, tmp_path), micro.model())


def test_an_image_store_that_lacks_a_file_is_damaged(corpus, tmp_path):
    data = open_data(corpus, tmp_path)
    (data.store.folder / "image_starts.npy").unlink()
    with pytest.raises(InputError, match="image_starts.npy has None bytes"):
        open_data(corpus, tmp_path)
