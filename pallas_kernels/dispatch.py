"""Choosing one of several implementations of an op.

Each op folder lists what it has in a mapping from name to function. A caller asks for one name, for
a sequence to be tried in order, or for nothing (the op's own order of preference). A sequence may
serve several ops, so names that an op lacks are passed over in it. Beyond that only
`NotImplementedError` moves on to the next candidate: it is how a backend says that this device,
dtype or shape is not for it. Anything else is a fault and propagates.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pallas_kernels import checks

Implementation = None | str | Sequence[str]

_logger = logging.getLogger("pallas_kernels")


class Declined(NotImplementedError):
    """The one implementation that came into question does not take the arguments."""


@functools.cache
def _log_once(op: str, name: str) -> None:
    _logger.info("%s: running the %r implementation", op, name)


_heard: contextvars.ContextVar[dict[str, dict[str, set[str]]] | None] = contextvars.ContextVar(
    "heard", default=None
)


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, dict[str, set[str]]]]:
    """What is dispatched inside: op -> implementation that ran -> reasons of those that declined
    before it. Functions that were traced before say nothing again."""
    token = _heard.set({})
    try:
        yield _heard.get()
    finally:
        _heard.reset(token)


def summary(heard: Mapping[str, Mapping[str, set[str]]]) -> str:
    """What `recorded` heard, in one line: "mosaic_gpu: topk, ...; xla: fp4.pack, ..."."""
    ops: dict[str, list[str]] = {}
    for op, names in sorted(heard.items()):
        for name in names:
            ops.setdefault(name, []).append(op)
    return "; ".join(f"{name}: {', '.join(found)}" for name, found in sorted(ops.items()))


def note(op: str, name: str, declined: Sequence[NotImplementedError] = ()) -> None:
    """Logs, once, and records which implementation of an op runs, and why others do not."""
    _log_once(op, name)
    heard = _heard.get()
    if heard is not None:
        heard.setdefault(op, {}).setdefault(name, set()).update(
            " ".join(str(error).split()) for error in declined
        )


def dispatch(
    op: str,
    implementations: Mapping[str, Callable[..., Any]],
    requested: Implementation,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs `op` by the first implementation that accepts the arguments.

    Args:
        op: the op's name, for messages.
        implementations: name -> function, most preferred first.
        requested: one name (no fallback), a sequence of names (those that exist are tried in
            order), or None (all of `implementations`, in their order).
        *args: positional arguments of the op.
        **kwargs: keyword arguments of the op.

    Returns:
        What the implementation returns.

    Raises:
        ValueError: no requested name exists.
        Declined: the one implementation that comes into question does.
        ExceptionGroup: every candidate of a sequence declines.
    """
    if requested is None:
        names = tuple(implementations)
    elif isinstance(requested, str):
        names = (requested,)
    else:
        names = tuple(requested)
    names = tuple(name for name in names if name in implementations)
    if not names:
        raise ValueError(
            f"{op}: no implementation {requested!r}; there is {', '.join(implementations)}"
        )
    declined = []
    for name in names:
        try:
            watching = checks.watching(name, implementations)
            if watching is None:
                result = implementations[name](*args, **kwargs)
            else:
                result = checks.run(watching, op, name, implementations, args, kwargs)
        except NotImplementedError as error:
            if len(names) == 1:
                raise Declined(f"{op}: {name} was asked for and declines: {error}") from error
            error.add_note(f"{op}: implementation {name!r}")
            declined.append(error)
            continue
        note(op, name, declined)
        return result
    raise ExceptionGroup(f"{op}: no implementation accepts these arguments", declined)
