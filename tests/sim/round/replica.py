"""A replica of one to three processes: the real machine over a model of values and collectives.

Process 0 runs the machine; the others follow its words. Each has its own cells, in whole numbers,
so that nothing is lost to rounding unseen. `mutants` names rules to break, one in each test.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from atoll.core.errors import AtollError
from atoll.diloco.data import ledger as ledgers
from atoll.diloco.data import ranges
from atoll.diloco.data.ledger import Ledger
from atoll.diloco.data.ranges import Ranges
from atoll.diloco.round import objects
from atoll.diloco.round.effects import (
    DROPPED,
    FOREIGN,
    LEFT,
    ApplyMeans,
    Beside,
    Create,
    Delete,
    Get,
    GetAll,
    Headers,
    List,
    LoadCheckpoint,
    Log,
    MakeMeans,
    Offer,
    Put,
    RoundConfig,
    RoundResult,
    SaveCheckpoint,
    Sleep,
    StoreError,
    UnlikeUpload,
    Upload,
)
from atoll.diloco.round.objects import DIRECT, DamagedObject, Manifest, Outcome
from atoll.diloco.round.pace import Pace
from atoll.diloco.round.protocol import RoundMachine
from tests.sim.round.oracle import (
    MeanBody,
    Oracle,
    UploadBody,
    carried,
    encode_down,
    encode_up,
    step,
)
from tests.sim.round.world import DAMAGED, QUIET, Faults, Group, Task, World

Steps = Generator[Any, Any, Any]
MISSING = object()
EMPTY_WORD_S = 5.0


@dataclass
class Setup:
    """What all replicas of a run have in common."""

    world: int = 3
    cells: tuple[int, ...] = (5,)
    quorum: int = 2
    together: tuple[int, ...] = ()
    timeout_s: float = 60.0
    is_lossy_up: bool = False
    is_lossy_down: bool = False
    terms: ledgers.Terms | None = None
    keep: int = 2
    every: int = 3
    block: int = 3
    has_direct: bool = False
    overlap: bool = False
    mutants: frozenset[str] = frozenset()
    machine: type[SimMachine] | None = None
    period_s: float = 5.0
    training: float = 0.95  # the chance that a period has inner steps at all
    not_finite: float = 0.0
    launch: str = "one"
    version: int = 0  # of settings that all must have alike
    is_parallel: bool = False  # several objects are read at once, as a real driver does
    next_s: float = 0.0  # periods go by the clock: manifests say when the next one ends

    def has(self, mutant: str) -> bool:
        return mutant in self.mutants


class Recorder:
    """Local memory of the leader: calls wait for the next word, or happen now if it is alone."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.calls: list[tuple[Any, ...]] = []

    @property
    def fresh(self) -> Ranges:
        return ranges.of(self.process.fresh)

    def begin(self, manifest: Manifest) -> None:
        self._call("begin", manifest)

    def settle(self, manifest: Manifest, outcomes: dict[str, Outcome]) -> None:
        self._call("settle", manifest, dict(outcomes))

    def drop(self) -> None:
        self._call("drop")

    def end(self) -> None:
        self._call("end")

    def check(self, chain: str, is_member: bool) -> None:
        self._call("check", chain, is_member)

    def _call(self, *call: Any) -> None:
        if self.process.processes == 1:
            self.process.make_call(call)
        else:
            self.calls.append(call)

    def flush(self) -> list[tuple[Any, ...]]:
        calls, self.calls = self.calls, []
        return calls


class SimMachine(RoundMachine):
    """The machine, telling the oracle of commits and joins."""

    oracle: Oracle
    recorder: Recorder

    def _commit(self, manifest: Manifest, outcomes: dict[str, Outcome]) -> str:
        before, uploads = self.chain, list(self.uploads)
        fate = super()._commit(manifest, outcomes)
        self.oracle.commit(self, before, manifest, outcomes)
        member = manifest.member(self.config.rank)
        self.recorder.check(self.chain, member is not None and member.upload in uploads)
        return fate

    def _load_checkpoint(self) -> Steps:
        missing = yield from super()._load_checkpoint()
        if not self.needs_join:
            self.oracle.join(self)
        return missing


