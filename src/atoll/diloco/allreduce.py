"""ObjectStoreAllReduce: the mean of everybody's tensors, through nothing but an object store."""

from __future__ import annotations

import hashlib
import math
import operator
import os
import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from atoll.core.checks import check_int, check_number
from atoll.core.errors import BackendError, DistributedError, ValidationError
from atoll.diloco import packing
from atoll.diloco.codecs import Codec, get_codec
from atoll.diloco.packing import Vector
from atoll.diloco.replica_config import find_min_replicas, read_run_id, read_start
from atoll.diloco.round.cells import Cut, RunLayout, Share, bytes_of, checksum
from atoll.diloco.round.driver import RoundDriver
from atoll.diloco.round.effects import DROPPED, Offer, RoundConfig, RoundResult
from atoll.diloco.round.objects import DONE, FAILED, LEFT, MAX_RANK, MAX_ROUND, ended_key
from atoll.diloco.round.pace import Pace
from atoll.diloco.round.reduce import Fragment, ReplicaValues
from atoll.objectstore import ObjectStore, Traffic
from atoll.objectstore.client import PATIENCE_S

THREADS = 8  # requests in flight: enough to fill a link of some Gbit/s
OUTER = "mean"  # the outer rule of a plain all-reduce: the result is the mean
MAX_WEIGHT = 1e18  # sums of so large weights, over all replicas there can be, are finite


class MeanTarget:
    """The outer step of a plain all-reduce: the mean is the result, and there is no state."""

    def __init__(self) -> None:
        self.out: Vector = np.empty(0, np.float32)

    @property
    def rows(self) -> Mapping[str, Vector]:
        return {}

    @property
    def is_wanted(self) -> bool:
        """Not for rounds that were missed: they have no result, and leave no state."""
        return bool(self.out.size)

    def room(self, start: int, size: int) -> Vector | None:
        return self.out[start : start + size] if self.is_wanted else None

    def step(self, round: int, start: int, mean: Vector) -> None:
        if self.is_wanted:
            self.out[start : start + mean.size] = mean  # numpy copies nothing onto itself


@dataclass(frozen=True)
class AllReduceReport:
    """How one call went, as this replica saw it.

    `members`: rank to weight, of those whose tensors are in the mean. `is_member`: whether this
    replica's are; if not, they go with its next call. `missing`: ranks that were waited for.
    `skipped`: rounds since the call before that went on without this replica.
    """

    round: int
    members: dict[int, float]
    is_member: bool
    missing: list[int]
    skipped: list[int]
    requests: int
    bytes_up: int
    bytes_down: int
    seconds: float


class _Stream:
    """The rounds of tensors of one name: a run of its own in the store."""

    def __init__(self, owner: ObjectStoreAllReduce, name: str, layout: RunLayout) -> None:
        self.layout = layout
        codecs = (owner.codec, owner.mean_codec)
        cut = Cut.of(sum(spec.size for spec in layout.fragments[0]), owner.world_size, codecs)
        self.target = MeanTarget()
        self.fragment = Fragment(Share(cut), self.target)
        nonce = secrets.token_hex(8)
        self.values = ReplicaValues(
            owner.store,
            _prefix_of(owner.run_id, name),
            owner.rank,
            nonce,
            [self.fragment],
            *codecs,
            owner.pool,
        )
        start = owner.start
        config = RoundConfig(
            owner.rank,
            owner.world_size,
            nonce,
            layout.digest,
            cut.shards,
            (cut.cells,),
            launch=start.launch,
            quorum=owner.min_replicas,
            first_quorum=start.first_quorum,
            together=tuple(range(start.together or 0)),
            timeout_s=owner.timeout_s,
            keep=owner.keep_rounds,
        )
        pace = Pace(
            owner.timeout_s,
            grace_s=owner.grace_s,
            is_folder=owner.store.is_folder,
            max_pause_s=owner.poll_interval_s,
        )
        self.driver = RoundDriver(self.values, layout, config, pace)
        # What all must have alike, by the names of the arguments.
        self.sums = {"codec": layout.codec, "down_codec": layout.mean_codec}
        self.is_open = False
        self.done: int | None = None  # the last round of the machine that a call has taken
        self.pending: int | None = None  # the checksum of what a call that failed brought
        self.offset = 0  # from the machine's rounds to the caller's


