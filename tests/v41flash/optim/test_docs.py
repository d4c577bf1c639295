"""The examples in docstrings and on the documentation page run."""

import doctest
import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[3]
MODULES = ("axes", "head_muon", "sinkhorn", "sinkhorn_rows", "partition", "recipe", "schedule")


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    result = doctest.testmod(importlib.import_module(f"v41flash.optim.{name}"))
    assert result.attempted > 0 and result.failed == 0


def test_page():
    page = (ROOT / "docs" / "optimizers.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names = {"__name__": "example"}
    exec(compile(code, "docs/optimizers.md", "exec"), names)
    assert names["loss"] < 0.1
