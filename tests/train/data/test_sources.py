"""Sources: every kind reads its documents, and counts what it cannot read."""

import gzip
import json

import pytest

from train.data import builtin, sources


def read(source):
    skipped = sources.Skipped()
    return ["".join(d.texts) for d in source.documents(skipped)], skipped


def test_text_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first é")
    (tmp_path / "sub" / "c.py").write_text("third")
    (tmp_path / ".hidden" / "d.txt").write_text("hidden")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "empty.txt").write_text("")
    texts, skipped = read(sources.open_source("text", str(tmp_path)))
    assert texts == ["first é", "second", "third"]
    assert skipped.counts == {"not UTF-8": 1, "empty": 1}
    assert "latin.txt" in str(skipped) and "1 empty" in str(skipped)
    assert read(sources.open_source("text", str(tmp_path), "*.txt"))[0] == ["first é", "second"]
    assert read(sources.open_source("text", str(tmp_path / "sub" / "c.py")))[0] == ["third"]
    assert read(sources.open_source("text", f"{tmp_path}/**/*.py"))[0] == ["third"]


def test_a_file_that_vanishes_is_counted(tmp_path):
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    source = sources.open_source("text", str(tmp_path))
    (tmp_path / "a").unlink()
    texts, skipped = read(source)
    assert texts == ["b"] and skipped.counts == {"unreadable files": 1}


def test_jsonl(tmp_path):
    good = json.dumps({"text": "one"}).encode()
    lines = [good, b"{broken", b"", b'{"other": 1}', b'{"text": 5}', b"[1]", b'"\xff"']
    lines += [b"[" * 200_000, b'{"text": "\\ud800"}', b'{"text": "two"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as file:
        file.write(good.replace(b"one", b"three"))
    (tmp_path / "c.jsonl.gz").write_bytes(b"not gzip")
    whole = gzip.compress(good * 9)
    (tmp_path / "d.jsonl.gz").write_bytes(whole[:-9])  # cut short
    (tmp_path / "e.jsonl.gz").write_bytes(whole[:12] + bytes(8) + whole[20:])  # damaged inside
    texts, skipped = read(sources.open_source("jsonl", str(tmp_path)))
    assert texts == ["one", "two", "three"]
    assert skipped.counts == {
        "malformed rows": 2,
        "rows without a text 'text'": 3,
        "not UTF-8": 2,
        "unreadable files": 3,
    }
    assert "a.jsonl:2" in str(skipped)


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"body": ["one", None, "two"], "n": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"broken")
    texts, skipped = read(sources.open_source("parquet", str(tmp_path), text_field="body"))
    assert texts == ["one", "two"]
    assert skipped.counts == {"rows without a text 'body'": 1, "unreadable files": 1}
    assert read(sources.open_source("parquet", str(tmp_path)))[1].counts == {
        "files without a column 'text'": 1,
        "unreadable files": 1,
    }


def test_prompts_in_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"q": ["one?", None, "two?"], "text": [b"1", b"0", b"2\xff"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    skipped = sources.Skipped()
    source = sources.open_source("parquet", str(tmp_path), prompt_field="q")
    (only,) = source.documents(skipped)
    assert (only.prompt, only.texts, only.data) == ("one?", ("1",), b"1")
    assert skipped.counts == {"rows without a text 'q'": 1, "not UTF-8": 1}


def test_array_record(tmp_path):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    for record in (b'{"text": "one"}', b"{broken", b'{"text": "two"}'):
        writer.write(record)
    writer.close()
    (tmp_path / "b.array_record").write_bytes(b"broken")
    texts, skipped = read(sources.open_source("array_record", str(tmp_path)))
    assert texts == ["one", "two"]
    assert skipped.counts == {"malformed rows": 1, "unreadable files": 1}
    texts, _ = read(sources.open_source("array_record", str(tmp_path), text_field=""))
    assert texts == ['{"text": "one"}', "{broken", '{"text": "two"}']


@pytest.mark.parametrize(
    ("kind", "package"), [("parquet", "pyarrow"), ("array_record", "array_record")]
)
def test_missing_package(kind, package, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, package, None)
    for module in [name for name in sys.modules if name.startswith(package + ".")]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(sources.SourceError, match=f"pip install {package}"):
        sources.open_source(kind, str(tmp_path))


def test_errors(tmp_path):
    with pytest.raises(sources.SourceError, match="data.kind='csv'"):
        sources.open_source("csv", "x")
    with pytest.raises(sources.SourceError, match="data.path is empty"):
        sources.open_source("text")
    with pytest.raises(sources.SourceError, match="no files found"):
        sources.open_source("text", str(tmp_path / "absent"))
    with pytest.raises(sources.SourceError, match="takes no path"):
        sources.open_source("builtin", "x")


def test_names_are_limited():
    skipped = sources.Skipped()
    for number in range(10):
        skipped.add("empty", f"f{number}")
    assert str(skipped) == "10 empty (f0, f1, f2, ...)"


def test_document_id_is_stable():
    assert (
        sources.document_id(b"hello") == sources.document_id(b"hello") == 4511043874410912595
    )  # b2sum -l 64
    ids = [sources.document_id(str(i).encode()) for i in range(1000)]
    assert len(set(ids)) == 1000 and min(ids) >= 0 and max(ids) < 2**63
    assert 0.4 < sum(i < 2**62 for i in ids) / 1000 < 0.6


def test_builtin_corpus(tmp_path):
    files = builtin.stdlib_files()
    assert files == builtin.stdlib_files()
    parts = {part for path in files for part in path.parts}
    assert not parts & {"site-packages", "idlelib", "__pycache__"}
    assert any(path.name == "argparse.py" for path in files)
    assert 5e6 < sum(path.stat().st_size for path in files) < 20e6
    with pytest.raises(ValueError, match="no .py files"):
        builtin.stdlib_files(tmp_path)


def test_long_context_texts_are_made(tmp_path):
    source = sources.open_source("long_context", "needle,copy:200")
    skipped = sources.Skipped()
    documents = []
    for document in source.documents(skipped):
        documents.append(document)
        if len(documents) == 50:
            break
    for number, document in enumerate(documents):
        # bos and eos are two of the 200.
        assert len(document.prompt) + len(document.data) == 198
        assert document.data.startswith(b"[copy:" if number % 2 else b"[")
    assert len({document.document_id for document in documents}) == 50
    others = [sources.open_source("long_context", path) for path in ("needle:200", "needle:208")]
    digests = {one.listing_digest() for one in (source, *others)}
    assert len(digests) == 3 and not skipped.counts


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "must be tasks and a length, such as 'needle,copy:256'"),
        ("needle", "must be tasks and a length"),
        ("hay:256", "task 'hay': must be one of"),
        ("needle:100", "must be at least 128"),
    ],
)
def test_impossible_long_context_texts(path, message):
    with pytest.raises(sources.SourceError) as error:
        sources.open_source("long_context", path)
    assert message in str(error.value) and f"data.path={path!r}" in str(error.value)
