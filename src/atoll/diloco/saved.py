"""The global parameters in the store: a checkpoint, or the start, in the coordinates of the run.

Cells with the same number, of all shards, are a column. Every process saves the columns it carries
in objects of a few columns each, then process 0 creates the index that makes them a checkpoint.
So no process ever has the whole in memory, and one that is cut differently reads what it needs.
"""

from __future__ import annotations

import hashlib
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from atoll.core.model import json_decoder
from atoll.diloco.allreduce import ObjectStoreAllReduce, wire
from atoll.diloco.allreduce.layout import Layout
from atoll.diloco.allreduce.share import Share
from atoll.diloco.allreduce.team import lead, together
from atoll.diloco.outer import Floats, Fragment, Header, check_same, header_of, load_bytes

OBJECT_BYTES = 32 << 20
INDEX = b"INDX"


class StateIndex(msgspec.Struct, frozen=True):
    """`columns`: first and last of each object. Digests are of a column each, in order."""

    header: Header
    layout: bytes
    nonce: str
    rounds: int  # in the keys of the objects
    columns: list[tuple[int, int]]
    values: list[str]
    momentum: list[str]


_INDEX = json_decoder(StateIndex)


def digests(share: Share, row: Floats) -> list[str]:
    """Of each column that the process carries."""
    return [
        _digest(_pieces(share, row, column))
        for column in range(share.cells.start, share.cells.stop)
    ]


def save(reduce: ObjectStoreAllReduce, fragment: Fragment, key: str, rounds: int) -> bool:
    """The state of all processes is at `key`; False if there is one already."""
    share, team = fragment.share, reduce.team
    nonce = lead(team, lambda: secrets.token_hex(8))
    rows = [fragment.values, *([fragment.momentum] if fragment.has_momentum else [])]

    def put() -> tuple[list[tuple[int, int]], list[list[str]]]:
        columns = list(_objects(share, len(rows)))
        for start, stop in columns:
            pieces = [
                piece
                for row in rows
                for column in range(start, stop)
                for piece in _pieces(share, row, column)
            ]
            reduce.blobs.put(reduce.keys.state(rounds, nonce, start), pieces)
        return columns, [digests(share, row) for row in rows]

    messages = together(team, put)

    def create() -> bool:
        sums = [[d for _, each in messages for d in each[at]] for at in range(len(rows))]
        index = StateIndex(
            header_of(fragment, is_complete=True),
            share.layout.pack(),
            nonce,
            rounds,
            [columns for each, _ in messages for columns in each],
            sums[0],
            sums[1] if len(sums) > 1 else [],
        )
        sealed = wire.seal(INDEX, wire.fence(key), msgspec.json.encode(index))
        is_first = reduce.blobs.create(key, sealed)
        if not is_first:
            names = [reduce.keys.state(rounds, nonce, start) for start, _ in index.columns]
            reduce.blobs.delete(names)
        return is_first

    return lead(team, create)


def read_index(reduce: ObjectStoreAllReduce, key: str) -> StateIndex | bytes:
    """The index at `key`, or the whole state where the run has it in one object.

    Raises NotFound, or ValueError if it is damaged.
    """
    data = reduce.blobs.get(key)
    if wire.kind_of(data) == wire.CHECKPOINT:
        return bytes(wire.unseal(wire.CHECKPOINT, wire.fence(key), data))
    body = wire.unseal(INDEX, wire.fence(key), data)
    try:
        return _INDEX.decode(body)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not an index: {error}") from error


