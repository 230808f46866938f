"""Shares of a version: what several processes, or replicas, upload of it, each its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from atoll.files.writing import Buffer
from atoll.objectstore.effects import Put
from atoll.weights.machine import Delta, Pieces, Steps, sha256_of
from atoll.weights.records import SEAL, FullCopy, Part, Share, seal


class Shards(Protocol):
    """Tensors of which a full copy has some files."""

    @property
    def state(self) -> str: ...

    def shards(self, label: str) -> Iterable[tuple[str, Pieces, Iterable[str]]]:
        """Files with `label` in their names, and the tensors in each."""

    def index(self, names: Mapping[str, str], size: int) -> Iterable[tuple[str, bytes]]:
        """The files of a full copy beside those of the tensors."""


def _size_of(pieces: Iterable[Buffer]) -> int:
    return sum(memoryview(piece).nbytes for piece in pieces)


def put_delta(key: str, delta: Delta) -> Steps[tuple[list[Buffer], Share]]:
    """Put the parts of a delta under keys that begin with `key`."""
    bodies, parts = list[Buffer](), list[Part]()
    for body in delta:
        part = Part(key=f"{key}.{len(parts)}", size=_size_of([body]), sha256=sha256_of([body]))
        yield Put(part.key, body)
        bodies.append(body)
        parts.append(part)
    size = sum(part.size for part in parts)
    return bodies, Share(state=delta.state, parts=tuple(parts), changed=delta.changed, size=size)


def put_files(key: str, values: Shards) -> Steps[Share]:
    """Put the files of these tensors, for a full copy in the folder of `key`."""
    folder, _, label = key.rpartition("/")
    files, names, size = dict[str, str](), dict[str, str](), 0
    for file, pieces, tensors in values.shards(label.replace(".", "-")):
        yield Put(f"{folder}/{file}", pieces)
        files[file] = sha256_of(pieces)
        names |= dict.fromkeys(tensors, file)
        size += _size_of(pieces)
    return Share(state=values.state, files=files, names=names, size=size)


def put_index(folder: str, values: Shards, state: str, shares: Sequence[Share]) -> Steps[int]:
    """Put what makes a full copy of the files of all shares, its seal last; returns its bytes."""
    digests = {file: digest for share in shares for file, digest in share.files.items()}
    names = {name: file for share in shares for name, file in share.names.items()}
    size = 0
    for file, body in values.index(names, sum(share.size for share in shares)):
        digests[file] = sha256_of([body])
        size += len(body)
        yield Put(f"{folder}/{file}", body)
    yield Put(f"{folder}/{SEAL}", seal(FullCopy(state=state, files=digests)))
    return size
