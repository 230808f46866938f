"""The global parameters as a model to load elsewhere: a state dict, or safetensors in any store.

Names are plain: those of the model without what DDP, FSDP and torch.compile put around it. What is
not synchronised, as buffers and frozen parameters, is this replica's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from atoll.core.checks import check_int
from atoll.core.errors import ValidationError
from atoll.diloco.model import ModelFragment, ReplicaModel
from atoll.diloco.parameters import plain_names, unwrapped
from atoll.objectstore import ObjectStore

if TYPE_CHECKING:
    import torch

FILE_BYTES = 1 << 30
SUFFIX = ".safetensors"


class ModelEntry(NamedTuple):
    """One tensor of the model: fragment and number of its global values, if it has any."""

    name: str
    tensor: torch.Tensor
    fragment: int | None
    number: int

    @property
    def nbytes(self) -> int:
        return int(self.tensor.numel()) * self.tensor.element_size()


class FullModel:
    """A model and its global values. All processes of a replica call the same methods."""

    def __init__(self, model: ReplicaModel, fragments: Sequence[ModelFragment]) -> None:
        self._model, self._fragments = model, fragments
        where = {
            span.name: (at, index)
            for at, fragment in enumerate(fragments)
            for index, span in enumerate(fragment.spans)
        }
        # By the parameter itself: the names of tied ones differ.
        homes = {id(value): where[name] for name, value in model.parameters.items()}
        values = unwrapped(model.module).state_dict(keep_vars=True)
        self.entries = [
            ModelEntry(name, value, *homes.get(id(value), (None, 0)))
            for name, value in plain_names(model.module, values).items()
            if hasattr(value, "element_size")
        ]

    @property
    def parameters(self) -> list[ModelEntry]:
        """Parameters alone, tied ones once, by the first of their names."""
        import torch

        first: dict[int, ModelEntry] = {}
        for entry in self.entries:
            if isinstance(entry.tensor, torch.nn.Parameter):
                first.setdefault(id(entry.tensor), entry)
        return list(first.values())

    def tensor(self, entry: ModelEntry) -> torch.Tensor:
        """The whole tensor, in host memory, in the type that the model has it in."""
        import torch

        if entry.fragment is None:
            value = entry.tensor.detach()
            complete = value.full_tensor() if hasattr(value, "full_tensor") else value
            return complete.cpu().clone()
        fragment = self._fragments[entry.fragment]
        span = fragment.spans[entry.number]
        row = self._model.gather(fragment, span.start, span.stop)
        return torch.from_numpy(row).reshape(span.shape).to(entry.tensor.dtype)


def save(
    complete: FullModel,
    target: str | os.PathLike[str],
    file_bytes: int,
    messages: dict[str, str],
    process: int,
) -> list[str]:
    """The model is at `target`; returns the names of its files.

    A target that ends with `.safetensors` is one file; any other is a folder, with as many files
    as are needed and, for more than one, an index as transformers has it. Process 0 writes, and has
    one file in memory at a time.
    """
    is_writer = not process
    check_int("file_bytes", file_bytes, 1, 1 << 62)
    folder, name = split_target(target)
    groups = [complete.entries] if name else _groups(complete.entries, file_bytes)
    names = [name or "model" + SUFFIX]
    if len(groups) > 1:
        count = len(groups)
        names = [f"model-{at + 1:05d}-of-{count:05d}{SUFFIX}" for at in range(count)]
    store = ObjectStore.open(folder) if is_writer else None
    for each, group in zip(names, groups, strict=True):
        tensors = {}
        for entry in group:
            tensor = complete.tensor(entry)
            if is_writer:
                tensors[entry.name] = tensor.contiguous()
        if store is not None:
            store.put(each, _packed(tensors, messages))
    if len(groups) > 1:
        index = {
            "metadata": {"total_size": sum(entry.nbytes for entry in complete.entries)},
            "weight_map": {e.name: n for n, g in zip(names, groups, strict=True) for e in g},
        }
        names = [*names, f"model{SUFFIX}.index.json"]
        if store is not None:
            store.put(names[-1], json.dumps(index, indent=2).encode())
    return names


def summary_of(run: str, round: int, step: int) -> dict[str, str]:
    """What a file says of the run that it comes from, which may have no name."""
    summary = {"atoll.round": str(round), "atoll.step": str(step)}
    return summary | ({"atoll.main": run} if run else {})


def split_target(target: str | os.PathLike[str]) -> tuple[str, str]:
    """The folder, and the name of the one file if the target is a file. Raises ValidationError."""
    text = os.fspath(target) if isinstance(target, os.PathLike) else target
    expected = "expected a folder or a file that ends with .safetensors, as a path or a URI"
    if not isinstance(text, str) or not text:
        raise ValidationError("target", target, expected)
    if text.endswith(SUFFIX):
        folder, _, name = text.rpartition("/")
        return folder or ("/" if text.startswith("/") else "."), name
    if os.path.splitext(text)[1] in (".pt", ".pth", ".bin", ".ckpt"):
        raise ValidationError("target", text, expected)
    return text, ""


def _groups(entries: Sequence[ModelEntry], file_bytes: int) -> list[list[ModelEntry]]:
    groups: list[list[ModelEntry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.nbytes > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.nbytes
    return groups


def _packed(tensors: dict[str, torch.Tensor], messages: dict[str, str]) -> bytes:
    import safetensors.torch

    packed: bytes = safetensors.torch.save(tensors, metadata={"format": "pt", **messages})
    return packed
