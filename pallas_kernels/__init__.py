"""Kernels of DeepSeek-V4.1-Flash, one folder per op, usable without the model.

Every op has a differentiable XLA definition in its `reference.py`; faster backends lie beside it
and are checked against it.
"""
