"""One rank's object for one round: a section for every shard but its own, then a footer."""

from __future__ import annotations

from concurrent.futures import Executor

import numpy as np

from atoll.core.errors import NotFound
from atoll.remote.blobs import Blobs
from atoll.worker.allreduce import wire
from atoll.worker.allreduce.codecs import Codec
from atoll.worker.allreduce.layout import Layout, Vector
from atoll.worker.allreduce.roster import Member


class Blamed(Exception):
    """This upload cannot be used."""

    def __init__(self, upload: str, reason: str) -> None:
        super().__init__(f"{upload}: {reason}")
        self.upload = upload
        self.reason = reason


def build(
    key: str, rank: int, layout: Layout, codec: Codec, flat: Vector, pool: Executor
) -> tuple[bytearray, Vector | None]:
    """The object, and what the codec left out of it (None for an exact codec)."""
    shards = [s for s in range(layout.shards) if s != rank]
    payloads = dict(
        zip(shards, pool.map(lambda s: _encode(codec, flat, layout, s), shards), strict=True)
    )
    sections = [0] * layout.shards
    for shard, payload in payloads.items():
        sections[shard] = wire.SEAL.size + memoryview(payload).nbytes
    footer = wire.seal_footer(wire.fence(key), wire.Footer(layout.pack(), sections))
    starts = wire.section_offsets(sections)
    out = bytearray(starts[-1] + len(footer))
    out[starts[-1] :] = footer

    def write(shard: int) -> None:
        place = wire.fence(key, str(shard))
        wire.seal_into(out, starts[shard], wire.SECTION, place, payloads[shard])

    list(pool.map(write, shards))
    return out, None if codec.is_exact else _left_out(codec, flat, layout, payloads)


def _encode(codec: Codec, flat: Vector, layout: Layout, shard: int) -> bytes | memoryview:
    start, end = layout.bounds(shard)
    if codec.is_exact and np.little_endian:
        return memoryview(flat[start:end]).cast("B")  # type: ignore[arg-type]
    return codec.encode(flat[start:end])


def _left_out(
    codec: Codec, flat: Vector, layout: Layout, payloads: dict[int, bytes | memoryview]
) -> Vector:
    left = np.zeros_like(flat)
    for shard, payload in payloads.items():
        start, end = layout.bounds(shard)
        left[start:end] = flat[start:end] - codec.decode(payload, end - start)
    return left


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
    """Raises Blamed if the section is missing, cut, changed or foreign."""
    size = layout.shard_size(shard)
    starts = wire.section_offsets(member.sections or exact_sections(layout, member.rank))
    place = wire.fence(member.upload, str(shard))
    for is_last in (False, True):  # once more: bytes can also be damaged on the way
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
