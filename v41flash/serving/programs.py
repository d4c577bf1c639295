"""The compiled steps of one model: every program that serving runs, jitted once."""

from __future__ import annotations

import functools
from typing import Any

import jax

from v41flash.cache import GlobalCache
from v41flash.serving import decode, forward, prefill, replay, speculative
from v41flash.serving.forward import Model

# On a GPU a decoding loop becomes one CUDA graph, its inner loops included: its kernels are so
# short that a host takes longer to start them than they run. XLA by default leaves loops out.
_ONE_GRAPH = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
}


class Programs:
    """Jitted steps; each compiles once per shape. State that goes in is given up (donated), so that
    pages are written in place.

    Attributes:
        model: the model.
        exact_chunk, encoder_chunk, decoder_replay: of `v41flash.serving.prefill`.
        image_rows: of `v41flash.serving.forward`.
        begin, run: of `v41flash.serving.decode`.
        speculate: `run` of `v41flash.serving.speculative`.
        recall, capture, resume: of `v41flash.serving.replay`.
        read_pages, write_pages: of `GlobalCache`.
    """

    def __init__(self, model: Model, compiler_options: dict[str, Any] | None = None):
        """Nothing is compiled before it is called.

        Args:
            model: the model.
            compiler_options: of XLA, for all programs.
        """
        self.model = model
        jit = functools.partial(jax.jit, compiler_options=compiler_options)

        def of_model(function: Any, **keywords: Any) -> Any:
            return jit(functools.partial(function, model), **keywords)

        loop = dict(donate_argnums=(1, 2))
        if jax.default_backend() == "gpu":
            loop["compiler_options"] = _ONE_GRAPH | (compiler_options or {})

        self.image_rows = of_model(forward.image_rows)
        self.exact_chunk = of_model(prefill.exact_chunk, donate_argnums=(1, 2))
        self.encoder_chunk = of_model(prefill.encoder_chunk, donate_argnums=(1, 2))
        self.decoder_replay = of_model(prefill.decoder_replay, donate_argnums=(1,))
        self.begin = jit(decode.begin, static_argnames="top")
        self.run = of_model(decode.run, static_argnames=("size", "top"), **loop)
        names = ("size", "min_confidence")
        self.speculate = of_model(speculative.run, static_argnames=names, **loop)
        self.recall = jit(replay.recall, donate_argnums=(1,))
        self.capture = jit(replay.capture)
        self.resume = jit(replay.resume, donate_argnums=(0,))
        self.read_pages = jit(GlobalCache.read_pages)
        self.write_pages = jit(GlobalCache.write_pages, donate_argnums=(0,))
