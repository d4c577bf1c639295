"""The shape of the repository: which part may import which, how long a file may be."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PARTS = ("pallas_kernels", "v41flash", "train", "eval", "configs", "tests")
# What each part may import of the others: configs -> train, eval -> v41flash -> pallas_kernels.
ALLOWED = {
    "pallas_kernels": set(),
    "v41flash": {"pallas_kernels"},
    "eval": {"v41flash", "pallas_kernels"},
    "train": {"v41flash", "pallas_kernels", "eval.tasks"},
    "configs": {"train", "eval", "v41flash", "pallas_kernels"},
    "tests": set(PARTS),
}
# Modules kept free of everything but the standard library and what is named.
LIGHT = {
    "v41flash": set(),
    "v41flash.config": {"v41flash.config_checks"},
    "v41flash.config_checks": {"v41flash.config"},
    "v41flash.presets": {"v41flash.config"},
    "v41flash.accounting": {"v41flash.config", "v41flash.presets"},
    "v41flash.tiers.keys": {"numpy", "v41flash.errors"},
    "v41flash.tiers.page_file": {"v41flash.tiers"},
    "v41flash.tiers.disk": {"v41flash.errors", "v41flash.tiers"},
    "v41flash.tiers.host": {"v41flash.errors"},
    "v41flash.tiers.device": set(),
}
TOP_LEVEL_FOLDERS = {".ci", "docs", *PARTS}
TOP_LEVEL_FILES = {
    ".gitignore",
    "LICENSE",
    "Makefile",
    "README.md",
    "pyproject.toml",
    "setup.py",
}
# Distributions whose name differs from what they are imported as.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "absl": "absl-py",
    "deep_gemm": "sgl-deep-gemm",
    "flash_mla": "sgl-flash-mla",
    "jaxlib": "jax",
    "lm_eval": "lm-eval",
    "orbax": "orbax-checkpoint",
    "sklearn": "scikit-learn",
}
MAX_LINES = 700
MAX_KERNEL_LINES = 900
KERNEL_BODIES = {"mosaic_gpu.py", "mosaic_tpu.py", "triton.py"}

FILES = sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py"))


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: pathlib.Path) -> set[str]:
    """Every module that a file imports anywhere in it, `from a import b` counting as a.b."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def within(module: str, packages: set[str]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


def standard(module: str) -> bool:
    return module.split(".")[0] in sys.stdlib_module_names


IMPORTS = {path: imports(path) for path in FILES}


def offenders(rule) -> list[str]:
    """`file imports module` for every import that `rule(path, module)` calls wrong."""
    return [
        f"{path.relative_to(ROOT)} imports {module}"
        for path, modules in IMPORTS.items()
        for module in sorted(modules)
        if rule(path, module)
    ]


def test_imports_run_one_way():
    def wrong(path, module):
        part = path.relative_to(ROOT).parts[0]
        return within(module, set(PARTS)) and not within(module, ALLOWED[part] | {part})

    assert offenders(wrong) == []


def test_pallas_kernels_needs_jax_alone():
    def wrong(path, module):
        mine = path.is_relative_to(ROOT / "pallas_kernels")
        allowed = {"jax", "jaxlib", "numpy", *PARTS}
        return mine and not standard(module) and not within(module, allowed)

    assert offenders(wrong) == []


def test_optimizers_need_jax_optax_and_kernels_alone():
    allowed = {"jax", "optax", "pallas_kernels", "v41flash.optim"}

    def wrong(path, module):
        mine = path.is_relative_to(ROOT / "v41flash" / "optim")
        return mine and not standard(module) and not within(module, allowed)

    assert offenders(wrong) == []


def test_light_modules_stay_light():
    def wrong(path, module):
        name = module_name(path)
        return name in LIGHT and not standard(module) and not within(module, LIGHT[name])

    assert offenders(wrong) == []


def test_private_jax_only_in_compat():
    def wrong(path, module):
        return path.name != "_compat.py" and within(module, {"jax._src", "jaxlib"})

    assert offenders(wrong) == []
    reached = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        if path.name != "_compat.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "_src"
    ]
    assert reached == []


def test_imported_distributions_are_declared():
    setup = ast.parse((ROOT / "setup.py").read_text())
    strings = [n.value for n in ast.walk(setup) if isinstance(n, ast.Constant)]
    declared = {
        re.match(r"[\w-]+", text).group().lower().replace("_", "-")
        for text in strings
        if isinstance(text, str) and re.match(r"[A-Za-z]", text)
    }

    def wrong(path, module):
        top = module.split(".")[0]
        name = DISTRIBUTIONS.get(top, top).lower().replace("_", "-")
        return not standard(module) and top not in PARTS and name not in declared

    assert offenders(wrong) == []


@pytest.mark.parametrize("statement", ["import v41flash", "from v41flash import config, presets"])
def test_importing_the_library_is_light(statement):
    code = f"import sys; {statement}; print(*sorted(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in result.stdout.split()}
    assert not loaded & {"jax", "jaxlib", "flax", "optax", "orbax", "numpy", "tokenizers"}


def test_files_are_short():
    def limit(path):
        body = path.is_relative_to(ROOT / "pallas_kernels") and path.name in KERNEL_BODIES
        return MAX_KERNEL_LINES if body else MAX_LINES

    lengths = {path: len(path.read_text().splitlines()) for path in FILES}
    assert [f"{p.relative_to(ROOT)}: {n}" for p, n in lengths.items() if n > limit(p)] == []


def test_no_module_is_a_bag():
    bags = {"utils", "util", "helpers", "misc", "common"}
    assert [str(p.relative_to(ROOT)) for p in FILES if bags & set(module_name(p).split("."))] == []


def test_every_test_folder_is_a_package():
    # Two test files of the same name would shadow each other otherwise.
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()] == []


def test_top_level():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [pathlib.PurePosixPath(line) for line in listed.stdout.splitlines()]
    assert {path.parts[0] for path in paths if len(path.parts) > 1} <= TOP_LEVEL_FOLDERS
    assert {str(path) for path in paths if len(path.parts) == 1} <= TOP_LEVEL_FILES