class ObjectStoreAllReduce:
    """Averages lists of tensors over the replicas of a run.

    Every replica calls `allreduce` with tensors of the same shapes and types. When a replica is
    missing, the others wait `grace_s` and continue if there are `min_replicas`: by default half of
    a launch, $ATOLL_WORLD_MIN in a training, else half of the world, rounded up. The first round
    waits, until its timeout, for $ATOLL_STARTED_TOGETHER replicas, unless `grace_s` or
    `min_replicas` is given; it needs more than half of a launch.

    A run is a URI together with `run_id` (default $ATOLL_RUN_ID, $ATOLL_UID, else "run"). A process
    that joins a run with committed rounds continues with the next one, so a restarted replica
    needs nothing but the same arguments. Independent runs need their own URI or id.

    What a replica uploads counts once: its next call includes values that were too late for a
    round, and what a lossy codec dropped.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | ObjectStore,
        rank: int,
        world_size: int,
        *,
        round_id: int | None = None,
        timeout_s: float = 1800.0,
        poll_interval_s: float = 1.0,
        min_replicas: int | None = None,
        run_id: str | None = None,
        codec: str | Codec = "fp32",
        down_codec: str | Codec | None = None,
        grace_s: float | None = None,
        keep_rounds: int = 2,
    ) -> None:
        """`round_id`: the number of the first round that is done; None: that of the run.

        `poll_interval_s`: the longest pause between two looks at the store. `grace_s`: how long
        stragglers and owners are waited for; None learns it from the rounds. `down_codec`: of the
        means; None: as `codec`. `keep_rounds`: so many rounds keep their uploads.
        """
        self.world_size = _read_int("world_size", world_size, 1, MAX_RANK)
        self.rank = _read_int("rank", rank, 0, self.world_size - 1)
        if min_replicas is not None:
            min_replicas = _read_int("min_replicas", min_replicas, 1, self.world_size)
        self.min_replicas = find_min_replicas(min_replicas, self.world_size)
        for field, seconds in (
            ("timeout_s", timeout_s),
            ("poll_interval_s", poll_interval_s),
            ("grace_s", timeout_s if grace_s is None else grace_s),
        ):
            check_number(field, seconds, 1e-6, math.inf)
        self.timeout_s, self.poll_interval_s, self.grace_s = timeout_s, poll_interval_s, grace_s
        self.codec = get_codec(codec)
        self.mean_codec = self.codec if down_codec is None else get_codec(down_codec, "down_codec")
        self.run_id = read_run_id(run_id)
        self.keep_rounds = _read_int("keep_rounds", keep_rounds, 1, MAX_ROUND)
        self._first_round = None if round_id is None else _read_int("round_id", round_id, 0, 10**8)
        self.start = read_start(self.world_size, min_replicas, grace_s)
        self.store = ObjectStore.open(uri, patience_s=min(PATIENCE_S, timeout_s))
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix=f"allreduce-{self.rank}")
        self.last_round: AllReduceReport | None = None
        self._streams: dict[str, _Stream] = {}
        self._residuals: dict[str, Vector] = {}
        self._lock = threading.Lock()
        self._has_left = self._is_closed = False
        # One that comes back is waited for again, also before its first call.
        marks = (ended_key(self.start.launch, self.rank, how) for how in (DONE, FAILED, LEFT))
        self.store.delete(f"{_prefix_of(self.run_id, '')}{mark}" for mark in marks)

    @property
    def round(self) -> int | None:
        """The round of the next `allreduce`; None before the first access to the store."""
        stream = next(iter(self._streams.values()), None)
        return self._first_round if stream is None else stream.driver.round + stream.offset

    def allreduce(
        self, tensors: Any, name: str = "", *, weight: float = 1.0, out: Any = None
    ) -> Any:
        """The weighted mean over the members of a round: a list like `tensors`, or one tensor.

        `out`: tensors like `tensors`, or those themselves, to hold the mean; they are what is
        returned. If the call fails, `tensors` are as they were, and other tensors in `out` hold
        anything.

        `name` tells apart streams of tensors; each has its own rounds. Raises BelowMinimumWorld
        when no quorum came within the timeout, ValidationError when the replicas' tensors differ.
        """
        tensors, out, is_one = _as_lists(tensors, out)
        arrays = packing.as_arrays(tensors)
        specs, weight = packing.describe_tensors(arrays), _read_weight(weight)
        layout = RunLayout((specs,), self.world_size, self.codec.name, self.mean_codec.name, OUTER)
        if out is not None:
            packing.check_out(out, arrays)
            packing.refuse_shared(out)
        with self._lock:
            if self._is_closed:
                raise DistributedError("this all-reduce is closed: make another one")
            mean = self._reduce(name, layout, arrays, weight, out)
        means = packing.unflatten(mean, arrays) if out is None else packing.fill(mean, out)
        return means[0] if is_one else means

    def _reduce(
        self, name: str, layout: RunLayout, arrays: Sequence[Any], weight: float, out: Any
    ) -> Vector:
        before, began = self.store.traffic, time.monotonic()
        stream = self._streams.get(name)
        if stream is not None and stream.layout != layout:
            raise ValidationError(
                "tensors", f"{len(arrays)} tensors", stream.layout.difference(layout)
            )
        packing.check_range(arrays)
        if self.codec.needs_finite or self.mean_codec.needs_finite:
            self._check_finite(arrays)
        if stream is None:
            stream = self._streams[name] = _Stream(self, name, layout)
        target = stream.target
        room = None if out is None else packing.as_vector(out)
        if room is None or not packing.are_apart(room, arrays):
            room = np.empty(stream.fragment.share.size, np.float32)
        try:
            is_again = self._prepare(stream, name, arrays)
            target.out = room
            result = stream.driver.run(None) if is_again else self._offer(stream, arrays, weight)
            while result.fate == DROPPED:  # the run went on without this replica: once more
                result = self._offer(stream, arrays, weight)
        except BaseException:
            # What the call brought is uploaded, or will be: made again, it goes on with that.
            stream.pending = _checksum(arrays, room.size)
            raise
        finally:
            target.out = np.empty(0, np.float32)
        self._report(stream, result, self.store.traffic.since(before), time.monotonic() - began)
        return room

    def _prepare(self, stream: _Stream, name: str, arrays: Sequence[Any]) -> bool:
        """Join, or settle what an earlier call left open; say whether this call was made before."""
        driver = stream.driver
        pending, stream.pending = stream.pending, None
        if not stream.is_open:
            driver.open()
            stream.is_open = True
            if self._first_round is not None:
                stream.offset = self._first_round - driver.round
            if name in self._residuals:
                stream.fragment.add(0, self._residuals.pop(name))
        if driver.state.is_pending and pending == _checksum(arrays, stream.fragment.share.size):
            return True
        if driver.state.is_pending or not driver.state.is_current:
            driver.prepare()
        return False

    def _offer(self, stream: _Stream, arrays: Sequence[Any], weight: float) -> RoundResult:
        fragment, start = stream.fragment, 0
        if fragment.is_clear:
            fragment.fill(lambda row: packing.flatten(arrays, row))
        else:  # tensor by tensor: a second row would be as large as all of them
            for array in arrays:
                values = np.empty(math.prod(array.shape), np.float32)
                packing.flatten([array], values)
                fragment.add(start, values)
                start += values.size
        sums, stream.sums = stream.sums, {}  # told once
        return stream.driver.run(Offer(weight, steps=1, sums=sums))

    def _check_finite(self, arrays: Sequence[Any]) -> None:
        """Raise ValidationError for what a codec has no code for, before anything is stored."""
        for index, array in enumerate(arrays):
            values = np.empty(math.prod(array.shape), np.float32)
            packing.flatten([array], values)
            if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):
                bad = float(values[~np.isfinite(values)][0])
                codecs = f"codecs {self.codec.name!r}, {self.mean_codec.name!r}"
                raise ValidationError(f"tensors[{index}]", bad, f"{codecs} need finite numbers")

    def _report(self, stream: _Stream, result: RoundResult, used: Traffic, seconds: float) -> None:
        manifest = stream.driver.state.last
        assert manifest is not None
        before = manifest.round - 1 if stream.done is None else stream.done
        stream.done = manifest.round
        self.last_round = AllReduceReport(
            round=manifest.round + stream.offset,
            members={member.rank: member.weight for member in manifest.members},
            is_member=result.fate == "member",
            missing=list(manifest.missing),
            skipped=[each + stream.offset for each in range(before + 1, manifest.round)],
            requests=used.requests,
            bytes_up=used.bytes_up,
            bytes_down=used.bytes_down,
            seconds=seconds,
        )

    def state_dict(self) -> dict[str, Any]:
        """The residual of this rank, to continue exactly after a planned restart."""
        return {name: stream.fragment.row.copy() for name, stream in self._streams.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._residuals = {name: np.array(row, np.float32) for name, row in state.items()}

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the others that this replica is done, or has failed with `error`.

        They do not wait for it then.
        """
        has_left, self._has_left = self._has_left, True
        # A store that fails is not asked.
        if has_left or isinstance(error, BackendError):
            return
        how = DONE if error is None else FAILED
        for stream in self._streams.values():
            if stream.is_open:
                stream.driver.leave(how)
        if not self._streams:  # nobody waits for one that ends before its first call
            key = ended_key(self.start.launch, self.rank, how)
            self.store.put(f"{_prefix_of(self.run_id, '')}{key}", b"")

    def close(self) -> None:
        """Stop the threads. Objects in the store stay."""
        self._is_closed = True
        self.leave()
        self.pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave(error)
        self.close()


