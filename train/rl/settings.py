"""`config.rl` as a checked, typed section, beside those of `train.settings`."""

from __future__ import annotations

import dataclasses
import math

from ml_collections import ConfigDict

from train import settings as settings_lib
from train.settings import Settings, SettingsError
from v41flash.effort import HIGHEST, LOWEST, LengthPrice


@dataclasses.dataclass(frozen=True)
class RLSettings:
    """`config.rl`: what is sampled in a step, how it is rewarded, and what is learnt from it.

    A step asks `problems` problems, each under `efforts` efforts, `samples` times: groups of
    `samples` trajectories, in which rewards are compared.
    """

    # As `eval.tasks.verifiable.open_task` names it.
    task: str = ""
    problems: int = 16
    efforts: int = 2
    samples: int = 8
    # Efforts that are drawn from.
    effort_values: tuple = tuple(range(5, 101, 5))
    # Tokens of a trajectory at most. They are drawn at temperature 1 from the whole distribution.
    max_tokens: int = 256
    # Sequences that are decoded together.
    decode_batch: int = 256
    # Updates that share a step's trajectories.
    updates: int = 1
    # The ratio of probabilities counts within 1 - clip_low .. 1 + clip_high.
    clip_low: float = 0.2
    clip_high: float = 0.2
    # Divide advantages by the standard deviation of their group. It makes groups with nearly equal
    # rewards as loud as others, so the length price no longer weighs what it says.
    scale_advantages: bool = False
    # Weight of the KL divergence from the parameters that the run started with; 0: none.
    reference_weight: float = 0.0
    # Largest mean difference, nats a token, between the log-probabilities of sampler and trainer.
    max_gap: float = 0.05
    # The length price (`v41flash.effort.LengthPrice`).
    price: str = "exponential"
    k0: float = 1.0
    b_min: float = 1.0
    scale: float = 1.0
    delta_b: float = 25.0
    l_norm: float = 4096.0
    c_max: float = 1.0

    def __post_init__(self):
        """Checks the values."""
        for name in ("problems", "efforts", "max_tokens", "decode_batch", "updates"):
            self._require(name, vars(self)[name] >= 1, "at least 1")
        self._require("samples", self.samples >= 2, "at least 2: rewards are compared in a group")
        values = self.effort_values
        right = isinstance(values, tuple) and all(
            isinstance(value, int) and LOWEST <= value <= HIGHEST for value in values
        )
        self._require(
            "effort_values", right and len(set(values)) == len(values) > 0,
            f"different whole numbers, {LOWEST} .. {HIGHEST}",
        )  # fmt: skip
        self._require("efforts", self.efforts <= len(values), f"at most {len(values)}")
        groups = self.problems * self.efforts
        self._require("updates", groups % self.updates == 0, f"a divisor of {groups} groups")
        for name in ("clip_low", "reference_weight"):
            self._require(name, 0 <= vars(self)[name] < math.inf, "at least 0, finite")
        self._require("clip_low", self.clip_low < 1, "below 1")
        for name in ("clip_high", "max_gap"):
            self._require(name, 0 < vars(self)[name] < math.inf, "positive, finite")
        self.length_price()

    def _require(self, name: str, condition: bool, right: str) -> None:
        if not condition:
            raise SettingsError(f"rl.{name} = {vars(self)[name]!r}: must be {right}")

    def length_price(self) -> LengthPrice:
        """The price of a trajectory's tokens."""
        return LengthPrice(
            k0=self.k0,
            b_min=self.b_min,
            scale=self.scale,
            delta_b=self.delta_b,
            l_norm=self.l_norm,
            c_max=self.c_max,
            shape=self.price,
        )


def resolve(config: ConfigDict) -> tuple[Settings, RLSettings]:
    """Checks a configuration with a section `rl`.

    `data` gives the tokenizer, `sequence_length` (of the rows that trajectories are packed into)
    and `batch_size` (rows that gradients are taken of at once).

    Raises:
        SettingsError: as `train.settings.resolve`; or what reinforcement learning has not got:
            stages, a warm-up of indexers, rewinds, several devices, images.
    """
    if "rl" not in config:
        raise SettingsError("config.rl is missing; start from configs._defaults.with_rl()")
    base = ConfigDict({key: value for key, value in config.items() if key != "rl"})
    settings = settings_lib.resolve(base)
    chosen = settings_lib.read_section(RLSettings, "rl", config.rl)
    train = settings.train
    if train.stages or train.indexer_warmup_steps:
        raise SettingsError(
            "train.stages, train.indexer_warmup_steps: must be () and 0 with reinforcement learning"
        )
    for name in ("max_rewinds", "check_kernels", "profile_steps"):
        if vars(train)[name]:
            raise SettingsError(
                f"train.{name} = {vars(train)[name]}: must be 0 with reinforcement learning"
            )
    if train.on_save_error != "stop":
        raise SettingsError(
            f"train.on_save_error = {train.on_save_error!r}: must be 'stop' with reinforcement "
            "learning"
        )
    if train.accumulation != 1:
        raise SettingsError(
            f"train.accumulation = {train.accumulation}: must be 1; data.batch_size is what fits"
        )
    for axis, size in settings.mesh.sizes().items():
        if size not in (1, -1):
            raise SettingsError(f"mesh.{axis} = {size}: must be 1, this runs on one device")
    if settings.model.vision is not None:
        raise SettingsError("model.vision: must be None, tasks have no images")
    if not chosen.task:
        raise SettingsError("rl.task is empty: name a task, such as modular_walk")
    return settings, chosen