class Process:
    """One process of a replica: its values, its row, and its share in each effect."""

    def __init__(
        self, run: Run, rank: int, nonce: str, at: int, processes: int, group: Group
    ) -> None:
        self.run, self.setup, self.oracle = run, run.setup, run.oracle
        self.rank, self.nonce, self.at, self.processes = rank, nonce, at, processes
        self.group = group
        self.name = f"{rank}.{nonce[:4]}/{at}"
        self.task: Task
        self.beside: Task | None = None  # takes steps beside the calls
        cells, shards = self.setup.cells, self.setup.world
        self.carried = [carried(count, shards, at, processes) for count in cells]
        seed = int(nonce, 16)
        self.values = [
            {cell: hash((seed, fragment, cell)) for cell in own}
            for fragment, own in enumerate(self.carried)
        ]
        self.row = self._zeros()
        self.unsynced = self._zeros()
        self.balance = self._zeros()  # the oracle's: what row and unsynced should hold
        self.is_checked = self.has_dropped = True
        self.has_poison = False  # values in the model that are not finite
        self.poisoned: set[int] = set()  # fragments in whose row they are
        self.row_ids: list[set[int]] = [set() for _ in cells]
        self.unsynced_ids: list[set[int]] = [set() for _ in cells]
        self.fresh: set[int] = set()
        self.hold: Ranges = ()
        self.trainings = 0
        self.steps = 0
        self.encoded: dict[int, int] = {}
        self.encoded_for = ""  # the row's last upload
        self.applied: dict[str, Outcome]
        self.own_means: dict[str, MeanBody]
        self.rounding: dict[str, tuple[tuple[int, ...], dict[int, int]]]
        self._forget()
        self.made: dict[tuple[str, str], tuple[int, ...]] = {}
        self.random = random.Random(seed)  # the same in all processes of a replica
        self.call_number = 0
        self.word_at = 0.0
        self.machine: SimMachine | None = None
        self.recorder = Recorder(self)

    def _zeros(self) -> list[dict[int, int]]:
        return [dict.fromkeys(own, 0) for own in self.carried]

    # -- Training -------------------------------------------------------------------------------

    def train(self) -> None:
        """One period of inner steps on data of the own hold."""
        positions: frozenset[int] = frozenset()
        if self.setup.terms is not None:
            free = [at for at in ranges.positions(self.hold) if at not in self.fresh]
            positions = frozenset(free[:2])
            if not positions:
                return
        self.trainings += 1
        number = hash((int(self.nonce, 16), self.trainings))
        known = self.oracle.positions.setdefault(number, positions)
        if known != positions:
            self.oracle.fail("O13", f"{self.name} trains on {set(positions)}, not {set(known)}")
        self.fresh |= positions
        self.steps += 1
        for fragment, own in enumerate(self.carried):
            for cell in own:
                delta = 4 * (hash((number, fragment, cell)) % 41 - 20)
                self.unsynced[fragment][cell] += delta
                self.balance[fragment][cell] += delta
            self.unsynced_ids[fragment].add(number)

    def fill_row(self, fragment: int) -> None:
        """Add the pseudo-gradient to the row."""
        if self.has_poison:
            self.poisoned.add(fragment)
        row, unsynced = self.row[fragment], self.unsynced[fragment]
        for cell in row:
            row[cell] += unsynced[cell]
            unsynced[cell] = 0
        self.row_ids[fragment] |= self.unsynced_ids[fragment]
        self.unsynced_ids[fragment] = set()

    # -- Local memory ---------------------------------------------------------------------------

    def make_call(self, call: tuple[Any, ...]) -> None:
        getattr(self, f"_{call[0]}")(*call[1:])

    def _begin(self, manifest: Manifest) -> None:
        if self.begun != manifest.digest or self.setup.has("applied means are forgotten"):
            self._forget()
            self.begun = manifest.digest

    def _forget(self) -> None:
        self.begun = ""
        self.applied, self.own_means, self.rounding = {}, {}, {}
        self.receipts: dict[str, dict[str, Outcome]] = {}
        self.stepped: list[int] | None = None  # ranks that a direct round's step was taken with

    def _settle(self, manifest: Manifest, outcomes: dict[str, Outcome]) -> None:
        fragment = manifest.round % len(self.setup.cells)
        member = manifest.member(self.rank)
        assert member is not None
        self.fresh -= set(ranges.positions(member.claim))
        if not member.weight or not outcomes:
            return
        row = self.row[fragment]
        self.row_ids[fragment] = set()
        if manifest.plan == DIRECT:
            out = {rank for each in outcomes.values() for rank in each.excluded}
            if self.rank not in out or self.setup.has("excluded but settled"):
                for cell in row:
                    row[cell] -= self.encoded[cell]
            return
        for name, outcome in outcomes.items():
            own = [cell for cell in self.span(manifest, name) if cell in row]
            if self.rank not in outcome.excluded or self.setup.has("excluded but settled"):
                for cell in own:
                    row[cell] -= self.encoded[cell]
            if self.setup.has("rounding owed by every reader") and outcome.made_by != self.nonce:
                total, weight = self.oracle.sum_uploads(manifest, name, outcome.excluded)
                for cell in own:
                    rest = total[cell] - encode_down(total[cell], weight, self.setup)
                    row[cell] += rest // int(member.weight)
            if not self._owes_rounding(name, outcome):
                continue
            for cell in own:
                row[cell] += self.rounding[name][1].get(cell, 0) // int(member.weight)

    def _owes_rounding(self, name: str, outcome: Outcome) -> bool:
        excluded, _ = self.rounding.get(name, ((), {}))
        if name not in self.rounding or self.setup.has("rounding owed by nobody"):
            return False
        if self.setup.has("rounding owed by whoever made one"):  # R7
            return True
        is_same = excluded == outcome.excluded or self.setup.has("rounding of another mean")
        return outcome.made_by == self.nonce and is_same

    def _drop(self) -> None:
        self.row, self.unsynced = self._zeros(), self._zeros()
        if self.is_checked:
            self.balance = self._zeros()
        self.has_dropped = True
        for book in (self.row_ids, self.unsynced_ids):
            for each in book:
                each.clear()
        self.fresh = set()
        self.steps = 0
        self.encoded_for = ""
        self.has_poison = False
        self.poisoned = set()

    def _end(self) -> None:
        self._forget()
        self.is_checked = self.has_dropped = False

    def _check(self, chain: str, is_member: bool) -> None:
        self.oracle.check_values(self, chain)
        self.oracle.settle(self, chain, is_member=is_member)
        if self.has_dropped:
            self.balance = self._zeros()
        self.is_checked = True
        self.oracle.check_balance(self)

    def span(self, manifest: Manifest, name: str) -> range:
        shard, part = objects.shard_of(name), objects.part_of(name)
        return manifest.span(shard, part, manifest.parts_of(shard))

    # -- Shares in effects on values ------------------------------------------------------------

    def share(self, effect: Any, extra: Any) -> Steps:
        if isinstance(effect, MakeMeans | ApplyMeans) and self.begun != effect.manifest.digest:
            self.oracle.fail("O13", f"{self.name} has not begun round {effect.manifest.round}")
        if isinstance(effect, Upload):
            return (yield from self._share_upload(effect))
        if isinstance(effect, MakeMeans):
            if effect.manifest.plan == DIRECT:
                return (yield from self._read_for_receipts(effect))
            return (yield from self._make_means(effect))
        if isinstance(effect, ApplyMeans):
            if effect.manifest.plan == DIRECT:
                return (yield from self._apply_uploads(effect.manifest, extra))
            return (yield from self._apply_means(effect))
        if isinstance(effect, SaveCheckpoint):
            return (yield from self._save_piece(effect))
        assert isinstance(effect, LoadCheckpoint)
        return (yield from self._load_pieces(extra))

    def _share_upload(self, effect: Upload) -> Steps:
        if effect.round % len(self.setup.cells) in self.poisoned and effect.header.weight:
            self.oracle.fail("O3", f"{self.name} uploads values that are not finite")
        ids = []
        for ahead in range(1, len(effect.header.rest) + 1):
            fragment, encoded = self._encode(effect.round + ahead)
            ids.append((frozenset(self.row_ids[fragment]), encoded))
            if self.processes > 1:
                key = objects.part_key(objects.rest_key(effect.key, ahead), self.at)
                yield "put", key, encoded
        fragment, self.encoded = self._encode(effect.round)
        self.encoded_for = effect.key
        if self.processes > 1:
            key = objects.part_key(effect.key, self.at)
            yield "put", key, dict(self.encoded)
        return frozenset(self.row_ids[fragment]), ids

    def _encode(self, round: int) -> tuple[int, dict[int, int]]:
        fragment = round % len(self.setup.cells)
        row = self.row[fragment].items()
        return fragment, {cell: encode_up(value, self.setup) for cell, value in row}

    def _read_member(self, manifest: Manifest, rank: int, cells: set[int]) -> Steps:
        """The values of a member's upload in these cells; MISSING or DAMAGED."""
        member = manifest.member(rank)
        assert member is not None
        found: dict[int, int] = {}
        if member.processes == 1:
            body = yield "get", member.upload
            if body is None:
                return MISSING
            return body if body is DAMAGED else {cell: body.cells[cell] for cell in cells}
        for process in range(member.processes):
            theirs = carried(manifest.cells, manifest.shards, process, member.processes) & cells
            if theirs:
                body = yield "get", objects.part_key(member.upload, process)
                if body is None or body is DAMAGED:
                    return MISSING if body is None else DAMAGED
                found.update({cell: body[cell] for cell in theirs})
        return found

    def _read_values(self, manifest: Manifest, rank: int, cells: set[int]) -> Steps:
        """As `_read_member`, but own cells that this process carries come from memory."""
        member = manifest.member(rank)
        assert member is not None
        if member.upload != self.encoded_for:
            return (yield from self._read_member(manifest, rank, cells))
        own = {cell: self.encoded[cell] for cell in cells if cell in self.encoded}
        rest = cells - set(own)
        if rest and self.setup.has("zeros for cells of other processes"):
            return own | dict.fromkeys(rest, 0)
        if rest:
            others = yield from self._read_member(manifest, rank, rest)
            return others if others in (MISSING, DAMAGED) else own | others
        return own

    def _make_means(self, effect: MakeMeans) -> Steps:
        answers: dict[str, Any] = {}
        for name in effect.names:
            if objects.part_of(name) % self.processes == self.at:
                answers[name] = yield from self._make_mean(
                    effect.manifest, name, effect.exclude_missing
                )
        return answers

    def _make_mean(self, manifest: Manifest, name: str, exclude_missing: bool) -> Steps:
        cells = set(self.span(manifest, name))
        if self.setup.has("a stand-in with its own cut"):
            cells &= self.carried[manifest.round % len(self.setup.cells)]
        total = dict.fromkeys(cells, 0)
        weight, excluded = 0, []
        if manifest.owner_of(name) != self.rank:
            self.run.world.count("stand-ins")
        if manifest.parts_of(objects.shard_of(name)) != self.processes:
            self.run.world.count("means of another cut")
        ahead = {}
        if self.setup.is_parallel:
            others = [each.upload for each in manifest.members if each.upload != self.encoded_for]
            ahead = yield from self._read_all(others)
        for member in manifest.members:
            if not member.weight:
                continue
            is_own = member.upload == self.encoded_for
            if is_own and self.setup.has("a stand-in omits its own values"):
                if manifest.owner_of(name) != self.rank:
                    continue
            if member.upload in ahead:
                values = ahead[member.upload].cells
            else:
                values = yield from self._read_values(manifest, member.rank, cells)
            if values is MISSING and not exclude_missing:
                return None
            if values is DAMAGED and self.setup.has("damaged uploads are waited for"):
                return None
            if values is MISSING or values is DAMAGED:
                excluded.append(member.rank)
                continue
            weight += int(member.weight)
            for cell in cells:
                total[cell] += int(member.weight) * values[cell]
        encoded = {cell: encode_down(each, weight, self.setup) for cell, each in total.items()}
        body = MeanBody(manifest.digest, self.nonce, tuple(excluded), encoded, weight)
        own = self.carried[manifest.round % len(self.setup.cells)]
        self.rounding[name] = (
            body.excluded,
            {cell: total[cell] - encoded[cell] for cell in cells if cell in own},
        )
        self.made[manifest.digest, name] = body.excluded
        self.own_means.pop(name, None)
        verb = "put" if self.setup.has("means are put") else "create"
        is_mine = yield verb, objects.mean_key(manifest.round, name), body
        if is_mine or self.setup.has("own mean used though another was stored"):
            self.own_means[name] = body
        return True

    def _apply_means(self, effect: ApplyMeans) -> Steps:
        manifest = effect.manifest
        fragment = manifest.round % len(self.setup.cells)
        values = self.values[fragment]
        answers: dict[str, Outcome | None] = {}
        ahead: dict[str, Any] = {}
        if self.setup.is_parallel:
            new = [n for n in effect.names if n not in self.applied and n not in self.own_means]
            ahead = yield from self._read_all([objects.mean_key(manifest.round, n) for n in new])
        for name in effect.names:
            own = [cell for cell in self.span(manifest, name) if cell in values]
            if not own:
                continue
            if name in self.applied:
                answers[name] = self.applied[name]
                continue
            body = self.own_means.get(name)
            key = objects.mean_key(manifest.round, name)
            if body is None:
                body = ahead[key] if key in ahead else (yield "get", key)
            if body is None or body is DAMAGED:
                answers[name] = None
                continue
            if body.manifest != manifest.digest and not self.setup.has("R6"):
                answers[name] = FOREIGN
                continue
            if body.weight:
                for cell in own:
                    values[cell] = step(values[cell], body.cells[cell], body.weight)
            self.applied[name] = answers[name] = Outcome(body.made_by, body.excluded)
        return answers

    def _read_for_receipts(self, effect: MakeMeans) -> Steps:
        """Read uploads whole, and take the outer step meanwhile if that is all that is missing."""
        manifest = effect.manifest
        cells = self.carried[manifest.round % len(self.setup.cells)]
        answers: dict[str, Any] = {}
        read: dict[int, dict[int, int]] = {}
        member = manifest.member(self.rank)
        if member is not None and member.upload == self.encoded_for:
            read[self.rank] = self.encoded
        for name in effect.names:
            if self.setup.has("a receipt from memory") and int(name) == self.rank:
                answers[name] = True
                continue
            values = yield from self._read_member(manifest, int(name), cells)
            answers[name] = None if values is MISSING else values is not DAMAGED
            if values is MISSING and effect.exclude_missing:
                answers[name] = False
            if answers[name]:
                read[int(name)] = values
        counted = [each.rank for each in manifest.members if each.weight]
        if self.stepped is None and all(rank in read for rank in counted):
            self._step_direct(manifest, counted, read)
        return answers

    def _step_direct(
        self, manifest: Manifest, ranks: list[int], read: dict[int, dict[int, int]]
    ) -> None:
        values = self.values[manifest.round % len(self.setup.cells)]
        weights = {each.rank: int(each.weight) for each in manifest.members}
        total = sum(weights[rank] for rank in ranks)
        if total:
            for cell in values:
                number = sum(weights[rank] * read[rank][cell] for rank in ranks)
                values[cell] = step(values[cell], number, total)
        self.stepped = ranks

    def _apply_uploads(self, manifest: Manifest, outcomes: dict[str, Outcome]) -> Steps:
        out = {rank for each in outcomes.values() for rank in each.excluded}
        good = [each.rank for each in manifest.members if each.weight and each.rank not in out]
        cells = self.carried[manifest.round % len(self.setup.cells)]
        if self.stepped is None:
            read = {}
            for rank in good:
                read[rank] = yield from self._read_values(manifest, rank, cells)
                if read[rank] is MISSING or read[rank] is DAMAGED:
                    return dict.fromkeys(outcomes, FOREIGN)
            self._step_direct(manifest, good, read)
        if self.stepped != good and not self.setup.has("own receipt ignored"):
            return dict.fromkeys(outcomes, FOREIGN)
        return dict(outcomes)

    def _save_piece(self, effect: SaveCheckpoint) -> Steps:
        piece = {
            (fragment, cell): value
            for fragment, values in enumerate(self.values)
            for cell, value in values.items()
        }
        yield "put", objects.piece_key(effect.meta.round, effect.meta.nonce, self.at), piece
        return True

    def _load_pieces(self, meta: objects.Checkpoint) -> Steps:
        self._forget()
        for process in range(meta.processes):
            if self.setup.has("a checkpoint is read by the own cut") and process != self.at:
                continue
            if not any(
                carried(cells, meta.shards, process, meta.processes) & own
                for cells, own in zip(self.setup.cells, self.carried, strict=True)
            ):
                continue
            body = yield "get", objects.piece_key(meta.round, meta.nonce, process)
            if body is None or body is DAMAGED:
                return None
            for (fragment, cell), value in body.items():
                if cell in self.values[fragment]:
                    self.values[fragment][cell] = value
        return True

    # -- The leader's part in effects -----------------------------------------------------------

    def perform(self, effect: Any) -> Steps:
        if isinstance(effect, Log):
            self.oracle.logs.append(effect.text)
            return None
        if isinstance(effect, Sleep):
            return (yield from self._sleep(effect.seconds))
        if isinstance(effect, Beside):
            if self.beside is None or self.beside.is_dead:
                task = Task(f"{self.name} beside", self._drive(effect.steps), parent=self.task)
                self.beside = self.run.world.start(task)
            return None
        if isinstance(effect, Put | Create):
            verb = "put" if isinstance(effect, Put) else "create"
            if self.setup.has("manifests are put") and effect.key.startswith("manifest/"):
                verb = "put"
            return (yield verb, effect.key, effect.body)
        if isinstance(effect, Delete):
            return (yield "delete", effect.keys)
        if isinstance(effect, Get):
            return (yield from self._get(effect.key))
        if isinstance(effect, GetAll):
            found = yield from self._read_all(effect.keys)
            return {key: _as_bytes(body) for key, body in found.items()}
        if isinstance(effect, Headers):
            found = yield from self._read_all(effect.keys)
            return {key: self._header(key, body) for key, body in found.items()}
        if isinstance(effect, List):
            return (yield "list", effect.prefix, effect.after)
        return (yield from self._perform_together(effect))

    def _get(self, key: str) -> Steps:
        return _as_bytes((yield "get", key))

    def _read_all(self, keys: Any) -> Steps:
        if self.setup.is_parallel and keys:
            return (yield "gets", tuple(keys))
        found = {}
        for key in keys:
            found[key] = yield "get", key
        return found

    def _header(self, key: str, body: Any) -> Any:
        if body is DAMAGED and key in self.run.world.objects:  # its cells are
            body = self.run.world.objects[key].body
        return None if body is None or body is DAMAGED else body.header

    def _sleep(self, seconds: float) -> Steps:
        assert self.machine is not None
        until = self.run.world.clock(self.task) + seconds
        while True:
            now = self.run.world.clock(self.task)
            pause = max(0.0, until - now)
            if self.processes > 1:
                pause = min(pause, max(0.0, self.word_at + EMPTY_WORD_S - now))
            now = yield "sleep", pause
            self.machine.is_leaving |= self.task.is_leaving
            if self.processes > 1 and now >= self.word_at + EMPTY_WORD_S - 1e-6:
                yield from self._empty_word()
            if now >= until - 1e-6 or self.machine.is_leaving:
                return now

    def _empty_word(self) -> Steps:
        assert self.machine is not None
        if self.setup.has("no empty words"):
            self.word_at = self.run.world.clock(self.task)
            return
        yield from self._say("empty", None, None)
        words = yield "gather", self.group, "round", self.at, (None, None, self.task.is_leaving)
        self._hear(words)

    def _say(self, kind: str, effect: Any, extra: Any) -> Steps:
        word = kind, self.recorder.flush(), effect, extra
        self.word_at = self.run.world.clock(self.task)
        yield "gather", self.group, "round", self.at, word
        if self.setup.has("calls after the effect") and kind == "effect":
            return
        for call in word[1]:
            self.make_call(call)

    def _hear(self, words: list[Any]) -> list[Any]:
        assert self.machine is not None
        leaves = [leaves for *_, leaves in words]
        self.machine.is_leaving |= any(leaves[: self._heard_processes])
        errors = [error for _, error, _ in words if error is not None]
        if self.setup.has("errors of others are ignored"):
            errors = [words[0][1]] if words[0][1] is not None else []
        if errors:
            raise errors[0]
        return [answer for answer, error, _ in words if error is None]

    @property
    def _heard_processes(self) -> int:
        return 1 if self.setup.has("leave seen by one") else self.processes

    def _perform_together(self, effect: Any) -> Steps:
        extra, answer = yield from self._look_before(effect)
        if extra is MISSING:
            return answer
        if self.setup.has("going on after a failed collective") and self.group.is_closed:
            return (
                yield from self._finish(effect, extra, [(yield from self.share(effect, extra))])
            )
        if self.processes == 1:
            answers = [(yield from self.share(effect, extra))]
        else:
            yield from self._say("effect", effect, extra)
            mine = yield from self._try_share(effect, extra)
            is_early = self.setup.has("header or index before the gather") and mine[1] is None
            if is_early and isinstance(effect, Upload | SaveCheckpoint):
                idle = self._answer_idly(effect)
                answer = yield from self._finish(effect, extra, [mine[0], idle])
                yield "gather", self.group, "round", self.at, mine
                return answer
            words = yield "gather", self.group, "round", self.at, mine
            answers = self._hear(words)
            if self.setup.has("errors of others are ignored"):
                answers.append(self._answer_idly(effect))
        return (yield from self._finish(effect, extra, answers))

    def _try_share(self, effect: Any, extra: Any) -> Steps:
        try:
            answer = yield from self.share(effect, extra)
            return answer, None, self.task.is_leaving
        except StoreError as error:
            return None, error, self.task.is_leaving

    def _look_before(self, effect: Any) -> Steps:
        """What the leader reads alone. (MISSING, answer): the others need not be asked."""
        if isinstance(effect, LoadCheckpoint):
            body = yield "get", effect.key
            if body is None or body is DAMAGED:
                return MISSING, None
            return objects.read_checkpoint(effect.key, body), None
        if isinstance(effect, ApplyMeans) and effect.manifest.plan == DIRECT:
            manifest = effect.manifest
            found: dict[str, Outcome | None] = {}
            for name in manifest.names:
                key = objects.receipt_key(manifest.round, name)
                if key in self.receipts.get(manifest.digest, {}):
                    found[name] = self.receipts[manifest.digest][key]
                    continue
                body = yield "get", key
                if body is None or body is DAMAGED:
                    found[name] = None
                    continue
                receipt = objects.read_receipt(key, body)
                if receipt.manifest != manifest.digest:
                    return MISSING, dict.fromkeys(effect.names, FOREIGN)
                out = () if receipt.is_readable else (receipt.rank,)
                found[name] = Outcome(receipt.made_by, out)
            if None in found.values() and not self.setup.has("applied before all receipts"):
                # Only values that all receipts speak of may be stepped with.
                return MISSING, dict.fromkeys(effect.names)
            return {name: outcome for name, outcome in found.items() if outcome}, None
        if isinstance(effect, ApplyMeans) and self.processes > 1:
            name = effect.names[0]
            if name not in self.applied and name not in self.own_means:
                is_there = yield "head", objects.mean_key(effect.manifest.round, name)
                if not is_there:
                    return MISSING, dict.fromkeys(effect.names)
        return None, None

    def _finish(self, effect: Any, extra: Any, answers: list[Any]) -> Steps:
        """Join what the processes answer; then the leader stores what speaks for all."""
        if isinstance(effect, Upload):
            claim = frozenset(ranges.positions(effect.header.claim))
            header = objects.encode(effect.header)
            ids, rests = answers[0]
            for ahead, (rest_ids, encoded) in enumerate(rests, 1):
                cells = encoded if self.processes == 1 else None
                body = UploadBody(header, cells, rest_ids, frozenset())
                yield "put", objects.rest_key(effect.key, ahead), body
            cells = dict(self.encoded) if self.processes == 1 else None
            yield "put", effect.key, UploadBody(header, cells, ids, claim)
            return effect.header
        if isinstance(effect, MakeMeans) and effect.manifest.plan == DIRECT:
            return (yield from self._create_receipts(effect, answers))
        if isinstance(effect, MakeMeans):
            return {name: each for answer in answers for name, each in answer.items()}
        if isinstance(effect, ApplyMeans):
            return self._join_outcomes(effect, answers)
        if isinstance(effect, SaveCheckpoint):
            verb = "put" if self.setup.has("checkpoints are put") else "create"
            return (yield verb, effect.key, objects.encode(effect.meta))
        return extra if all(answers) else None

    def _create_receipts(self, effect: MakeMeans, answers: list[Any]) -> Steps:
        manifest = effect.manifest
        if self.setup.has("a receipt by process 0 alone"):
            answers = answers[:1]
        done: dict[str, Any] = {}
        for name in effect.names:
            words = [answer[name] for answer in answers]
            if None in words:
                done[name] = None
                continue
            receipt = objects.Receipt(manifest.digest, self.nonce, int(name), all(words))
            key = objects.receipt_key(manifest.round, name)
            if (yield "create", key, objects.encode(receipt)):
                out = () if receipt.is_readable else (receipt.rank,)
                # By manifest: the leader looks here before the calls of the next word are made.
                self.receipts.setdefault(manifest.digest, {})[key] = Outcome(self.nonce, out)
            done[name] = True
        return done

    def _join_outcomes(self, effect: ApplyMeans, answers: list[Any]) -> dict[str, Any]:
        """R16: a mean counts when every process has it, and all have the same."""
        joined: dict[str, Any] = {}
        for name in effect.names:
            words = [answer[name] for answer in answers if name in answer]
            if self.setup.has("a mean taken when one process has it"):
                words = [word for word in words if word is not None] or [None]
            if None in words:
                joined[name] = None
            elif len(set(words)) == 1 or self.setup.has("R16"):
                joined[name] = words[0]
            else:
                joined[name] = FOREIGN
        return joined

    # -- Calls: all processes make them together ------------------------------------------------

    def call(self, name: str, *args: Any) -> Steps:
        self.call_number += 1
        if self.at:
            kind, value, rounds, hold, is_pending = yield from self._follow()
            if self.setup.has("errors raised by one") and kind == "error":
                kind, value = "value", None
        else:
            kind, value, rounds, hold, is_pending = yield from self._lead(name, *args)
        self.oracle.call_ended(self, self.call_number, f"{kind} {value!r:.80} {rounds}")
        self.hold = hold
        self.rounds = rounds
        self.is_pending = is_pending
        if kind == "error":
            self.oracle.errors.append(str(value))
            raise value
        return value

    def _lead(self, name: str, *args: Any) -> Steps:
        machine = self.machine
        assert machine is not None
        self.word_at = self.run.world.clock(self.task)
        end: tuple[Any, ...]
        try:
            value = yield from self._drive(getattr(machine, name)(*args))
            end = "value", value, machine.round, machine.hold, machine.state.is_pending
        except (StoreError, AtollError, DamagedObject) as failed:
            end = "error", failed, machine.round, machine.hold, machine.state.is_pending
        if self.processes > 1:
            yield from self._say("end", end, None)
        return end

    def _drive(self, steps: Steps) -> Steps:
        answer: Any = None
        error: StoreError | None = None
        while True:
            try:
                effect = steps.throw(error) if error else steps.send(answer)
            except StopIteration as stop:
                return stop.value
            error = None
            try:
                answer = yield from self.perform(effect)
            except StoreError as failed:
                error = failed

    def _follow(self) -> Steps:
        while True:
            words = yield "gather", self.group, "round", self.at, None
            kind, calls, effect, extra = words[0]
            is_late = self.setup.has("calls after the effect") and kind == "effect"
            if not is_late:
                self._make_calls(calls)
            if kind == "end":
                return effect
            mine = None, None, self.task.is_leaving
            if kind == "effect" and self.setup.has(f"{type(effect).__name__} by process 0 alone"):
                mine = self._answer_idly(effect), None, self.task.is_leaving
            elif kind == "effect":
                mine = yield from self._try_share(effect, extra)
            if is_late:
                self._make_calls(calls)
            yield "gather", self.group, "round", self.at, mine

    def _answer_idly(self, effect: Any) -> Any:
        """What a process answers that has done nothing."""
        if isinstance(effect, MakeMeans):
            return dict.fromkeys(effect.names, True)
        return {} if isinstance(effect, ApplyMeans) else True

    def _make_calls(self, calls: list[tuple[Any, ...]]) -> None:
        for call in calls:
            if not self.setup.has(f"{call[0]} by process 0 alone"):
                self.make_call(call)

    # -- Life -----------------------------------------------------------------------------------

    rounds = 0
    is_pending = False  # an offer, and nobody may touch its row

    def live(self) -> Steps:
        """Train, hand in, take the mean, for ever or until it is told to leave."""
        setup, rng = self.setup, self.random
        while True:
            try:
                yield from self.call("open")
                break
            except (StoreError, AtollError, DamagedObject):
                yield "sleep", 2.0
        while True:
            yield "sleep", self._period_s()
            if rng.random() < setup.training:
                self.train()
            is_bad = rng.random() < setup.not_finite
            bad_process = rng.randrange(self.processes)
            self.has_poison |= is_bad and bad_process == self.at
            is_finite = not self.has_poison
            weight = self.run.weights.get(self.rank, 1)
            words = [(is_finite, self.task.is_leaving)]
            if self.processes > 1:
                words = yield "gather", self.group, "training", self.at, words[0]
            if setup.has("not finite seen by one"):
                words = words[:1]
            leaves = any(leave for _, leave in words[: self._heard_processes])
            if self.machine is not None:
                self.machine.is_leaving |= leaves
            try:
                if leaves and len(setup.cells) > 1:
                    yield from self._drain(weight, all(finite for finite, _ in words))
                    return "left"
                result = yield from self.call("prepare")
                if result is not None and result.fate == LEFT:
                    if len(setup.cells) > 1:
                        yield from self._drain(weight, all(finite for finite, _ in words))
                    return "left"
                if result is not None and result.fate == DROPPED:
                    continue
                self._check_honesty()
                offer = self._make_offer(weight, all(finite for finite, _ in words))
                if setup.overlap and rng.random() < 0.5:
                    self.train()
                late_training = setup.overlap and rng.random() < 0.3
                hold = self.hold
                result = yield from self.call("run", offer)
                if late_training and result.fate != LEFT:
                    self.hold, newest = hold, self.hold
                    self.train()
                    self.hold = newest
                self._check_honesty()
                if result.fate == LEFT:
                    if len(setup.cells) > 1:
                        yield from self._drain(weight, is_finite=True)
                    return "left"
                self._count(result)
            except UnlikeUpload:
                self.run.world.count("unlike")
                return "failed"
            except (StoreError, AtollError, DamagedObject):
                yield "sleep", rng.choice((0.1, 1.0, 5.0))

    def _period_s(self) -> float:
        """By the clock, only the leader looks at it: the others wait for it before the round."""
        setup, machine = self.setup, self.machine
        if not setup.next_s:
            return setup.period_s * self.run.slowness.get(self.rank, 1.0)
        if machine is None or machine.last is None or not machine.state.is_current:
            return 0.1  # one that was not in the round does not know how old its manifest is
        seconds = machine.last.next_s or setup.next_s
        return max(0.1, machine.state.manifest_at + seconds - self.run.world.clock(self.task))

    def _drain(self, weight: int, is_finite: bool) -> Steps:
        """The rows of all fragments, but that of the one whose upload is on its way."""
        pending = self.rounds % len(self.setup.cells) if self.is_pending else None
        if pending is None:
            self._check_honesty()
        for fragment in range(len(self.setup.cells)):
            if fragment != pending:
                self.fill_row(fragment)
        trained = [weight if ids else 0 for ids in self.row_ids]
        steps, self.steps = self.steps, 0
        claim = ranges.of(self.fresh)
        offer = Offer(float(weight), steps, claim=claim if is_finite else (), is_finite=is_finite)
        while True:
            try:
                return (yield from self.call("drain", offer, tuple(map(float, trained))))
            except (StoreError, AtollError, DamagedObject):
                yield "sleep", 1.0

    def _count(self, result: RoundResult) -> None:
        if not self.at:
            self.oracle.stats[result.fate] += 1
            if result.fate == "member":
                self.oracle.members[self.nonce] += 1

    def _make_offer(self, weight: int, is_finite: bool) -> Offer:
        fragment = self.rounds % len(self.setup.cells)
        steps, self.steps = self.steps, 0
        self.fill_row(fragment)
        claim = ranges.of(self.fresh)
        if not is_finite:
            claim = ()
        return Offer(
            weight=float(weight if steps else 0),
            steps=steps,
            claim=claim,
            want=4,
            is_finite=is_finite,
            next_s=self.setup.next_s,
        )

    def _check_honesty(self) -> None:
        """The training thread's half: what was trained meanwhile must be the rank's own, too."""
        if self.setup.terms is None or self.setup.has("no honesty"):
            return
        if not ranges.is_inside(ranges.of(self.fresh), self.hold):
            self._drop()


