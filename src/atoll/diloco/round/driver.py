"""RoundDriver: the machine of a round over a real store, a clock, threads and processes.

How a training loop uses it, in every process of a replica, with the same arguments:

    values = ReplicaValues(store, "run/", rank, nonce, fragments, codec, mean_codec, pool)
    driver = RoundDriver(values, layout, config, pace, group=group)
    driver.open()                        # joins: the rows of the outer rule hold the run's state
    while training:
        ...                              # inner steps on the model
        driver.prepare()                 # what an earlier call left open is settled
        fragment = values.fragment(driver.round)
        fragment.add(0, pseudo_gradient)
        result = driver.run(Offer(weight, steps))
        ...                              # values.has_dropped: go on from the global values
    driver.finish()

While a call is under way, in a thread of its own perhaps, it alone touches rows and values. A call
that raised is open: `prepare` settles it. `request_leave` may be called from a signal handler: it
sets a plain flag, which ends sleeps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from atoll.agent.stacks import request_all
from atoll.core.errors import BackendError, BelowMinimumWorld, ObjectTooLarge
from atoll.diloco.data.ledger import Ledger, Terms
from atoll.diloco.group import GroupLost, Processes, SingleProcess, portable
from atoll.diloco.round import effects as fx
from atoll.diloco.round import objects
from atoll.diloco.round.cells import RunLayout
from atoll.diloco.round.objects import DIRECT, DamagedObject, Manifest, Outcome, Receipt
from atoll.diloco.round.pace import Pace
from atoll.diloco.round.pieces import check_same, load_pieces, save_piece
from atoll.diloco.round.protocol import RoundMachine
from atoll.diloco.round.reduce import ReplicaValues, each, read_tail

R = TypeVar("R")

MAX_SMALL_BYTES = 64 << 20  # of a manifest, a checkpoint's index, a block of history
EMPTY_WORD_S = 5.0  # the other processes' flags and deaths are learned of so often
# A flag that a signal handler sets is looked at so often: an Event could be locked by the very
# thread that the handler interrupts.
FLAG_S = 0.05

log = logging.getLogger("atoll.round")


class Word(NamedTuple):
    """What the leader sends for each effect on values, and at the end of a call.

    `calls` on local memory since the last word: all processes make them, then perform their share
    of `effect`. None: the call is over, with `result` or `error`, so that all return or raise
    alike; `state` is of the run after it. `is_empty`: nothing to perform. Nobody but the leader
    looks at a clock or at the store's listings.
    """

    calls: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    effect: Any = None
    is_empty: bool = False
    result: Any = None
    error: BaseException | None = None
    state: fx.RunState | None = None


class Reply(NamedTuple):
    """What one process answers to a word."""

    result: Any = None
    error: BaseException | None = None
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class _StepDirect:
    """ApplyMeans of a direct round, with the receipts that the leader has read."""

    manifest: Manifest
    receipts: Mapping[str, Outcome]


@dataclass(frozen=True, slots=True)
class _Load:
    """LoadCheckpoint, with the index that the leader has read."""

    meta: objects.Checkpoint


class _RecordedMemory:
    """The leader's local memory: calls are made at once, and go with the next word."""

    def __init__(self, values: ReplicaValues) -> None:
        self._values = values
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    @property
    def fresh(self) -> Any:
        return self._values.fresh

    def begin(self, manifest: Manifest) -> None:
        self._call("begin", manifest)

    def settle(self, manifest: Manifest, outcomes: Mapping[str, Outcome]) -> None:
        self._call("settle", manifest, dict(outcomes))

    def drop(self) -> None:
        self._call("drop")

    def end(self) -> None:
        self._call("end")

    def _call(self, name: str, *args: Any) -> None:
        getattr(self._values, name)(*args)
        self.calls.append((name, args))

    def take_calls(self) -> tuple[tuple[str, tuple[Any, ...]], ...]:
        calls, self.calls = tuple(self.calls), []
        return calls


