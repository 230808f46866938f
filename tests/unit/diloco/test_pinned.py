"""Copies from a device: one for many parameters, on a stream of their own. The device is a fake."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from atoll.diloco.pinned import PinnedBuffer


class FakeDevice:
    """The parts of `torch.cuda` that are used, and what was asked of them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.training = FakeStream(self, "training")

    def Stream(self) -> FakeStream:
        return FakeStream(self, "side")

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self) -> FakeStream:
        return self.training

    def stream(self, stream: FakeStream) -> Any:
        self.calls.append(f"on {stream.name}")
        return nullcontext()


class FakeStream:
    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: FakeStream) -> None:
        self.device.calls.append(f"{self.name} after {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.device.calls.append(f"{self.name} after event")

    def synchronize(self) -> None:
        raise AssertionError("the host must not wait for a stream")


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def record(self, stream: FakeStream) -> None:
        self.device.calls.append(f"event on {stream.name}")

    def synchronize(self) -> None:
        self.device.calls.append("host after event")


def fetched(staging: PinnedBuffer, slices: list[torch.Tensor]) -> list[float]:
    out = torch.full((sum(each.numel() for each in slices),), torch.nan)
    staging.fetch(slices, out)
    return list(out.tolist())


def test_many_parameters_are_one_copy_behind_the_training_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice()
    staging = PinnedBuffer(device, is_pinned=False)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda _: pytest.fail("a copy of one parameter"))
    slices = [torch.arange(3.0), torch.arange(2).bfloat16(), torch.empty(0)]
    assert fetched(staging, slices) == [0, 1, 2, 0, 1]
    assert device.calls == ["side after training", "on side", "event on side", "host after event"]


def test_values_go_to_the_device_before_the_training_stream_uses_them() -> None:
    device = FakeDevice()
    staging = PinnedBuffer(device, is_pinned=False)
    moved = staging.send(torch.tensor([1.0, 2.5]), torch.device("cpu"))
    assert moved.tolist() == [1, 2.5]
    assert device.calls == [
        "side after training",  # it may still read what was moved before
        "on side",
        "event on side",
        "training after event",
        "host after event",
    ]


def test_in_host_memory_nothing_is_asked_of_a_device() -> None:
    staging = PinnedBuffer.of([torch.ones(2)])
    assert fetched(staging, [torch.ones(2), torch.zeros(1, dtype=torch.float64)]) == [1, 1, 0]
    assert fetched(staging, []) == []