def _read_int(field: str, value: Any, low: int, high: int) -> int:
    """`value` as a plain int; integers of numpy and torch are accepted too.

    Raises ValidationError unless it is a whole number from `low` to `high`.
    """
    try:
        number = value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = value
    check_int(field, number, low, high)
    return int(number)


def _read_weight(value: Any) -> float:
    try:
        weight = math.nan if isinstance(value, str) else float(value)  # also of a 0-d tensor
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if not 0 < weight <= MAX_WEIGHT:
        raise ValidationError(
            "weight", value, f"expected a number greater than 0, at most {MAX_WEIGHT:g}"
        )
    return weight


def _as_lists(tensors: Any, out: Any) -> tuple[Any, Any, bool]:
    """Both as lists, and whether `tensors` is one tensor.

    A tensor is a sequence too, of its rows: what has a shape is never taken for a list.
    """
    is_one = hasattr(tensors, "shape")
    if out is not None and hasattr(out, "shape") != is_one:
        expected = "expected one tensor, too" if is_one else "expected a list of tensors"
        raise ValidationError("out", type(out).__name__, expected)
    if not is_one:
        return tensors, out, False
    return [tensors], None if out is None else [out], True


def _checksum(arrays: Sequence[Any], size: int) -> int:
    values = np.empty(size, np.float32)
    packing.flatten(arrays, values)
    return checksum(bytes_of(values))


def _prefix_of(run_id: str, name: str) -> str:
    """Of the keys of a stream: whatever its name, one that a store takes."""
    if not name:
        return f"{run_id}/"
    plain = re.sub(r"[^A-Za-z0-9_+-]", "_", name)[:40]
    return f"{run_id}/{plain}-{hashlib.blake2b(name.encode(), digest_size=6).hexdigest()}/"