class RoundDriver:
    """One process of a replica in the rounds of a run."""

    def __init__(
        self,
        values: ReplicaValues,
        layout: RunLayout,
        config: fx.RoundConfig,
        pace: Pace,
        *,
        ledger: Ledger | None = None,
        group: Processes | None = None,
        adopt: Callable[[RunLayout], RunLayout] | None = None,
        is_over: Callable[[fx.RunState], bool] | None = None,
    ) -> None:
        """`adopt`: is told the layout of a checkpoint before its values are read, in every process.

        It returns the layout to go on with, or raises. None: all but world and codecs must be as in
        `layout`. `is_over`: whether the others make no round after that state.
        """
        self.values, self.layout, self.config = values, layout, config
        self.group: Processes = SingleProcess() if group is None else group
        config = replace(
            config,
            sizes=tuple(each.share.cut.size for each in values.fragments),
            codec=values.codec.name,
            mean_codec=values.mean_codec.name,
        )
        self._adopt = adopt
        self.state = fx.RunState()  # after the last call, in every process
        self._memory = _RecordedMemory(values)
        memory = values if self.group.processes == 1 else self._memory
        self.machine = RoundMachine(config, memory, pace, ledger)
        if is_over is not None:
            self.machine.is_over = is_over
        self._store, self._pool = values.store, values.pool
        self._sizes: dict[str, int] = {}  # of uploads, as listed
        self._beside: Future[None] | None = None
        self._word_at = time.monotonic()

    # -- Calls, made by all processes of the replica in the same order -------------------------

    @property
    def round(self) -> int:
        """The round that comes next."""
        return self.state.round

    def open(self) -> fx.RoundResult:
        return self._call(self.machine.open)

    def is_behind(self) -> bool:
        """Whether `prepare` may change the values; if not, `run` needs no `prepare` before it."""
        return self._call(self.machine.is_behind)

    def prepare(self) -> fx.RoundResult | None:
        """Settle what an earlier call left open; rows may be changed then."""
        return self._call(self.machine.prepare)

    def run(self, offer: fx.Offer | None) -> fx.RoundResult:
        """Take the offer through its round; None: go on with the one before."""
        return self._call(lambda: self.machine.run(offer))

    def drain(self, offer: fx.Offer | None, weights: tuple[float, ...]) -> fx.RoundResult:
        """Store the rows of all fragments, with these weights, and leave."""
        return self._call(lambda: self.machine.drain(offer, weights))

    def share_data(self, terms: Terms) -> None:
        """The replicas share their data: the run has a ledger from now on."""
        self._call(lambda: self.machine.share_data(terms))

    def save(self) -> None:
        """Save a checkpoint of this moment."""
        self._call(self.machine.save)

    def finish(self) -> list[fx.EndMark]:
        """Take every round that is decided, tell that this rank is done, and say who else is."""
        return self._call(self.machine.finish)

    def find_ends(self) -> list[fx.EndMark]:
        """Where the other ranks that are done ended."""
        return self._call(self.machine.find_ends)

    def leave(self, how: str) -> None:
        """Tell the others how this rank ended: done, failed or left."""
        self._call(lambda: self.machine.leave(how))

    def abandon(self) -> None:
        """Let the other processes of the replica fail at their next word: this one ends."""
        self.group.close()

    def request_leave(self) -> None:
        """Go as soon as the upload is stored. Only sets a flag: for signal handlers."""
        self.machine.is_leaving = True

    # -- The leader and its followers ------------------------------------------------------------

    def _call(self, steps: Callable[[], Generator[Any, Any, R]]) -> R:
        if self.group.process:
            return self._follow()  # type: ignore[no-any-return]
        try:
            result = self._drive(steps())
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, fx.StoreError) else None
            problem = cause or error
            if isinstance(problem, BelowMinimumWorld | fx.Stuck):
                request_all()  # where the ranks are that did not come
            self.state = self.machine.state
            if self.group.processes > 1 and not isinstance(problem, GroupLost):
                self._end_call(Word(error=portable(problem)), is_error=True)
            if cause is not None:
                raise cause from None
            raise
        self.state = self.machine.state
        if self.group.processes > 1:
            self._end_call(Word(result=result), is_error=False)
        return result

    def _end_call(self, word: Word, *, is_error: bool) -> None:
        """The last word of a call: all return or raise alike."""
        calls = self._memory.take_calls()
        try:
            self.group.broadcast_from_leader(word._replace(calls=calls, state=self.state))
        except GroupLost:
            # Where a collective was interrupted this one fails, too, and the others raise by that.
            if not is_error:
                raise

    def _drive(self, steps: Generator[Any, Any, R], *, is_beside: bool = False) -> R:
        answer: Any = None
        problem: Exception | None = None
        while True:
            try:
                effect = steps.send(answer) if problem is None else steps.throw(problem)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            answer, problem = None, None
            try:
                if not is_beside and time.monotonic() - self._word_at > EMPTY_WORD_S:
                    self._gather(None, is_empty=True)
                answer = self._perform(effect)
            except GroupLost:
                raise
            except BackendError as error:
                problem = fx.StoreError(str(error))
                problem.__cause__ = error
            except Exception as error:
                problem = error

    def _drive_beside(self, steps: Generator[Any, Any, None]) -> None:
        try:
            self._drive(steps, is_beside=True)
        except Exception:  # nobody waits for it, and its next turn may do better
            log.exception("steps beside a round failed")

    def _follow(self) -> Any:
        while True:
            word: Word = self.group.broadcast_from_leader(None)
            for name, args in word.calls:
                getattr(self.values, name)(*args)
            if word.state is not None:
                self.state = word.state
            if word.error is not None:
                raise word.error
            if word.effect is None and not word.is_empty:
                return word.result
            reply, problem = self._reply(word.effect)
            self.group.gather(reply)
            if problem is not None and not isinstance(problem, Exception):
                raise problem

    def _reply(self, effect: Any) -> tuple[Reply, BaseException | None]:
        """Perform this process's share of an effect on values."""
        try:
            return Reply(self._perform_share(effect), None, self.machine.is_leaving), None
        except BaseException as error:
            return Reply(None, portable(error), self.machine.is_leaving), error

    def _gather(self, effect: Any, *, is_empty: bool = False) -> list[Any]:
        """What all processes answer to an effect. Raises the first error."""
        if self.group.processes == 1:
            return [] if is_empty else [self._perform_share(effect)]
        self.group.broadcast_from_leader(Word(self._memory.take_calls(), effect, is_empty))
        mine, own = self._reply(effect)
        replies: list[Reply] = self.group.gather(mine)
        self._word_at = time.monotonic()
        if any(reply.is_leaving for reply in replies):
            self.request_leave()
        if own is not None:
            raise own
        for process, reply in enumerate(replies):
            if reply.error is not None:
                reply.error.add_note(f"in process {process} of the replica's {len(replies)}")
                raise reply.error
        return [reply.result for reply in replies]

    # -- Effects ---------------------------------------------------------------------------------

    def _perform(self, effect: Any) -> Any:
        """Perform an effect in the leader; what it says of values, in all processes."""
        match effect:
            case fx.Sleep(seconds):
                return self._sleep(seconds)
            case fx.Get(key):
                return self._get(key)
            case fx.GetAll(keys):
                return dict(zip(keys, self._each(self._get, keys), strict=True))
            case fx.Headers(keys):
                return dict(zip(keys, self._each(self._get_header, keys), strict=True))
            case fx.List(prefix, after):
                return self._list(prefix, after)
            case fx.Put(key, body):
                return self._store.put(self.values.key(key), body)
            case fx.Create(key, body, after):
                folders = [self.values.key(folder) for folder in after]
                return self._store.create(self.values.key(key), body, after=folders)
            case fx.Delete(keys):
                return self._store.delete(map(self.values.key, keys))
            case fx.Log(text):
                return log.warning("%s", text)
            case fx.Beside(steps):
                if self._beside is None or self._beside.done():
                    self._beside = self._pool.submit(self._drive_beside, steps)
                return None
            case fx.Upload(key, _, header):
                found = self._gather(effect)
                if self.group.processes == 1:
                    return found[0]
                return self.values.put_header(key, header, found)
            case fx.MakeMeans(manifest, names):
                return self._make_means(effect, manifest, names)
            case fx.ApplyMeans(manifest, names):
                return self._apply_means(effect, manifest, names)
            case fx.SaveCheckpoint(key, meta):
                self._gather(effect)
                return self._store.create(self.values.key(key), objects.encode(meta))
            case fx.LoadCheckpoint(key):
                return self._load_checkpoint(key)
        raise TypeError(f"no effect: {effect!r}")

    def _perform_share(self, effect: Any) -> Any:
        """What one process does of an effect on values."""
        values, group = self.values, self.group
        match effect:
            case None:
                return None
            case fx.Upload(key, round, header):
                if group.processes == 1:
                    return values.put_upload(key, round, header)
                return values.put_part(key, round, header)
            case fx.MakeMeans(manifest, names, exclude_missing):
                if manifest.plan == DIRECT:
                    return {name: values.read_upload(manifest, name) for name in names}
                own = [
                    name
                    for name in names
                    if objects.part_of(name) % group.processes == group.process
                ]
                return values.make_means(manifest, own, exclude_missing=exclude_missing)
            case fx.ApplyMeans(manifest, names):
                return values.apply_means(manifest, names)
            case _StepDirect(manifest, receipts):
                return values.apply_direct(manifest, receipts)
            case fx.SaveCheckpoint(_, meta):
                return save_piece(self._store, values.prefix, meta, self.layout, values.fragments)
            case _Load(meta):
                values.end()
                return load_pieces(
                    self._store, values.prefix, meta, self._adopt_layout, values.fragments
                )
        raise TypeError(f"no effect on values: {effect!r}")

    def _sleep(self, seconds: float) -> float:
        until = time.monotonic() + seconds
        was_leaving = self.machine.is_leaving  # a wish ends a sleep once, or the machine would spin
        while (left := until - time.monotonic()) > 0:
            if self.machine.is_leaving and not was_leaving:
                break
            time.sleep(min(left, FLAG_S))
            if time.monotonic() - self._word_at > EMPTY_WORD_S:
                self._gather(None, is_empty=True)
        return time.monotonic()

    def _each(self, get: Callable[[str], bytes | None], keys: Iterable[str]) -> list[bytes | None]:
        if self._store.is_folder:  # a small file is read in less time than a thread is woken
            return [get(key) for key in keys]
        return each(self._pool, get, keys)

    def _get(self, key: str) -> bytes | None:
        body = self._store.find(self.values.key(key), max_bytes=MAX_SMALL_BYTES)
        return None if body is None else bytes(body)

    def _list(self, prefix: str, after: str) -> list[tuple[str, float]]:
        first = len(self.values.prefix)
        found = self._store.list(
            self.values.key(prefix).rstrip("/"), self.values.key(after) if after else None
        )
        if prefix == "upload/" and after:  # of a round that is being decided
            self._sizes = {info.key[first:]: info.size for info in found}
        return [(info.key[first:], info.modified.timestamp()) for info in found]

    def _get_header(self, key: str) -> bytes | None:
        size = self._sizes.get(key)
        if size is None:
            return None
        # A header of one process takes some 450 bytes, and ten for each section.
        sections = 0 if self.values.codec.is_exact else self.config.shards
        return read_tail(self._store, self.values.key(key), size, 768 + 12 * sections)

    def _make_means(
        self, effect: fx.MakeMeans, manifest: Manifest, names: tuple[str, ...]
    ) -> dict[str, bool | None]:
        found = self._gather(effect)
        if manifest.plan != DIRECT:
            return {name: made for part in found for name, made in part.items()}
        answer: dict[str, bool | None] = {}
        for name in names:
            readable = [part[name] for part in found]
            if None in readable and not effect.exclude_missing:
                answer[name] = None
                continue
            receipt = Receipt(manifest.digest, self.config.nonce, int(name), all(readable))
            key = self.values.key(objects.receipt_key(manifest.round, name))
            self._store.create(key, objects.encode(receipt), is_name_durable=False)
            answer[name] = True
        return answer

    def _apply_means(
        self, effect: fx.ApplyMeans, manifest: Manifest, names: tuple[str, ...]
    ) -> dict[str, Outcome | None]:
        if manifest.plan == DIRECT:
            receipts = {name: self._read_receipt(manifest, name) for name in names}
            good = {name: found for name, found in receipts.items() if found is not None}
            if fx.FOREIGN in good.values():
                return dict.fromkeys(names, fx.FOREIGN)
            if len(good) < len(names):
                return dict.fromkeys(names)
            parts = self._gather(_StepDirect(manifest, good))
        else:
            parts = self._gather(effect)
        if self.group.processes == 1:
            return parts[0]  # type: ignore[no-any-return]
        return {name: _agree([part[name] for part in parts if name in part]) for name in names}

    def _read_receipt(self, manifest: Manifest, name: str) -> Outcome | None:
        key = objects.receipt_key(manifest.round, name)
        body = self._get(key)
        if body is None:
            return None
        try:
            receipt = objects.read_receipt(key, body)
        except DamagedObject as problem:
            log.warning("%s", problem)
            return None
        if receipt.manifest != manifest.digest or receipt.rank != int(name):
            return fx.FOREIGN
        return Outcome(receipt.made_by, () if receipt.is_readable else (receipt.rank,))

    def _load_checkpoint(self, key: str) -> objects.Checkpoint | None:
        try:
            body = self._get(key)
            if body is None:
                return None
            meta = objects.read_checkpoint(key, body)
        except (DamagedObject, ObjectTooLarge) as problem:
            log.warning("%s", problem)
            return None
        if not all(self._gather(_Load(meta))):
            return None
        self.machine.config = replace(self.machine.config, layout=self.layout.digest)
        return meta

    def _adopt_layout(self, theirs: RunLayout) -> None:
        if self._adopt is None:
            check_same(theirs, self.layout)
        else:
            self.layout = self._adopt(theirs)


def _agree(found: list[Outcome | None]) -> Outcome | None:
    """What all processes say of a mean: it counts if all have it, and the same one."""
    if not found or None in found:
        return None
    return found[0] if all(one == found[0] for one in found) else fx.FOREIGN
