from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from atoll.core.errors import ValidationError
from atoll.diloco import DiLoCo, presets
from atoll.diloco.codecs import get_codec
from atoll.diloco.outer import value_at
from atoll.diloco.presets import PRESETS, describe, read_settings


def settings(preset: Any = None, parameters: int = 10, **given: Any) -> presets.LoopSettings:
    names = ("sync_every", "outer_lr", "outer_momentum", "outer", "fragments")
    names += ("overlap_steps", "mix", "codec", "down_codec", "warmup")
    return read_settings(preset, parameters, **{name: given.get(name) for name in names})


def test_presets_have_the_published_values() -> None:
    assert settings("diloco").outer[:2] == (0.7, 0.9)
    assert settings("diloco").periods.every == ((0, 500),)
    streaming = settings("streaming-diloco")
    assert (streaming.fragments, streaming.overlap_steps, streaming.mix) == (4, 5, 0.5)
    assert streaming.codec == "e3m0"
    sparse = settings("sparseloco")
    assert (sparse.codec, sparse.outer[:2]) == ("sparse:64/4096@0.95", (1.0, 0.0))
    eager = settings("eager", sync_every=20)
    assert (eager.overlap_steps, eager.is_retained) == (19, True)
    assert settings("muloco").outer[:2] == (0.7, 0.6)


def test_without_a_preset_the_momentum_grows_to_the_published_one() -> None:
    outer = settings(sync_every=5).outer
    assert outer.is_open
    assert (outer.lr, value_at(outer.momentum, 0), value_at(outer.momentum, 160)) == (0.7, 0.5, 0.9)
    assert not settings(sync_every=5, outer_momentum=0.9).outer.is_open


def test_without_a_preset_long_periods_begin_with_a_ramp() -> None:
    assert settings(sync_every=30).outer.ramp == settings(sync_every=30).periods.ramp == 10
    assert settings(sync_every=30, outer_lr=0.5).outer.ramp == 10
    assert settings(sync_every=30, warmup="none").outer.ramp == 0
    assert settings(sync_every=15).outer.ramp == 0
    assert settings(sync_every=8, warmup="ramp").outer.ramp == 6
    assert all(settings(name).outer.ramp == 0 for name in PRESETS)  # as their papers have them


def test_what_is_given_wins_and_the_rest_fits_the_steps_and_the_model() -> None:
    chosen = settings("streaming-diloco", sync_every=6, outer_lr=0.5)
    assert (chosen.fragments, chosen.overlap_steps, chosen.outer.lr) == (3, 1, 0.5)
    assert settings("streaming-diloco", parameters=2).fragments == 2
    own = settings(presets.sparseloco(k=8, chunk=128, decay=0.9), codec=None)
    assert (own.codec, own.down_codec) == ("sparse:8/128@0.9", "sparse:32/128")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"preset": "dilco"}, "preset: 'dilco'.*'streaming-diloco'"),
        ({}, "sync_every"),
        ({"sync_every": 5, "mix": "all"}, "mix: 'all'"),
        ({"sync_every": 5, "fragments": 2}, "sync_every: 5"),
        ({"sync_every": 4, "overlap_steps": 4}, "overlap_steps"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(**given)


@pytest.mark.parametrize("name", ["sparse:64/4096@0.95", "sparse:3/64", "sparse:64/64@0", "sparse"])
def test_the_k_largest_of_each_chunk_travel(name: str) -> None:
    codec = get_codec(name)
    keep, chunk = codec.keep, codec.chunk  # type: ignore[attr-defined]
    values = np.random.default_rng(0).standard_normal(3 * chunk + 17).astype(np.float32)
    sent = codec.decode(codec.encode(values), values.size)
    assert codec.name == name
    for start in range(0, values.size, chunk):
        part, other = values[start : start + chunk], sent[start : start + chunk]
        retained = np.flatnonzero(other)
        assert len(retained) == min(keep, len(part))
        least = np.abs(part[retained]).min()
        assert (np.abs(np.delete(part, retained)) <= least * 1.001).all()
        assert (np.sign(part[retained]) == np.sign(other[retained])).all()


@pytest.mark.parametrize("name", ["sparse:0/64", "sparse:9/100", "sparse:65/64", "sparse:1/64@2"])
def test_a_sparse_codec_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=f"codec: '{name}'"):
        get_codec(name)


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


def train(model: torch.nn.Module, optimizers: list[Any], steps: int) -> list[float]:
    dice, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        x = torch.randn(16, 6, generator=dice)
        loss = torch.nn.functional.mse_loss(model(x), x[:, :2])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_trains(name: str) -> None:
    model = net()
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with DiLoCo(model, inner, sync_every=4, preset=name) as diloco:
        losses = train(model, [inner], 120)
    assert diloco.round == 30
    assert np.mean(losses[-20:]) < 0.9 * np.mean(losses[:20])


def test_muloco_has_muon_for_matrices_and_adamw_for_the_rest() -> None:
    model = net()
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=2e-3)
    with DiLoCo(model, [muon, adamw], sync_every=4, preset="muloco") as diloco:
        losses = train(model, [muon, adamw], 120)
    assert (diloco.round, diloco.warnings) == (30, [])
    assert np.mean(losses[-20:]) < 0.9 * np.mean(losses[:20])


def test_what_is_trained_while_a_result_is_on_its_way_stays_on_top_of_it() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"outer_lr": 0.5, "outer_momentum": 0.0, "overlap_steps": 2, "mix": "keep"}
    with DiLoCo(model, inner, sync_every=3, **settings) as diloco:  # type: ignore[arg-type]
        for _ in range(3):
            model.weight.grad = torch.tensor([[-1.0]])
            inner.step()
        # Sent at 1, of which half is taken; the two steps since then stay.
        assert diloco.global_parameters()["weight"].item() == 0.5
        assert model.weight.item() == 2.5


def test_a_run_says_why_its_outer_settings_are_what_they_are() -> None:
    def reason(preset: str | None, **given: Any) -> str:
        chosen = settings(preset, **{"sync_every": 4} | given)
        return describe(chosen, chosen.periods, chosen.outer)["reason"]

    assert reason(None).startswith("the default: ")
    assert reason("muloco") == "preset 'muloco', arXiv 2505.23725"
    assert reason("muloco", outer_lr=0.7) == "preset 'muloco', arXiv 2505.23725"
    other = reason("muloco", outer="sgd", outer_lr=0.1)
    assert other == "outer as given; outer_lr as given; preset 'muloco', arXiv 2505.23725"
