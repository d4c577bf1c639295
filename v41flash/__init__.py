"""DeepSeek-V4.1-Flash in JAX and Flax."""

__version__ = "0.1.0"
