"""How the Hopper kernels of hyper-connections go through their tokens, forward and backward.

A block of the grid has 64 channels of every stream, and a run of tokens. One warpgroup copies; two
compute, each on 64 tokens at a time that it has shared memory of its own for, a ring of places. A
place holds pieces [64 tokens, 32 channels] of all arrays, so that few registers hold one, and what
each token is multiplied by, as rows [64 tokens]. Results take the place of what they were computed
from, and leave from there.

Sums over all channels come out as one partial sum for each 64 channels, sums over tokens as one for
each run and warpgroup; XLA adds them in a fixed order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TOKENS, CHANNELS, PIECE = 64, 64, 32
HALVES = CHANNELS // PIECE
WARPGROUPS = 2
# Registers of a number for each of 64 tokens.
BY_TOKEN = plgpu.Layout.WGMMA.reduce(1)
_SHARED_MEMORY = 227 * 1024 - 1024
_MULTIPROCESSORS = 132
_ROW_BYTES = 4 * TOKENS
_PIECE_BYTES = 2 * TOKENS * PIECE
_TRANSFORMS = plgpu.TilingTransform((8, PIECE)), plgpu.SwizzleTransform(2 * PIECE)


def tiled(*shape: int) -> Any:
    """Shared memory for bfloat16 pieces, as the copy engine and the tensor cores want them."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=_TRANSFORMS)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """One kernel's way through its tokens.

    Attributes:
        tokens: a multiple of 64.
        channels: d, a multiple of 64.
        wide: arrays of d channels that a place holds a piece of.
        narrow: bfloat16 arrays of 32 columns that it holds a piece of.
        rows: numbers that every token has there.
        fixed: bytes of shared memory that the kernel holds beside the places.
        interpret: parameters of interpret mode, or None.
    """

    tokens: int
    channels: int
    wide: int
    narrow: int
    rows: int
    fixed: int
    interpret: Any

    @property
    def slices(self) -> int:
        """Of 64 channels each."""
        return self.channels // CHANNELS

    @property
    def tiles(self) -> int:
        """Of 64 tokens each."""
        return self.tokens // TOKENS

    @property
    def places(self) -> int:
        """Places of each warpgroup's ring: two, or one where there is no more room."""
        one = (HALVES * self.wide + self.narrow) * _PIECE_BYTES + self.rows * _ROW_BYTES
        return 2 if self.fixed + 2 * WARPGROUPS * one <= _SHARED_MEMORY else 1

    @property
    def runs(self) -> int:
        """Runs that the tokens are cut into: as many as leave the fewest multiprocessors idle."""

        def turns(runs: int) -> int:
            per_block = pl.cdiv(pl.cdiv(self.tiles, runs), WARPGROUPS)
            # Beginning takes a block about as long as two turns.
            return pl.cdiv(self.slices * runs, _MULTIPROCESSORS) * (per_block + 2)

        return min(range(1, min(self.tiles, _MULTIPROCESSORS) + 1), key=turns)

    def call(
        self,
        body: Callable[..., None],
        name: str,
        results: Sequence[jax.ShapeDtypeStruct],
        arrays: Sequence[jax.Array],
        scratch: dict[str, Any],
    ) -> Sequence[jax.Array]:
        """Runs `body(go, *references of arrays and results, **scratch)`.

        Beside what is named in `scratch` it is given `wide` bfloat16[places, wide, 2, 64, 32],
        `narrow` bfloat16[places, narrow, 64, 32] where there are any, and `rows`
        float32[places, rows, 64]. It calls `go` with all arguments of `_go` that are functions.
        """
        places = WARPGROUPS * self.places
        memory = dict(
            wide=tiled(places, self.wide, HALVES, TOKENS, PIECE),
            rows=plgpu.SMEM((places, self.rows, TOKENS), jnp.float32),
            full=plgpu.Barrier(
                num_arrivals=HALVES * self.wide + self.narrow + 1, num_barriers=places
            ),
            free=plgpu.Barrier(num_barriers=places),
        )
        if self.narrow:
            memory["narrow"] = tiled(places, self.narrow, TOKENS, PIECE)

        def begun(run_ref, *refs, full, free, **memory):
            body(functools.partial(self._go, run_ref, full, free), *refs, **memory)

        # The length of a run is no constant to the compiler, which would unroll short ones.
        run = jnp.full((1,), pl.cdiv(self.tiles, self.runs), jnp.int32)
        return plgpu.kernel(
            begun,
            out_type=tuple(results),
            grid=(self.slices, self.runs),
            grid_names=("slice", "run"),
            num_threads=WARPGROUPS + 1,
            thread_name="wg",
            scratch_types=memory | scratch,
            interpret=self.interpret,
            kernel_name=name,
        )(run, *arrays)

    def _go(
        self,
        run_ref: Any,
        full: Any,
        free: Any,
        begin: Callable[[], None],
        fetch: Callable[[jax.Array, jax.Array, Any], None],
        work: Callable[[jax.Array, jax.Array, Any], Any],
        carry: Callable[[], Any],
        end: Callable[[Any], None],
    ) -> None:
        """What a block does.

        Args:
            run_ref: int32[1] in main memory, tiles of a run.
            full: barriers, one a place: all copies into it have arrived.
            free: barriers, one a place: it may be overwritten.
            begin: starts copies of what all tokens share.
            fetch: (first token, place, barrier) -> starts the copies into a place.
            work: (first token, place, carry) -> carry; computes, and starts the copies out of it.
            carry: what a warpgroup begins with; waits for what `begin` copies.
            end: (carry at the end) -> stores it.
        """
        warpgroup = lax.axis_index("wg")
        first = lax.axis_index("run") * run_ref[0]
        count = jnp.clip(self.tiles - first, 0, run_ref[0])

        places = WARPGROUPS * self.places

        def token(tile):
            return pl.multiple_of((first + tile) * TOKENS, TOKENS)

        @pl.when(warpgroup == WARPGROUPS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            begin()

            @pl.loop(0, count)
            def _(tile):
                at = self._place(tile)

                @pl.when(tile >= places)
                def _():
                    plgpu.barrier_wait(free.at[at])

                fetch(token(tile), at, full.at[at])

            @pl.loop(jnp.maximum(count - places, 0), count)
            def _(tile):
                plgpu.barrier_wait(free.at[self._place(tile)])

        @pl.when(warpgroup < WARPGROUPS)
        def _():
            plgpu.set_max_registers(232, action="increase")

            def one(turn, state):
                tile = WARPGROUPS * turn + warpgroup
                at = self._place(tile)
                plgpu.barrier_wait(full.at[at])
                state = work(token(tile), at, state)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(free.at[at])
                return state

            turns = lax.div(count - warpgroup + WARPGROUPS - 1, WARPGROUPS)
            end(lax.fori_loop(0, turns, one, carry()))
            plgpu.wait_smem_to_gmem(0)

    def _place(self, tile: jax.Array) -> jax.Array:
        """Where a tile is; the warpgroups take turns, and have places of their own."""
        return lax.rem(tile, WARPGROUPS * self.places)


def fetch_pieces(
    sources: Sequence[tuple[Any, int]], channels: int, here: Any, place: Any, barrier: Any
) -> None:
    """Starts the copies of this block's pieces of `sources`, (array, stream) each, into a place.

    Args:
        sources: arrays [tokens, n * channels] in main memory.
        channels: d.
        here: tokens.
        place: bfloat16[len(sources) or more, 2, 64, 32].
        barrier: where they arrive.
    """

    @pl.loop(0, HALVES)
    def _(half):
        for number, (source, stream) in enumerate(sources):
            own = source.at[here, columns(stream, channels, half)]
            plgpu.copy_gmem_to_smem(own, place.at[number, half], barrier)


def store_pieces(targets: Sequence[tuple[Any, int]], channels: int, here: Any, place: Any) -> None:
    """Starts the copies of a place's pieces to `targets`; arguments as for `fetch_pieces`."""

    @pl.loop(0, HALVES)
    def _(half):
        for number, (target, stream) in enumerate(targets):
            own = target.at[here, columns(stream, channels, half)]
            plgpu.copy_smem_to_gmem(place.at[number, half], own)


def piece(ref: Any) -> jax.Array:
    """A piece in float32; every thread holds the same places of all pieces."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def per_token(rows: Any, at: jax.Array, number: int) -> jax.Array:
    """Row `number` of a place, over a piece: float32[64, 32]."""
    values = plgpu.load(rows.at[at, number], layout=BY_TOKEN)
    return lax.broadcast_in_dim(values, (TOKENS, PIECE), (0,))


def columns(stream: int, channels: int, half: int) -> Any:
    """Columns of [tokens, n * d] of this block's piece of a stream."""
    start = stream * channels + lax.axis_index("slice") * CHANNELS + half * PIECE
    return pl.ds(pl.multiple_of(start, PIECE), PIECE)
