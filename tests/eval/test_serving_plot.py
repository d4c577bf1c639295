"""Tables and plot of the serving bench."""

import json

from eval import serving_plot


def decode(context, batch, step, implementation=None):
    return dict(
        what="decode",
        context=context,
        batch=batch,
        step_ms=step,
        selection_attention_ms=step / 4,
        flops=1e9 + context,
        implementation=implementation,
    )


ROWS = [
    dict(
        what="cache",
        tokens=1024,
        device_bytes=911360,
        device_bytes_per_token=890.0,
        table_bytes=32,
        implementation=None,
    ),
    # Timed twice: the last time counts.
    decode(4096, 1, 9.0),
    decode(16384, 1, 3.0),
    decode(4096, 1, 2.0),
    decode(4096, 8, 4.0),
    decode(16384, 8, 4.5),
    decode(4096, 1, 8.0, "xla"),
    dict(what="fill", tokens=2000, seconds=0.5, implementation=None),
]


def test_tables_and_plot(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    picture = tmp_path / "plot.png"
    assert serving_plot.main([f"--json={file}", f"--png={picture}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "911360 bytes" in lines[0] and "890.0 per token" in lines[1]
    assert "| kernels, batch 1 | 16,384 | 3.00 ms | 0.75 ms | 0.25 | 1.500 | 1.000 |" in lines
    assert "| kernels, batch 1 | 4,096 | 2.00 ms | 0.50 ms | 0.25 | 1.000 | 1.000 |" in lines
    assert "| references, batch 1 | 4,096 | 8.00 ms | 2.00 ms | 0.25 | 1.000 | 1.000 |" in lines
    assert "| one prompt | 2,000 | 0.500 | 4,000 |" in lines
    assert sum("batch 1 | 4,096" in line for line in lines) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_read_is_one_line(tmp_path, capsys):
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{")
    for arguments in ([], [f"--json={tmp_path / 'none'}"], [f"--json={broken}"], ["--what=1"]):
        assert serving_plot.main(arguments) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
