"""What must be true of a run, computed from the objects in the store, not from anybody's books.

The oracle sees every object that was ever stored and every commit of every process. O1 … O15 are
the promises of the round; `Violation` names the one that was broken.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from atoll.diloco.data import ranges
from atoll.diloco.round import objects
from atoll.diloco.round.objects import DIRECT, Manifest, Outcome

if TYPE_CHECKING:
    from tests.sim.round.replica import Process, Setup, SimMachine

State = dict[tuple[int, int], int]  # by fragment and cell


class Violation(AssertionError):
    """A promise was broken."""


class UploadBody(NamedTuple):
    header: bytes
    cells: dict[int, int] | None  # None: in the parts
    ids: frozenset[int]
    claim: frozenset[int]


class MeanBody(NamedTuple):
    manifest: str
    made_by: str
    excluded: tuple[int, ...]
    cells: dict[int, int]  # numerators: the mean is each of them over the weight
    weight: int


def step(value: int, numerator: int, weight: int) -> int:
    """The outer step of one cell: any function that depends on the order and on each mean."""
    return hash((value, numerator, weight))


def encode_up(value: int, setup: Setup) -> int:
    quantum = 64 if setup.is_lossy_up else 4
    return (value + quantum // 2) // quantum * quantum


def encode_down(numerator: int, weight: int, setup: Setup) -> int:
    if not setup.is_lossy_down or not weight:
        return numerator
    quantum = 32 * weight
    return (numerator + quantum // 2) // quantum * quantum


def carried(cells: int, shards: int, process: int, processes: int) -> set[int]:
    """The cells of a fragment that one process of a replica carries."""
    found: set[int] = set()
    for shard in range(shards):
        own = range(shard, cells, shards)
        found.update(own[len(own) * process // processes : len(own) * (process + 1) // processes])
    return found


def read_header(key: str, body: UploadBody) -> objects.UploadHeader:
    return objects.read_header(key.partition("+")[0], body.header)


def rest_keys(member: objects.Member) -> list[str]:
    return [rest.upload for rest in member.rest]


class Oracle:
    """Checks one world."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.now = 0.0
        self.uploads: dict[str, UploadBody] = {}
        self.parts: dict[str, dict[int, int]] = {}
        self.first_upload_at: float | None = None
        self.manifests: dict[str, Manifest] = {}
        self.decided_at: dict[str, float] = {}
        self.pieces: dict[str, State] = {}
        self.named: set[str] = set()  # folders of pieces that a checkpoint names
        self.truth: dict[str, State] = {}
        self.commits: dict[str, tuple[Manifest, dict[str, Outcome]]] = {}
        self.canonical: dict[int, str] = {0: objects.ZERO}
        self.committed_at: dict[int, float] = {}
        self.swept: set[int] = set()  # rounds of which a mean or the manifest was deleted
        self.strays: dict[str, int] = defaultdict(int)
        self.committed_ids: dict[int, set[int]] = defaultdict(set)
        self.committed_uploads: set[str] = set()
        self.rests: dict[int, list[tuple[str, str]]] = defaultdict(list)  # by round: key, layout
        self.claimed: set[int] = set()
        self.positions: dict[int, frozenset[int]] = {}  # of a training
        self.claimed_ids: set[int] = set()
        self.calls: dict[tuple[str, int], tuple[int, str]] = {}
        self.stats: dict[str, int] = defaultdict(int)
        self.late: dict[str, int] = defaultdict(int)
        self.members: dict[str, int] = defaultdict(int)
        self.ended_ranks: set[int] = set()
        self.errors: list[str] = []  # that calls ended with
        self.logs: list[str] = []

    def fail(self, rule: str, text: str) -> None:
        raise Violation(f"{rule}: {text}")

    # -- The store

    def see(self, what: str, key: str, body: Any) -> None:
        if what == "deleted":
            if key.startswith(("mean/", "manifest/", "receipt/", "checkpoint/")):
                self.swept.add(objects.parse_round(key) or 0)
            return
        if what == "replaced":
            # A starter whose first state was not taken saves the one that was.
            is_unnamed = key.startswith("state/") and key.rpartition("/")[0] not in self.named
            if not is_unnamed and body != self.pieces.get(key) and "/ended/" not in key:
                self.fail("O2", f"{key} was replaced by something else")
            return
        if key.startswith("upload/ended/"):
            self.ended_ranks.add(int(key[-10:].split("/")[-1].split(".")[0]))
        elif key.startswith("upload/"):
            self.uploads[key] = body
            header = read_header(key, body)
            for process in range(header.processes if header.processes > 1 else 0):
                if objects.part_key(key, process) not in self.parts:
                    self.fail("O6", f"{key} is stored before part {process} of it")
            if self.first_upload_at is None:
                self.first_upload_at = self.now
        elif key.startswith("part/"):
            self.parts[key] = body
        elif key.startswith("state/"):
            self.pieces[key] = body
        elif key.startswith("manifest/"):
            self._see_manifest(objects.read_manifest(key, body))
        elif key.startswith("mean/"):
            self._see_mean(key, body)
        elif key.startswith("checkpoint/"):
            self._see_checkpoint(key, body)

    def _see_manifest(self, manifest: Manifest) -> None:
        self.manifests[manifest.digest] = manifest
        # One who slept through its deletion may create it again, with the same bytes.
        self.decided_at.setdefault(manifest.digest, self.now)
        is_offer = any(
            manifest.decided_by in each.upload for each in manifest.members if each.weight
        )
        if manifest.next_s != self.setup.next_s and (is_offer or manifest.next_s):
            self.fail("O15", f"round {manifest.round} ends the next period in {manifest.next_s} s")
        ranks = [member.rank for member in manifest.members]
        if len(set(ranks)) < len(ranks):
            self.fail("O6", f"a rank is in round {manifest.round} twice: {ranks}")
        for member in manifest.members:
            upload = self.uploads.get(member.upload)
            if upload is None:
                self.fail("O6", f"{member.upload} was never stored")
            elif not member.is_rest:
                header = read_header(member.upload, upload)
                chain = manifest.chain
                if header.is_leaving and header.chain != chain and chain in self.commits:
                    chain = self.commits[chain][0].chain  # it came too late for the round before
                if header.chain != chain:
                    self.fail("O6", f"{member.upload} is of another chain than its manifest")
        if manifest.round == 0 and self.first_upload_at is not None:
            waited = self.now - self.first_upload_at
            lacks = set(self.setup.together) - set(ranks) - self.ended_ranks
            if lacks and waited < 0.5 * self.setup.timeout_s:
                self.fail("O11", f"the first round did not wait for {lacks}: {waited:.0f} s")

    def _see_mean(self, key: str, body: MeanBody) -> None:
        manifest = self.manifests.get(body.manifest)
        if manifest is None:
            self.fail("O3", f"{key} is of no manifest")
            return
        right = self.compute_mean(manifest, key.rpartition("/")[2], body.excluded)
        if right != (body.cells, body.weight):
            self.fail("O3", f"{key} is {body.cells}, {body.weight}, not {right}")

    def _see_checkpoint(self, key: str, body: bytes) -> None:
        meta = objects.read_checkpoint(key, body)
        state: State = {}
        for process in range(meta.processes):
            piece = self.pieces.get(objects.piece_key(meta.round, meta.nonce, process))
            if piece is None:
                self.fail("O1", f"{key} lacks piece {process}")
            else:
                state.update(piece)
        if meta.chain == objects.ZERO and objects.ZERO not in self.truth:
            self.truth[objects.ZERO] = state
        if meta.round and (
            meta.chain not in self.commits or self.commits[meta.chain][0].round + 1 != meta.round
        ):
            self.fail("O8", f"{key} is not of round {meta.round}")
        self.named.add(objects.piece_key(meta.round, meta.nonce, 0).rpartition("/")[0])
        if state != self.truth.get(meta.chain) and (meta.round or 0 not in self.swept):
            # One who slept through the start may store another one when it is swept: it is older
            # than two others, so nobody loads it.
            self.fail("O1", f"{key} is not the state of its chain")

    # -- Means

    def read_upload(self, key: str, cells: set[int]) -> dict[int, int]:
        upload = self.uploads[key]
        if upload.cells is not None:
            return upload.cells
        found: dict[int, int] = {}
        header = read_header(key, upload)
        for process in range(header.processes):
            found.update(self.parts.get(objects.part_key(key, process), {}))
        return found

    def compute_mean(
        self, manifest: Manifest, name: str, excluded: tuple[int, ...]
    ) -> tuple[dict[int, int], int]:
        numerators, weight = self.sum_uploads(manifest, name, excluded)
        if manifest.plan == DIRECT:
            return numerators, weight
        return {
            cell: encode_down(number, weight, self.setup) for cell, number in numerators.items()
        }, weight

    def sum_uploads(
        self, manifest: Manifest, name: str, excluded: tuple[int, ...]
    ) -> tuple[dict[int, int], int]:
        if manifest.plan == DIRECT:
            cells = set(range(manifest.cells))
        else:
            shard, part = objects.shard_of(name), objects.part_of(name)
            cells = set(manifest.span(shard, part, manifest.parts_of(shard)))
        total = dict.fromkeys(cells, 0)
        weight = 0
        for member in manifest.members:
            if not member.weight or member.rank in excluded:
                continue
            weight += int(member.weight)
            values = self.read_upload(member.upload, cells)
            for cell in cells:
                total[cell] += int(member.weight) * values[cell]
        return total, weight

    def apply(self, state: State, manifest: Manifest, outcomes: dict[str, Outcome]) -> State:
        state = dict(state)
        fragment = manifest.round % len(self.setup.cells)
        if manifest.plan == DIRECT:
            excluded = tuple(rank for each in outcomes.values() for rank in each.excluded)
            means = [self.compute_mean(manifest, "", excluded)] if outcomes else []
        else:
            means = [
                self.compute_mean(manifest, name, outcomes[name].excluded)
                for name in manifest.names
            ]
        for cells, weight in means:
            if weight:
                for cell, number in cells.items():
                    at = fragment, cell
                    state[at] = step(state[at], number, weight)
        return state

    # -- Commits

    def commit(
        self, machine: SimMachine, before: str, manifest: Manifest, outcomes: dict[str, Outcome]
    ) -> None:
        """A replica has taken a round."""
        round, chain, nonce = manifest.round, machine.chain, machine.config.nonce
        self.stats["commits"] += 1
        if machine.round != round + 1 or manifest.chain != before:
            self.fail("O8", f"{nonce} took round {round} at {machine.round - 1}, {before}")
        # O15: its next period counts from when it had the manifest, by its own clock.
        process = machine.recorder.process
        at = machine.state.manifest_at - process.task.clock
        if not self.decided_at[manifest.digest] - 1e-6 <= at <= process.run.world.now + 1e-6:
            self.fail("O15", f"{nonce} had the manifest of round {round} at {at:.2f}")
        if set(outcomes) != set(manifest.names):
            self.fail("O2", f"{nonce} took round {round} without all of its means")
        if before not in self.truth:
            self.fail("O1", f"{nonce} is on an unknown chain {before}")
        if chain not in self.truth:
            self.truth[chain] = self.apply(self.truth[before], manifest, dict(outcomes))
        known = self.commits.setdefault(chain, (manifest, dict(outcomes)))
        if known != (manifest, dict(outcomes)):
            self.fail("O5", f"{nonce} gives two outcomes of round {round} one name: {outcomes}")
        if round + 1 not in self.canonical and self.canonical.get(round) == before:
            self.canonical[round + 1] = chain
            self.committed_at[round + 1] = self.now
            self.stats["rounds"] += 1
            self._commit_canonical(manifest)
        elif self.canonical.get(round + 1) == chain:
            if self.strays[nonce]:
                self.fail("O2", f"{nonce} returns in round {round}, and not by a checkpoint")
        else:
            self.stats["strays"] += 1
            self.strays[nonce] += 1
            if round not in self.swept:
                self.fail("O2", f"{nonce} took another outcome of round {round}")
            if self.strays[nonce] > 1:
                self.fail("O2", f"{nonce} goes on beside the run in round {round}")

    def _commit_canonical(self, manifest: Manifest) -> None:
        fragment = manifest.round % len(self.setup.cells)
        members = {member.upload for member in manifest.members}
        due = dict(self.rests.pop(manifest.round, ()))  # key to layout
        for key in due:
            # Two worlds within as many rounds as there are fragments: those of one are lost.
            if len(set(due.values())) == 1 and key not in members:
                self.fail("O15", f"{key}, which was handed in, is not in its round")
            self.stats["rests"] += key in members
        for member in manifest.members:
            if member.is_rest and member.upload not in due:
                self.fail("O15", f"{member.upload} is in, and nobody handed it in")
            header = read_header(member.upload, self.uploads[member.upload])
            is_late = not member.is_rest and header.chain != manifest.chain
            self.stats["carried over"] += is_late
        for member in manifest.members:
            for ahead, (key, rest) in enumerate(zip(rest_keys(member), member.rest, strict=True)):
                if rest.weight:
                    later = manifest.round + ahead + 1
                    self.rests[later].append((key, manifest.layout))
            upload = self.uploads[member.upload]
            if member.upload in self.committed_uploads:
                self.fail("O6", f"{member.upload} is in two rounds")
            self.committed_uploads.add(member.upload)
            if member.weight:
                twice = upload.ids & self.committed_ids[fragment]
                if twice:
                    self.fail("O6", f"training {twice} is in two rounds, {member.upload}")
                self.committed_ids[fragment] |= upload.ids
            if self.setup.terms is None:
                continue
            rests = zip(rest_keys(member), member.rest, strict=True)
            carriers = [self.uploads[key] for key, rest in rests if rest.weight]
            if member.weight:
                carriers.append(upload)
            ids = frozenset[int]().union(*(each.ids for each in carriers))
            claim = set(ranges.positions(member.claim))
            if claim & self.claimed:
                self.fail("O7", f"positions {claim & self.claimed} are used twice")
            self.claimed |= claim
            if not carriers:
                continue
            trained: set[int] = set()
            for each in ids - self.claimed_ids:
                trained |= self.positions[each]
            if trained != claim:
                self.fail("O7", f"{member.upload} trained on {trained} and claims {claim}")
            self.claimed_ids |= ids

    def join(self, machine: SimMachine) -> None:
        """A replica has loaded a checkpoint."""
        self.strays[machine.config.nonce] = 0
        if machine.chain not in self.truth:
            self.fail("O1", f"{machine.config.nonce} has joined an unknown chain")

    def check_values(self, process: Process, chain: str) -> None:
        """O1, O13: the values of a process are those of its chain, cell by cell."""
        truth = self.truth[chain]
        for fragment, values in enumerate(process.values):
            for cell, value in values.items():
                if truth[fragment, cell] != value:
                    self.fail(
                        "O1" if process.processes == 1 else "O13",
                        f"{process.name} has another cell {fragment}, {cell} at chain {chain}",
                    )

    def settle(self, process: Process, chain: str, *, is_member: bool) -> None:
        """O4, O5: what the process should still owe, by what is stored."""
        manifest, outcomes = self.commits[chain]
        fragment = manifest.round % len(self.setup.cells)
        member = manifest.member(process.rank)
        self.stats["commits of processes"] += 1
        if not is_member or member is None or not member.weight:
            return
        balance = process.balance[fragment]
        values = self.read_upload(member.upload, set())
        if manifest.plan == DIRECT:
            out = {rank for each in outcomes.values() for rank in each.excluded}
            if outcomes and process.rank not in out:
                for cell in balance:
                    balance[cell] -= values[cell]
            return
        for name, outcome in outcomes.items():
            shard, part = objects.shard_of(name), objects.part_of(name)
            cells = manifest.span(shard, part, manifest.parts_of(shard))
            own = [cell for cell in cells if cell in balance]
            if process.rank not in outcome.excluded:
                for cell in own:
                    balance[cell] -= values[cell]
            is_maker = outcome.made_by == process.nonce and part % process.processes == process.at
            if is_maker and process.made.get((manifest.digest, name)) == outcome.excluded:
                total, weight = self.sum_uploads(manifest, name, outcome.excluded)
                for cell in own:
                    rest = total[cell] - encode_down(total[cell], weight, self.setup)
                    balance[cell] += rest // int(member.weight)

    def check_balance(self, process: Process) -> None:
        for fragment, balance in enumerate(process.balance):
            for cell, right in balance.items():
                owed = process.row[fragment][cell] + process.unsynced[fragment][cell]
                if owed != right:
                    self.fail(
                        "O4",
                        f"{process.name} owes {owed} and not {right} in cell {fragment}, {cell}",
                    )

    def call_ended(self, process: Process, number: int, how: str) -> None:
        """O13: all processes of a replica end every call alike."""
        place = process.nonce, number
        known = self.calls.setdefault(place, (process.at, how))
        if known[1] != how:
            self.fail("O13", f"{process.name} ends call {number} with {how}, others with {known}")

    # -- The end

    def check_garbage(self, keys: list[str], frontier: int) -> None:
        """O10: nothing is older than what gc allows."""
        setup = self.setup
        bound = frontier - 4 * setup.every - setup.keep - 4
        for key in keys:
            round = objects.parse_round(key)
            if round is None or key.startswith(("checkpoint/", "manifest/")):
                continue
            if round < bound:
                self.fail("O10", f"{key} is older than round {bound}")
        count = sum(key.startswith("checkpoint/") for key in keys)
        if count > 5:
            self.fail("O10", f"there are {count} checkpoints")
        manifests = [k for k in keys if k.startswith("manifest/")]
        if any((objects.parse_round(k) or 0) < bound - 3 * setup.block for k in manifests):
            self.fail("O10", "manifests are not folded")