def load(reduce: ObjectStoreAllReduce, fragment: Fragment, index: StateIndex) -> None:
    """`fragment` holds what this process carries of the state.

    Raises ValidationError for another model or other settings, NotFound and ValueError for a state
    that is not whole.
    """
    check_same(index.header, fragment, reduce.keys.run)
    theirs, share = Share(Layout.unpack(index.layout)), fragment.share
    is_same = _geometry(theirs.layout) == _geometry(share.layout)
    if is_same and not index.header.has_momentum:
        mine = slice(share.cells.start, share.cells.stop)
        # Mostly all replicas begin alike, and nothing has to be downloaded.
        if index.values[mine] == digests(share, fragment.values):
            fragment.momentum[:] = 0
            fragment.resume(index.header)
            return
    into = _Row(share)
    targets = [fragment.values, *([fragment.momentum] if index.momentum else [])]
    if not index.momentum:
        fragment.momentum[:] = 0
    for start, stop in index.columns:
        first, last = start, stop
        if is_same:
            first, last = max(start, share.cells.start), min(stop, share.cells.stop)
        if first >= last:
            continue
        key = reduce.keys.state(index.rounds, index.nonce, start)
        sizes = [_column_size(theirs, column) for column in range(start, stop)]
        skip, length = 4 * sum(sizes[: first - start]), 4 * sum(sizes[first - start : last - start])
        for at, (row, sums) in enumerate(
            zip(targets, (index.values, index.momentum), strict=False)
        ):
            begin = 4 * at * sum(sizes) + skip
            with reduce.blobs.reader(key, begin, begin + length) as reader:
                for column in range(first, last):
                    values = np.empty(sizes[column - start], "<f4")
                    count = reader.fill(_bytes(values))
                    if count < values.nbytes or _digest([_bytes(values)]) != sums[column]:
                        raise ValueError(f"{key}: column {column} does not match its digest")
                    _spread(theirs, column, values, into, row)
    fragment.resume(index.header)


def load_full(fragment: Fragment, data: bytes | memoryview, run: str) -> None:
    """`fragment` holds its share of a state that is in one piece."""
    complete = Fragment(fragment.slots)
    complete.terms, complete.period = fragment.terms, fragment.period
    load_bytes(complete, data, run)
    fragment.terms = complete.terms
    fragment.values[:] = cut(fragment.share, complete.values)
    fragment.momentum[:] = cut(fragment.share, complete.momentum)
    fragment.rounds, fragment.steps = complete.rounds, complete.steps
    fragment.tokens, fragment.ledger = complete.tokens, complete.ledger


def cut(share: Share, vector: Floats) -> Floats:
    """What the process carries of the vector."""
    if share.processes == 1:
        return vector
    parts = [vector[start:stop] for start, stop in share.intervals]
    return np.concatenate([np.empty(0, np.float32), *parts])


def _geometry(layout: Layout) -> tuple[int, int, int]:
    return layout.size, layout.shards, layout.cells


def _objects(share: Share, rows: int) -> Iterator[tuple[int, int]]:
    """The carried columns in runs of about OBJECT_BYTES."""
    start, size = share.cells.start, 0
    for column in range(share.cells.start, share.cells.stop):
        size += 4 * rows * _column_size(share, column)
        if size >= OBJECT_BYTES or column + 1 == share.cells.stop:
            yield start, column + 1
            start, size = column + 1, 0


def _pieces(share: Share, row: Floats, column: int) -> list[memoryview]:
    """The cells of a column, as bytes where they lie."""
    parts = [row[slice(*share.cell_in_row(shard, column))] for shard in range(share.layout.shards)]
    return [memoryview(part.view(np.uint8)) for part in parts]  # type: ignore[arg-type]


def _column_size(share: Share, column: int) -> int:
    spans = (share.cell_in_row(shard, column) for shard in range(share.layout.shards))
    return sum(stop - start for start, stop in spans)


def _digest(pieces: Iterable[memoryview]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _bytes(values: Floats) -> memoryview:
    return memoryview(values).cast("B")  # type: ignore[arg-type]


class _Row:
    """Finds the places of the vector in the row of a process."""

    def __init__(self, share: Share) -> None:
        self._intervals = share.intervals
        self._starts = [start for start, _ in share.intervals]
        self._at = np.cumsum([0, *(stop - start for start, stop in share.intervals)]).tolist()

    def write(self, row: Floats, start: int, values: Floats) -> None:
        """Those of `values`, which begin at place `start`, that belong in the row are in it."""
        stop = start + len(values)
        at = max(0, bisect_right(self._starts, start) - 1)
        while at < len(self._intervals) and self._intervals[at][0] < stop:
            low, high = max(start, self._intervals[at][0]), min(stop, self._intervals[at][1])
            if high > low:
                to = self._at[at] + low - self._intervals[at][0]
                row[to : to + high - low] = values[low - start : high - start]
            at += 1


def _spread(theirs: Share, column: int, values: Floats, into: _Row, row: Floats) -> None:
    at = 0
    for shard in range(theirs.layout.shards):
        start, stop = theirs.cell_in_row(shard, column)
        into.write(row, start, values[at : at + stop - start])
        at += stop - start