def _as_bytes(body: Any) -> Any:
    return b"\0damaged" if body is DAMAGED else body


@dataclass
class Run:
    """A run: its world, its oracle and its replicas."""

    world: World
    setup: Setup
    oracle: Oracle
    slowness: dict[int, float] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)
    replicas: list[Replica] = field(default_factory=list)

    def start(
        self,
        rank: int,
        processes: int = 1,
        *,
        faults: Faults | None = None,
        gate: Callable[[Process], Callable[[str, Any], None] | None] | None = None,
    ) -> Replica:
        nonce = f"{self.world.random.getrandbits(64):016x}"
        replica = Replica(self, rank, nonce, processes, faults or QUIET, gate)
        self.replicas.append(replica)
        return replica


class Replica:
    """One start of a replica."""

    def __init__(
        self,
        run: Run,
        rank: int,
        nonce: str,
        processes: int,
        faults: Faults,
        gate: Callable[[Process], Callable[[str, Any], None] | None] | None,
    ) -> None:
        world, setup = run.world, run.setup
        self.run, self.rank, self.nonce = run, rank, nonce
        self.group = Group(processes)
        self.has_left = False
        clock = world.random.uniform(-1e6, 1e6)
        self.processes = [
            Process(run, rank, nonce, at, processes, self.group) for at in range(processes)
        ]
        leader = self.processes[0]
        config = RoundConfig(
            rank=rank,
            world=setup.world,
            nonce=nonce,
            layout=objects.digest(f"{setup.version} {setup.world} {setup.cells}".encode()),
            shards=setup.world,
            cells=setup.cells,
            launch=setup.launch,
            processes=processes,
            quorum=setup.quorum,
            together=setup.together,
            timeout_s=setup.timeout_s,
            has_direct=setup.has_direct,
            keep=setup.keep,
            checkpoint_every=setup.every,
            history_block=setup.block,
        )
        ledger: Ledger | None = None if setup.terms is None else ledgers.begin(setup.terms)
        kind = setup.machine or SimMachine
        self.machine = kind(config, leader.recorder, Pace(setup.timeout_s), ledger)
        self.machine.oracle, self.machine.recorder = run.oracle, leader.recorder
        leader.machine = self.machine
        for process in self.processes:
            task = Task(process.name, process.live(), clock=clock, faults=faults)
            task.latency = 0.02 * run.slowness.get(rank, 1.0)
            process.task = task
            self.group.tasks.append(task)
            task.on_end = self._end
            if gate is not None:
                task.gate = gate(process)
        for task in self.group.tasks:
            world.start(task)

    def _end(self, error: BaseException | None, value: Any) -> None:
        if value == "left":
            self.has_left = True
        self.run.world.close(self.group) if value != "left" else None

    @property
    def is_alive(self) -> bool:
        return all(not task.is_dead for task in self.group.tasks)

    def kill(self) -> None:
        for task in self.group.tasks:
            self.run.world.kill(task)

    def leave(self) -> None:
        task = self.run.world.random.choice(self.group.tasks)
        task.is_leaving = True
        task.told_at = self.run.world.now
        self.run.world.wake(task)
