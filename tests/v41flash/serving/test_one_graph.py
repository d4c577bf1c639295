"""On a GPU: a decoding loop as one CUDA graph gives the bits that its kernels give one by one."""

import jax
import numpy as np
import pytest

from eval import serving_bench
from v41flash.cache import PAGE_TOKENS
from v41flash.serving.forward import Model
from v41flash.serving.programs import Programs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="CUDA graphs need a GPU"),
]
_CONTEXT, _STEPS, _CALLS = 4096, 8, 3


def test_the_same_bits_without_it():
    model = Model(serving_bench.bench_model())
    compiled = serving_bench.Compiled(model, 1, _CONTEXT + PAGE_TOKENS, ("filled", "run"))
    apart = Programs(model, {"xla_gpu_enable_command_buffer": ""})
    weights = compiled.weights()
    results = []
    for programs in (compiled.programs, apart):
        state = compiled.state(weights, _CONTEXT)
        sequences, *rest = serving_bench.decoding(model.config, 1)
        for _ in range(_CALLS):
            keywords = {} if programs is compiled.programs else {"size": _STEPS}
            state, sequences, chunk = programs.run(weights, state, sequences, *rest, **keywords)
            results.append(jax.device_get((chunk.tokens, chunk.logprobs)))
    first, second = results[:_CALLS], results[_CALLS:]
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert np.isfinite([logprobs for _, logprobs in first]).all()
    assert len({int(token) for tokens, _ in first for token in tokens.ravel()}) > 2
