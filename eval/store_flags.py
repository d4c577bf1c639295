"""The flags of the prefix store, which generation and the endpoint share."""

from __future__ import annotations

import math
from typing import NamedTuple

from absl import flags

from v41flash.errors import InputError
from v41flash.serving import PrefixStore
from v41flash.tiers.disk import DEFAULT_BUDGET, DEFAULT_LIFETIME
from v41flash.tiers.host import DEFAULT_BYTES, DEFAULT_TTL

_GIB = 1 << 30


class StoreFlags(NamedTuple):
    """What the flags say.

    Attributes:
        folder: of the store; None: there is none.
        budget, min_lifetime, host_budget, host_ttl: see `PrefixStore.open`.
    """

    folder: str | None
    budget: int
    min_lifetime: float
    host_budget: int
    host_ttl: float

    def open(self) -> PrefixStore | None:
        """The store; InputError where it cannot be used."""
        if self.folder is None:
            return None
        settings = self._asdict()
        return PrefixStore.open(settings.pop("folder"), **settings)


def define(values: flags.FlagValues) -> None:
    """Adds them to a program's flags."""
    here = dict(flag_values=values)
    flags.DEFINE_string("store", None, "Folder for prefixes that later prompts share.", **here)
    for name, default, text in (
        ("store_gb", DEFAULT_BUDGET / _GIB, "Size of the store at most, GiB."),
        ("store_hours", DEFAULT_LIFETIME / 3600, "Hours for which its pages stay unused."),
        ("host_gb", DEFAULT_BYTES / _GIB, "Window rows on the host at most, GiB; 0: none."),
        ("host_minutes", DEFAULT_TTL / 60, "Minutes for which those stay unused."),
    ):
        flags.DEFINE_float(name, default, text, **here)


def read(values: flags.FlagValues) -> StoreFlags:
    """What was given.

    Raises:
        InputError: a size or time that is none.
    """
    for name in ("store_gb", "store_hours", "host_gb", "host_minutes"):
        if not 0 <= values[name].value < math.inf:
            raise InputError(f"--{name}={values[name].value}: must be a number, 0 or more")
        if values[name].present and not values.store:
            raise InputError(f"--{name} without --store: name the folder of the store")
    if values.store_gb == 0:
        raise InputError("--store_gb=0: a store needs room for its pages")
    return StoreFlags(
        folder=values.store or None,
        budget=int(values.store_gb * _GIB),
        min_lifetime=values.store_hours * 3600,
        host_budget=int(values.host_gb * _GIB),
        host_ttl=values.host_minutes * 60,
    )
