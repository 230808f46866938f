"""Copies between a device and the host: through pinned buffers, on a stream of their own.

On an accelerator a slice of many parameters becomes one copy, and the training stream is neither
read nor waited on by the host. Tensors in host memory are copied as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class PinnedBuffer:
    """`device` has streams and events, as `torch.cuda` does; None: the model is in host memory."""

    def __init__(self, device: Any = None, *, is_pinned: bool = True) -> None:
        self._device = device
        self._is_pinned = is_pinned
        self._stream: Any = None if device is None else device.Stream()
        self._room: torch.Tensor | None = None

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> PinnedBuffer:
        """For a model with these local tensors."""
        import torch

        kinds = {tensor.device.type for tensor in tensors} - {"cpu"}
        return cls(torch.get_device_module(kinds.pop())) if len(kinds) == 1 else cls()

    @property
    def is_needed(self) -> bool:
        return self._device is not None

    def fetch(self, slices: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """`out`, float32 in host memory, holds the values of the slices, one after the other."""
        import torch

        if self._device is None or not out.numel():
            if slices:
                torch.cat(list(slices), out=out)
            return
        device = self._device
        room = self._pinned(out.numel())
        # Ordered after the optimiser's step, without stopping the host until it is done.
        self._stream.wait_stream(device.current_stream())
        with device.stream(self._stream):
            packed = torch.cat([each.float() for each in slices])
            room.copy_(packed, non_blocking=True)
            done = device.Event()
            done.record(self._stream)
        done.synchronize()
        out.copy_(room)

    def send(self, values: torch.Tensor, where: torch.device) -> torch.Tensor:
        """The values on that device; used by the training stream only."""
        device = self._device
        room = self._pinned(values.numel())
        room.copy_(values)
        # What was moved before may lie in the same memory, and the training stream still reads it.
        self._stream.wait_stream(device.current_stream())
        with device.stream(self._stream):
            moved = room.to(where, non_blocking=True)
            done = device.Event()
            done.record(self._stream)
        device.current_stream().wait_event(done)
        done.synchronize()  # the buffer is used again
        return moved

    def _pinned(self, size: int) -> torch.Tensor:
        import torch

        if self._room is None or self._room.numel() < size:
            self._room = torch.empty(size, dtype=torch.float32, pin_memory=self._is_pinned)
        return self._room[:size]
