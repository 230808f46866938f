"""Presets: the settings of a published method under its name.

`PRESETS` has them by name. An argument of `DiLoCo` that is given wins over the preset's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from atoll.core.checks import check_int, check_number
from atoll.core.errors import ValidationError
from atoll.diloco.outer import ByRound, OuterConfig, OuterRule, read_by_round, read_rule
from atoll.diloco.periods import (
    MAX_STEPS,
    NO_WARMUP,
    RAMP,
    Periods,
    check_warmup,
    read_periods,
)

# Momentum that remembers about as much as there is to remember: 1 - 1 / (2 + round / 20), to 0.9.
WARM_UP = ((0, 0.5), (10, 0.6), (20, 0.667), (40, 0.75), (80, 0.833), (160, 0.9))
# Shorter periods are like those that a ramp begins with, and have little to gain from it.
RAMP_FROM = 16
DEFAULT_REASON = (
    "the default: a ramp closes some of the gap to synchronous training for a constant number of "
    "rounds; in runs of some hundred rounds a momentum that grows from 0.5 loses least, while the "
    "published 0.9 is for thousands (docs/evidence.md)"
)
KEEP = "keep"  # for `mix`: what was trained while a result was on its way stays, on top of it


@dataclass(frozen=True)
class OuterPreset:
    """`sync_every` is the published one, for scripts that give none.

    `fragments`: at most so many; as many of them as divide `sync_every` are taken.
    `overlap_steps`: at most so many, always less than a period.
    """

    name: str
    reference: str
    sync_every: int | str | tuple[tuple[int, int], ...] | None = None
    warmup: str | None = NO_WARMUP  # None: a ramp, to periods of at least `RAMP_FROM` steps
    outer_lr: ByRound = 0.7
    outer_momentum: ByRound = 0.9
    outer: str = "nesterov"
    fragments: int = 1
    overlap_steps: int = 0
    mix: float | str = 0.0
    codec: str = "fp32"
    down_codec: str | None = None

    @property
    def reason(self) -> str:
        """Why the outer settings are what they are."""
        return f"preset {self.name!r}, {self.reference}" if self.name else DEFAULT_REASON


def default() -> OuterPreset:
    """What a `DiLoCo` without a preset does: chosen by measurement, see docs/evidence.md."""
    return OuterPreset("", "docs/evidence.md", warmup=None, outer_momentum=WARM_UP)


def diloco() -> OuterPreset:
    return OuterPreset("diloco", "arXiv 2311.08105", sync_every=500)


def streaming_diloco(fragments: int = 4) -> OuterPreset:
    """Fragments, overlap and 4 bits; half of a replica's own values stay when a result comes."""
    check_int("fragments", fragments, 1, 10**6)
    return OuterPreset(
        "streaming-diloco",
        "arXiv 2501.18512",
        sync_every=100,
        outer_lr=0.4,
        fragments=fragments,
        overlap_steps=5,
        mix=0.5,
        codec="e3m0",
    )


def sparseloco(k: int = 64, chunk: int = 4096, decay: float = 0.95) -> OuterPreset:
    """The k largest of each chunk in 2 bits, with error feedback that decays; no momentum.

    Means are the four times as many largest: as good as all of what four replicas send.
    """
    check_int("k", k, 1, chunk)
    check_number("decay", decay, 0, 1)
    return OuterPreset(
        "sparseloco",
        "arXiv 2508.15706",
        sync_every=30,
        outer_lr=1.0,
        outer_momentum=0.0,
        codec=f"sparse:{k}/{chunk}@{decay:g}",
        down_codec=f"sparse:{min(4 * k, chunk)}/{chunk}",
    )


def muloco() -> OuterPreset:
    """For Muon as the inner optimiser of the matrices: `DiLoCo(model, [muon, adamw])`."""
    return OuterPreset(
        "muloco", "arXiv 2505.23725", sync_every=30, outer_lr=0.7, outer_momentum=0.6, codec="int4"
    )


def eager() -> OuterPreset:
    """A result has a whole period to come; what is trained meanwhile stays on top of it."""
    return OuterPreset("eager", "arXiv 2502.12996", sync_every=500, overlap_steps=10**9, mix=KEEP)


PRESETS: dict[str, Callable[..., OuterPreset]] = {
    "diloco": diloco,
    "streaming-diloco": streaming_diloco,
    "sparseloco": sparseloco,
    "muloco": muloco,
    "eager": eager,
}


def read_preset(preset: str | OuterPreset | None) -> OuterPreset:
    """Raises ValidationError for a name that is none."""
    if preset is None:
        return default()
    if isinstance(preset, OuterPreset):
        return preset
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ValidationError("preset", preset, "expected " + " or ".join(map(repr, PRESETS)))
    return PRESETS[preset]()


