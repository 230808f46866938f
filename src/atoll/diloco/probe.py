"""What replicas tell each other in their first rounds, so that a script that trains wrong is named.

It travels in the header of an upload, and from there in the manifest: digests of how the replica
moved, of the data it read, of its buffers and of what is not trained; or which parameter is not
finite.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.core.errors import ValidationError
from atoll.diloco.model import ModelFragment
from atoll.diloco.outer import Floats
from atoll.diloco.parameters import local_tensor, plain_parameters, unwrapped
from atoll.diloco.sharding import fingerprint, read_block

if TYPE_CHECKING:
    import torch

ROUNDS = 3  # of a process, in which it probes: others may miss the first one
BATCHES = 8  # of which the data is read
_PART = 1 << 16  # values that are summed at a time
NOTHING = "0"  # the digest of what cannot be compared
_MASK = (1 << 64) - 1
_MIX = np.uint64(0x9E3779B97F4A7C15)

Sums = tuple[int, int]
# Of the blocks that a process holds: the parameter's index, offset and lengths, and the sum.
Blocks = dict[tuple[int, tuple[int, ...], tuple[int, ...]], int]


class RowProbe:
    """Looks at a pseudo-gradient as it comes, part by part of a row.

    `bad`: the first parameter with a NaN or an infinity. `sums` over the values of this process add
    up over processes, however the replica is cut.
    """

    def __init__(self, fragment: ModelFragment, *, is_summed: bool) -> None:
        self._fragment, self._is_summed = fragment, is_summed
        self.bad: int | None = None
        self._total = self._placed = 0

    def take(self, start: int, part: Floats) -> None:
        # NaN and infinity show in the minimum or the maximum: no mask of the whole is needed.
        if part.size and not (np.isfinite(part.min()) and np.isfinite(part.max())):
            first = start + int(np.flatnonzero(~np.isfinite(part))[0])
            found = self._fragment.index_at(self._fragment.share.start + first)
            self.bad = found if self.bad is None else min(self.bad, found)
        if self._is_summed:
            total, placed = _sums(self._fragment.share.start + start, part)
            self._total, self._placed = self._total + total, self._placed + placed

    @property
    def sums(self) -> Sums:
        return self._total & _MASK, self._placed & _MASK


def _sums(first: int, values: Floats) -> Sums:
    """Over the bits, and over the bits times a number of their place in the fragment.

    Replicas that step by signs move by the same values, each in other places.
    """
    total = placed = 0
    for start in range(0, values.size, _PART):
        bits = values[start : start + _PART].view(np.uint32).astype(np.uint64)
        locations = np.arange(first + start + 1, first + start + bits.size + 1, dtype=np.uint64)
        locations *= _MIX
        locations ^= locations >> np.uint64(31)
        total += int(bits.sum())
        placed += int((bits * locations).sum(dtype=np.uint64))
    return total, placed


def digest(sums: Sequence[Sums]) -> str:
    """A digest of the sums of all processes; "0" if they are of nothing, or of zeros."""
    total = sum(each[0] for each in sums) & _MASK
    other = sum(each[1] for each in sums) & _MASK
    if not total and not other:
        return NOTHING
    return hashlib.blake2b(f"{total}.{other}".encode(), digest_size=6).hexdigest()


class InputWatch:
    """Sums up the tensors that the model is called with in training, for its first calls."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._calls = 0
        self.sums: Sums = (0, 0)
        self._hook = model.register_forward_pre_hook(self._read, with_kwargs=True)

    def _read(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        import torch

        if not module.training or torch.compiler.is_compiling():
            return
        self._calls += 1
        total, odd = self.sums
        for value in _tensors((args, kwargs)):
            if not value.is_complex() and not value.is_meta:
                one, other = fingerprint(local_tensor(value))
                # The number of the call, so that the order of batches counts.
                total, odd = total + self._calls * one, odd + self._calls * other
        self.sums = total & _MASK, odd & _MASK
        if self._calls == BATCHES:
            self.close()

    def close(self) -> None:
        self._hook.remove()


def _tensors(value: Any) -> list[torch.Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def buffer_names(model: torch.nn.Module) -> list[str]:
    return [name for name, value in unwrapped(model).named_buffers() if value.numel()]


def buffer_sums(model: torch.nn.Module) -> Sums:
    total = odd = 0
    for at, (_, value) in enumerate(unwrapped(model).named_buffers(), 1):
        if value.numel() and not value.is_meta and not value.is_complex():
            one, other = fingerprint(local_tensor(value))
            total, odd = total + at * one, odd + at * other
    return total & _MASK, odd & _MASK


def frozen_names(model: torch.nn.Module) -> list[str]:
    return [name for name, value in plain_parameters(model).items() if not value.requires_grad]


def frozen_sums(model: torch.nn.Module) -> Blocks:
    """A sum of the bits of each block that this process holds of what is not trained."""
    import torch

    sums: Blocks = {}
    for at, (name, value) in enumerate(plain_parameters(model).items(), 1):
        local = local_tensor(value)
        # Tensors of another kind, such as quantised ones, have no bits of their own to sum.
        is_plain = type(local) is torch.Tensor and not local.is_complex() and not local.is_meta
        if value.requires_grad or not is_plain:
            continue
        mesh = getattr(value, "device_mesh", None)
        ranks = [] if mesh is None else mesh.mesh.flatten().tolist()
        with suppress(ValidationError):  # cut in a way in which it could not be trained
            block = read_block(name, value, ranks)
            if block.size:
                sums[at, block.offset, block.lengths] = fingerprint(local)[0]
    return sums


def frozen_digest(messages: Sequence[Blocks]) -> str:
    """Of the blocks of all processes, each once: the same however the replica is cut."""
    blocks = {block: each for message in messages for block, each in message.items()}
    return digest([(sum(block[0] * each for block, each in blocks.items()) & _MASK, 0)])
