"""The series and rounds of one training in bounded bytes, to go on from elsewhere. Pure.

What does not fit is made coarser. Where even the coarsest is too much, series of the highest ranks
are left out, and their points are counted as skipped.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from atoll.core.errors import ValidationError
from atoll.series.fold import BAD, COUNT, LEAST_BUCKETS, Series
from atoll.series.rounds import CopiedRounds

ROW_BYTES = 24  # of a bucket, packed: about
HEAD_BYTES = 64  # of a series beside its buckets: about

SeriesKey = tuple[int, int, str]  # rank, process, name


class Losses(msgspec.Struct, frozen=True):
    """How far each process was heard, and what is not kept."""

    numbers: dict[str, int]  # of the newest batch, by process
    skipped: int  # figures
    missed: int  # batches


class TrainingCopy(msgspec.Struct, frozen=True):
    """What is copied of one training."""

    series: list[tuple[int, int, str, bytes]]
    losses: Losses
    rounds: CopiedRounds
    is_finished: bool = False


_DECODER = msgspec.msgpack.Decoder(TrainingCopy)


def pack(
    series: Mapping[SeriesKey, Series],
    losses: Losses,
    rounds: CopiedRounds,
    most_bytes: int,
    *,
    is_finished: bool = False,
) -> bytes:
    """At most `most_bytes`, but for a few of its frame. `series` are made coarser in place."""
    left = most_bytes - len(msgspec.msgpack.encode((losses, rounds)))
    most = max(LEAST_BUCKETS, left // max(1, len(series)) // ROW_BYTES)
    while True:
        rows = []
        for (rank, process, name), one in sorted(series.items()):
            while len(one) > most:
                one.halve()
            rows.append((rank, process, name, one.packed()))
        sizes = [HEAD_BYTES + len(row[2].encode()) + len(row[3]) for row in rows]
        if sum(sizes) <= left or most <= LEAST_BUCKETS:
            break
        most = max(LEAST_BUCKETS, most // 2)
    room, skipped, fitting = left, losses.skipped, []
    for row, size in zip(rows, sizes, strict=True):
        if size <= room:
            room -= size
            fitting.append(row)
        else:
            columns = series[row[:3]].columns
            skipped += int(sum(columns[COUNT]) + sum(columns[BAD]))
    counted = Losses(losses.numbers, skipped, losses.missed)
    return msgspec.msgpack.encode(TrainingCopy(fitting, counted, rounds, is_finished))


def unpack(data: bytes) -> TrainingCopy:
    """Raises ValidationError if this is no copy."""
    try:
        return _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise ValidationError("copy", f"{len(data)} bytes", f"not a copy: {error}") from error