@dataclass(frozen=True)
class LoopSettings:
    """What a `DiLoCo` does: the preset, with the arguments that were given in its place."""

    preset: OuterPreset
    periods: Periods
    outer: OuterConfig
    fragments: int
    overlap_steps: int
    mix: float
    is_retained: bool  # what was trained while a result was on its way
    codec: str
    down_codec: str | None

    @property
    def by_process(self) -> dict[str, Any]:
        """What all processes of a replica must have alike. The outer settings are compared with
        those of the run.
        """
        names = ("fragments", "overlap_steps", "mix", "codec", "down_codec")
        values = {name: getattr(self, name) for name in names}
        # A codec of the caller's own is known by its name.
        named = {name: getattr(value, "name", value) for name, value in values.items()}
        return named | {"sync_every": self.periods.description}


def read_settings(
    preset: str | OuterPreset | None, parameters: int, **overrides: Any
) -> LoopSettings:
    """Raises ValidationError naming the argument that does not fit.

    `overrides`: the arguments of `DiLoCo`, None where there is none; `parameters`: how many the
    model has, as there cannot be more fragments.
    """
    base = read_preset(preset)
    chosen = replace(
        base, **{name: value for name, value in overrides.items() if value is not None}
    )
    periods = read_periods(chosen.sync_every)
    warmup = chosen.warmup
    if warmup is None:
        warmup = RAMP if periods.every and periods.every[0][1] >= RAMP_FROM else NO_WARMUP
    check_warmup(warmup)
    lr = read_by_round("outer_lr", chosen.outer_lr, 100)
    beta = read_by_round("outer_momentum", chosen.outer_momentum, 1)
    rule: OuterRule = read_rule(chosen.outer)
    fragments, overlap = chosen.fragments, chosen.overlap_steps
    lengths = [steps for _, steps in periods.every]
    if overrides.get("fragments") is None:
        most = max(1, min(fragments, parameters, *lengths, MAX_STEPS))
        fragments = max(
            each for each in range(1, most + 1) if all(length % each == 0 for length in lengths)
        )
    check_int("fragments", fragments, 1, MAX_STEPS)
    if odd := [length for length in lengths if length % fragments]:
        raise ValidationError(
            "sync_every", odd[0], f"expected a multiple of {fragments}, the fragments"
        )
    if periods.clock_s and overlap >= MAX_STEPS:
        expected = "expected fewer steps than the seconds of sync_every have"
        raise ValidationError("overlap_steps", "a whole period", expected)
    longest = min(lengths, default=MAX_STEPS) // fragments - 1
    if overrides.get("overlap_steps") is None:
        overlap = min(overlap, longest)
    check_int("overlap_steps", overlap, 0, longest)
    periods = periods._replace(fragments=fragments)
    ramp = periods.full_ramp if warmup == RAMP else 0
    is_retained = chosen.mix == KEEP
    if not is_retained:
        if isinstance(chosen.mix, str):
            raise ValidationError("mix", chosen.mix, f"expected a number from 0 to 1, or {KEEP!r}")
        check_number("mix", chosen.mix, 0, 1)
    header = ("outer_lr", "outer_momentum", "outer", "warmup")
    is_open = preset is None and all(overrides.get(name) is None for name in header)
    return LoopSettings(
        base,
        periods._replace(ramp=ramp),
        OuterConfig(lr, beta, rule, base.name, is_open, ramp),
        fragments,
        overlap,
        0.0 if is_retained else float(chosen.mix),
        is_retained,
        chosen.codec,
        chosen.down_codec,
    )


def describe(settings: LoopSettings, periods: Periods, outer: OuterConfig) -> dict[str, str]:
    """What a run does, and why, in words; `periods` and `outer` as the run has them."""
    base, chosen = settings.preset, settings.outer
    changes = [
        name
        for name, ours, usual in (
            ("outer", chosen.rule.name, getattr(base.outer, "name", base.outer)),
            ("outer_lr", chosen.lr, base.outer_lr),
            ("outer_momentum", chosen.momentum, base.outer_momentum),
        )
        if ours != usual
    ]
    return {
        "sync_every": periods.description,
        "warmup": periods.ramp_description,
        "outer": f"{outer.rule.name}, {outer.description}",
        "reason": "; ".join([*(f"{name} as given" for name in changes), base.reason]),
        "fragments": str(settings.fragments),
        "overlap_steps": str(settings.overlap_steps),
        "mix": KEEP if settings.is_retained else f"{settings.mix:g}",
        "codec": getattr(settings.codec, "name", settings.codec),
    }
