"""The upload of one rank to one round: a section for each shard but its own, then a footer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import NotFound, ValidationError
from atoll.diloco.allreduce import wire
from atoll.diloco.allreduce.codecs import Codec
from atoll.diloco.allreduce.feedback import left_out
from atoll.diloco.allreduce.layout import Layout, Vector, scatter, tensor_at
from atoll.diloco.allreduce.roster import Member
from atoll.diloco.blobs import Blobs


class Blamed(Exception):
    """This upload cannot be used."""

    def __init__(self, upload: str, reason: str) -> None:
        super().__init__(f"{upload}: {reason}")
        self.upload = upload
        self.reason = reason


class Cargo:
    """The values one rank brings, shard by shard, and the object made of them.

    With an exact codec the values lie where they are sent from, so nothing is copied. The memory
    is used again in every round: fresh pages cost more than the arithmetic.
    """

    def __init__(self, layout: Layout, rank: int, codec: Codec) -> None:
        self.layout = layout
        self.rank = rank
        self.codec = codec
        self._buffer: NDArray[np.uint8] | None = None
        if codec.is_exact:
            sections = exact_sections(layout, rank)
            starts = wire.section_offsets(sections)
            footer = len(wire.seal_footer(bytes(16), wire.Footer(layout.pack(), sections)))
            self._buffer = np.empty(starts[-1] + footer, np.uint8)
            self.parts = [
                np.empty(layout.shard_size(s), np.float32)
                if s == rank
                else self._buffer[starts[s] + wire.SEAL.size : starts[s + 1]].view("<f4")
                for s in range(layout.shards)
            ]
        else:
            flat = np.empty(layout.size, np.float32)
            bounds = [layout.bounds(s) for s in range(layout.shards)]
            self.parts = [flat[start:end] for start, end in bounds]

    def load(self, tensors: Sequence[Any], residual: Vector | None) -> None:
        """Copy the values of the tensors, plus what earlier rounds left out."""
        scatter(tensors, self.parts)
        self._add(residual)

    def load_owed(self, residual: Vector | None) -> None:
        """Bring nothing but what earlier rounds left out."""
        for part in self.parts:
            part.fill(0)
        self._add(residual)

    def _add(self, residual: Vector | None) -> None:
        if residual is not None:
            for shard, part in enumerate(self.parts):
                start, end = self.layout.bounds(shard)
                part += residual[start:end]

    def check_finite(self) -> None:
        """Raises ValidationError naming the first tensor with a NaN or an infinity."""
        for shard, part in enumerate(self.parts):
            # NaN and infinity show in the minimum or the maximum: no mask of the whole is needed.
            if part.size and not (np.isfinite(part.min()) and np.isfinite(part.max())):
                at = int(np.flatnonzero(~np.isfinite(part))[0])
                index = tensor_at(self.layout, self.layout.bounds(shard)[0] + at)
                codecs = f"{self.layout.codec!r}, {self.layout.down_codec!r}"
                raise ValidationError(
                    f"tensors[{index}]", float(part[at]), f"codecs {codecs} need finite numbers"
                )

    def pack(self, key: str, pool: Executor) -> tuple[bytes | memoryview, Vector | None]:
        """The object to be put at `key`, and what the codec left out (None if it is exact)."""
        if self._buffer is not None:
            return self._pack_in_place(key, self._buffer, pool), None
        shards = [s for s in range(self.layout.shards) if s != self.rank]
        encoded = list(pool.map(lambda s: self.codec.encode(self.parts[s]), shards))
        payloads = dict(zip(shards, encoded, strict=True))
        sections = [
            wire.SEAL.size + len(payloads[s]) if s in payloads else 0
            for s in range(self.layout.shards)
        ]
        sealed = [
            wire.seal(wire.SECTION, wire.fence(key, str(s)), payload)
            for s, payload in payloads.items()
        ]
        footer = wire.Footer(self.layout.pack(), sections)
        data = b"".join([*sealed, wire.seal_footer(wire.fence(key), footer)])
        return data, self._left_out(payloads)

    def as_sent(self, shard: int) -> Vector:
        """The values of the shard as the upload holds them, and so as every other rank has them.

        The own shard is in no upload, so it counts as it is.
        """
        if self.codec.is_exact or shard == self.rank:
            return self.parts[shard]
        return self.codec.decode(self.codec.encode(self.parts[shard]), len(self.parts[shard]))

    def whole(self) -> Vector:
        """All values as one new vector."""
        return np.concatenate(self.parts)

    def _pack_in_place(self, key: str, out: NDArray[np.uint8], pool: Executor) -> memoryview:
        sections = exact_sections(self.layout, self.rank)
        starts = wire.section_offsets(sections)

        def write(shard: int) -> None:
            body = memoryview(self.parts[shard]).cast("B")  # type: ignore[arg-type]
            head = wire.header(wire.SECTION, wire.fence(key, str(shard)), body)
            start = starts[shard]
            out[start : start + len(head)] = np.frombuffer(head, np.uint8)

        list(pool.map(write, (s for s in range(self.layout.shards) if s != self.rank)))
        footer = wire.seal_footer(wire.fence(key), wire.Footer(self.layout.pack(), sections))
        out[starts[-1] :] = np.frombuffer(footer, np.uint8)
        return memoryview(out)  # type: ignore[arg-type]

    def _left_out(self, payloads: dict[int, bytes]) -> Vector:
        residual = np.zeros(self.layout.size, np.float32)
        for shard, payload in payloads.items():
            start, end = self.layout.bounds(shard)
            residual[start:end] = left_out(
                self.parts[shard], self.codec.decode(payload, end - start)
            )
        return residual


def read_footer(blobs: Blobs, key: str, size: int, layout: Layout) -> wire.Footer:
    """The footer of an upload of `size` bytes. Raises Blamed if it is not a good upload."""
    guess = wire.footer_guess(layout.shards, len(layout.tensors))
    try:
        tail = blobs.get(key, max(0, size - guess), size)
        if tail.nbytes < wire.footer_length(tail):
            tail = blobs.get(key, max(0, size - wire.footer_length(tail)), size)
        return wire.unseal_footer(wire.fence(key), tail)
    except (NotFound, wire.Corrupt) as error:
        raise Blamed(key, str(error)) from error


def read_section(blobs: Blobs, member: Member, shard: int, layout: Layout, codec: Codec) -> Vector:
    """The values of one shard out of a member's upload.

    Raises Blamed if the section is missing, cut, changed or foreign.
    """
    size = layout.shard_size(shard)
    starts = wire.section_offsets(member.sections or exact_sections(layout, member.rank))
    place = wire.fence(member.upload, str(shard))
    for is_last in (False, True):  # a second try: bytes can also be damaged on the way
        try:
            data = blobs.get(member.upload, starts[shard], starts[shard + 1])
            return codec.decode(wire.unseal(wire.SECTION, place, data), size)
        except (NotFound, ValueError) as error:
            if is_last:
                raise Blamed(member.upload, str(error)) from error
    raise AssertionError("unreachable")


def exact_sections(layout: Layout, rank: int) -> list[int]:
    """The section lengths of an exact upload follow from the layout."""
    return [
        0 if shard == rank else wire.SEAL.size + 4 * layout.shard_size(shard)
        for shard in range(layout.shards)
    ]
