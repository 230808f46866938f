"""Schedules that were met, or thought of, written down request by request.

Each returns its stage for more questions, and raises Violation where a promise is broken. The traps
are those of the design: a create that succeeds after a sleep, deadlocks, damaged checkpoints.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from atoll.diloco.round import objects
from tests.sim.round.stage import Stage
from tests.sim.round.world import Stored

LOSSY = {"is_lossy_up": True, "is_lossy_down": True}


def check(condition: bool, stage: Stage, text: str) -> None:
    if not condition:
        stage.oracle.fail("directed", text)


def stand_in_sleeps_before_its_create(**broken: Any) -> Stage:
    """Trap b: the owner wakes, all goes on, the mean is swept, and then the stand-in creates it."""
    stage = Stage(world=4, quorum=2, cells=(8,), every=2, keep=1, block=2, **LOSSY, **broken)
    stage.start_all()
    stage.run_to(1)
    # In round 1 rank 0 owns shard 3. It sleeps, and rank 1, the next, stands in and sleeps longer.
    stage.on(0, "create", "mean/00000001/00003", stage.freeze(40))
    stage.on(1, "create", "mean/00000001/00003", stage.freeze(400))
    stage.run_to(12)
    check(not stage.keys("mean/00000001"), stage, "round 1 is not swept")
    slept = stage.run_.replicas[1]
    stage.run_until(lambda: slept.machine.round >= stage.rounds - 1 and stage.rounds > 30)
    check(stage.oracle.stats["strays"] >= 1, stage, "the stand-in did not take another outcome")
    stage.run_until(lambda: 1 in stage.members(stage.rounds - 1), what="rank 1 is back")
    return stage


def stand_in_wakes_at_any_time(**broken: Any) -> Stage:
    """Trap b, with sleeps of all lengths: only its own round may be swept when it wakes."""
    strays = 0
    for seconds in range(8, 60):
        stage = Stage(world=4, quorum=2, cells=(8,), every=2, keep=1, **LOSSY, **broken)
        stage.start_all()
        stage.run_to(1)
        stage.on(0, "create", "mean/00000001/00003", stage.freeze(6))
        stage.on(1, "create", "mean/00000001/00003", stage.freeze(seconds))
        stage.run_for(seconds + 12)
        stage.run_until(lambda s=stage: 1 in s.members(s.rounds - 1), what="rank 1 is back")
        strays += stage.oracle.stats["strays"]
    check(strays > 0, stage, "nobody took another outcome")
    return stage


def decided_alone_and_slept(**broken: Any) -> Stage:
    """Trap c: one decides, sleeps until that manifest is folded, and creates it again."""
    stage = Stage(world=3, quorum=1, cells=(6,), every=2, keep=1, block=2, **broken)
    stage.start_all()
    stage.run_to(2)
    for rank in (1, 2):
        stage.on(rank, "put", "upload/00000002", stage.freeze(12))
    stage.on(0, "create", "manifest/00000002", stage.freeze(400))
    stage.run_until(
        lambda: stage.rounds > 12 and objects.manifest_key(2) not in stage.world.objects,
        what="round 2 is folded",
    )
    stage.run_for(400)
    check(stage.oracle.stats["strays"] == 1, stage, "it did not take its own round")
    stage.run_until(lambda: 0 in stage.members(stage.rounds - 1), what="rank 0 is back")
    return stage


def unreadable_for_one_reader(**broken: Any) -> Stage:
    """Trap d: an upload of a direct round cannot be read, and its author dies."""
    stage = Stage(world=2, quorum=1, cells=(4,), has_direct=True, **broken)
    replicas = stage.start_all()
    stage.run_to(2)
    stage.on(
        1,
        "get",
        "manifest/00000002",
        lambda task: [stage.damage(key) for key in stage.keys("upload/00000002/00001")],
    )
    stage.run_to(3)
    replicas[1].kill()
    stage.start(1)
    stage.run_until(lambda: stage.rounds > 6 and len(stage.members(stage.rounds - 1)) == 2)
    return stage


def alone_and_its_upload_is_damaged(**broken: Any) -> Stage:
    """Alone in a direct round, with an upload that nobody can read: the receipt must say so."""
    stage = Stage(world=2, quorum=1, cells=(4,), has_direct=True, every=50, **broken)
    stage.start(0)
    stage.run_to(2)
    stage.on(0, "put", "upload/00000002", _damage_upload(stage, 2, 0), when="done")
    stage.run_to(4)
    for replica in stage.alive():
        replica.kill()
    stage.start_all()
    stage.run_to(7, within=500)
    return stage


def quorum_of_two_one_damaged(**broken: Any) -> Stage:
    """Trap e: the one whose upload was damaged needs the state that only the other has."""
    stage = Stage(world=2, quorum=2, cells=(4,), has_direct=True, every=50, **broken)
    stage.start_all()
    stage.run_to(2)
    stage.on(0, "create", "manifest/00000002", _damage_upload(stage, 2, 1))
    stage.run_to(5, within=800)
    return stage


def _damage_upload(stage: Stage, round: int, rank: int) -> Any:
    def act(_: Any) -> None:
        for key in stage.keys(f"upload/{round:08d}/{rank:05d}"):
            stage.damage(key)

    return act


def waiting_replica_holds_the_state(**broken: Any) -> Stage:
    """R11: means of the last round are damaged; the one that has them waits for a quorum."""
    stage = Stage(world=3, quorum=2, cells=(6,), every=50, timeout_s=200.0, **broken)
    replicas = stage.start_all()
    stage.run_to(3)
    stage.run_until(lambda: all(each.machine.round == 3 for each in replicas))
    for key in stage.keys("mean/00000002"):
        stage.damage(key)
    for rank in (1, 2):
        replicas[rank].kill()
        stage.start(rank)
    stage.run_to(6, within=800)
    return stage


def waits_for_a_mean_that_is_damaged(**broken: Any) -> Stage:
    """R11: one waits for a mean that only the others could read; they wait for it, and save."""
    stage = Stage(world=3, quorum=3, cells=(6,), every=3, keep=50, timeout_s=600.0, **broken)
    stage.start_all()
    stage.run_to(3)
    stage.on(2, "get", "mean/00000003", _damage_all_means(stage, 3))
    # It sleeps just before it reads, until the others have read them.
    stage.on(2, "get", "mean/00000003", stage.freeze(20))
    stage.run_until(lambda: stage.rounds > 8 and 2 in stage.members(stage.rounds - 1), 500)
    return stage


def _damage_all_means(stage: Stage, round: int) -> Any:
    def act(_: Any) -> None:
        def damage() -> None:
            for key in stage.keys(f"mean/{round:08d}"):
                stage.damage(key)

        stage.world.at(stage.world.now + 10, damage)

    return act


def newest_checkpoint_damaged(**broken: Any) -> Stage:
    """Trap f: the newest checkpoint is damaged and all are killed: the older one covers."""
    stage = Stage(world=3, quorum=2, cells=(6,), every=3, keep=1, block=2, **broken)
    stage.start_all()
    stage.run_to(13)
    stage.damage(stage.keys("checkpoint/")[-1])
    for replica in stage.alive():
        replica.kill()
    stage.start_all()
    stage.run_to(16, within=500)
    return stage


def mean_swept_and_made_again(**broken: Any) -> Stage:
    """Process 1 reads a mean that was swept and made again while it slept."""
    foreign = 0
    for tenths in range(-4, 6):
        stage = _sleep_while_a_mean_is_made_again(tenths / 10, **broken)
        foreign += sum("does not belong to" in text for text in stage.oracle.logs)
    check(foreign > 0, stage, "process 1 never read the second mean")
    return stage


def _sleep_while_a_mean_is_made_again(more_s: float, **broken: Any) -> Stage:
    stage = Stage(world=4, quorum=2, cells=(8,), every=2, keep=1, block=2, **LOSSY, **broken)
    for rank in range(4):
        stage.start(rank, 2 if rank == 3 else 1)
    stage.run_to(1)
    # As in trap b: rank 0 owns shard 3 and sleeps, and rank 1 stands in and sleeps longer. Its mean
    # excludes rank 2, whose upload it could not read.
    owner, stand_in, key = 0, 1, "mean/00000001/00003"
    woke: list[float] = []

    def sleep_long(task: Any) -> None:
        woke.append(stage.world.now + 300)
        stage.world.freeze(task, 300)

    stage.on(owner, "create", key, stage.freeze(40))
    stage.on(stand_in, "create", key, sleep_long)
    reads: list[str] = []

    def spoil(_: Any) -> None:
        reads.append("")
        if len(reads) == 2:  # the first was for its own mean
            _damage_once(stage, "upload/00000001/00002")

    stage.on(stand_in, "get", "upload/00000001/00002", spoil, times=2)
    # Process 0 of rank 3 reads the first mean, process 1 sleeps until there is another one.
    slept: list[float] = []

    def sleep_once(task: Any) -> None:
        if not slept and woke and stage.keys(key):
            slept.append(stage.world.now)
            stage.world.freeze(task, woke[0] - stage.world.now + more_s)

    stage.on(3, "get", key, sleep_once, process=1, times=1000)
    stage.run_until(lambda: stage.rounds > 40 and 3 in stage.members(stage.rounds - 1))
    return stage


def _damage_once(stage: Stage, prefix: str) -> None:
    for key in stage.keys(prefix):
        stage.damage(key, reads=1)


def load_fails_for_one_process(**broken: Any) -> Stage:
    """A load that fails for process 1 fails for the replica, and is done again."""
    stage = Stage(world=2, quorum=1, cells=(6,), every=2, **broken)
    stage.start(0, 2)
    stage.run_to(4)
    stage.on(1, "get", "state/", stage.cut(4), process=1)
    late = stage.start(1, 3)
    stage.run_until(lambda: stage.oracle.members[late.nonce] > 2)
    return stage


def rejoin_fails_halfway(**broken: Any) -> Stage:
    """A replica whose upload was damaged joins again, and the load fails for process 1 alone."""
    stage = Stage(world=2, quorum=2, cells=(6,), has_direct=True, every=2, **broken)
    stage.start(0)
    damaged = stage.start(1, 2)
    stage.run_to(3)

    def damage(_: Any) -> None:
        for key in stage.keys("part/00000003/00001"):
            stage.damage(key)

    stage.on(0, "create", "manifest/00000003", damage)
    stage.on(1, "get", "state/", stage.cut(4), process=1)
    stage.run_until(lambda: stage.oracle.members[damaged.nonce] > 5, within=300)
    check(stage.world.counts.get("failed requests", 0) > 0, stage, "no load has failed")
    return stage


def process_one_is_told_to_leave(**broken: Any) -> Stage:
    """It is told while process 0 waits for a quorum: all leave, soon."""
    stage = Stage(world=2, quorum=2, cells=(6,), timeout_s=600.0, **broken)
    replicas = stage.start_all(2)
    stage.run_to(2)
    replicas[1].kill()
    stage.run_for(30)
    task = replicas[0].group.tasks[1]
    task.is_leaving = True
    stage.world.wake(task)
    stage.run_until(lambda: replicas[0].has_left, within=30, what="rank 0 has left")
    check(bool(stage.keys("upload/ended/one/00000.left")), stage, "it left no mark")
    return stage


def killed_before_its_part(**broken: Any) -> Stage:
    """Process 1 dies before its part is stored: there is no upload, and the others go on."""
    stage = Stage(world=3, quorum=2, cells=(6,), **broken)
    stage.start_all(2)
    stage.run_to(2)
    stage.on(1, "put", "part/00000002", stage.kill, process=1)
    stage.run_to(4, within=200)
    check(not stage.keys("upload/00000002/00001"), stage, "there is an upload without its part")
    check(1 not in stage.members(2), stage, "half a replica is a member")
    stage.start(1, 1)
    stage.run_until(lambda: 1 in stage.members(stage.rounds - 1))
    return stage


def outlives_its_replica(**broken: Any) -> Stage:
    """Process 0 dies while process 1 sleeps before a write; the replica is started again."""
    stage = Stage(world=3, quorum=2, cells=(9,), **LOSSY, **broken)
    replicas = stage.start_all(2)
    stage.run_to(2)
    stage.on(1, "create", "mean/00000002", stage.freeze(60), process=1)
    stage.run_until(lambda: stage.world.counts.get("freezes", 0) > 0)
    stage.world.kill(replicas[1].group.tasks[0])
    stage.start(1, 3)
    stage.run_until(lambda: stage.rounds > 8 and 1 in stage.members(stage.rounds - 1))
    stage.run_for(80)
    check(all(task.is_dead for task in replicas[1].group.tasks), stage, "process 1 goes on")
    return stage


# -- Defects of the code before this protocol -----------------------------------------------------


def answer_to_checkpoint_is_lost(**broken: Any) -> Stage:
    """The create of a checkpoint happens, its answer is lost, and all are started again."""
    stage = Stage(world=2, quorum=1, cells=(4,), every=2, **broken)
    stage.start(0)

    def lose(task: Any) -> None:
        task.cut_until = stage.world.now + 0.5

    stage.on(0, "create", "checkpoint/", lambda task: stage.world.at(0, lambda: None))
    stage.on(0, "create", "checkpoint/", lose, when="done", times=3)
    stage.run_to(4)
    check(len(stage.keys("state/")) >= 1, stage, "the pieces are gone")
    for replica in stage.alive():
        replica.kill()
    stage.start_all()
    stage.run_to(8)
    return stage


def one_damaged_answer(**broken: Any) -> Stage:
    """One GET of a mean answers with damaged bytes: it is read again, and nothing is replaced."""
    stage = Stage(world=3, quorum=2, cells=(6,), **broken)
    stage.start_all()
    stage.run_to(2)
    for rank in range(3):
        stage.on(rank, "get", "mean/00000002", lambda _: _damage_once(stage, "mean/00000002"))
    stage.run_to(5, within=100)
    check(stage.members(4) == [0, 1, 2], stage, "not all are members")
    return stage


def one_damaged_answer_for_one_process(**broken: Any) -> Stage:
    """A mean counts when every process has it: process 1 reads damaged bytes at first."""
    stage = Stage(world=3, quorum=2, cells=(9,), **broken)
    stage.start_all(3)
    stage.run_to(1)
    for round in range(1, 6):
        mean = f"mean/{round:08d}"
        stage.on(0, "get", mean, lambda _, m=mean: _damage_once(stage, m), process=1)
    stage.run_to(8, within=150)
    return stage


def mean_damaged_for_good(**broken: Any) -> Stage:
    """A mean that no checkpoint covers is damaged, and all are killed: an error that names it."""
    return _lose_committed("mean/", "mean/00000006", **broken)


def manifest_deleted(**broken: Any) -> Stage:
    """A manifest that no checkpoint covers is deleted, and all are killed: an error names it."""
    return _lose_committed("manifest/", "manifest/00000006 is missing", **broken)


def rubbish_in_a_later_round(**broken: Any) -> Stage:
    """What has no header is no upload: nobody takes the round for one that was decided."""
    stage = Stage(world=3, quorum=2, cells=(6,), **broken)
    stage.start_all()
    stage.run_to(3)
    key = objects.upload_key(50, 1, "a" * 16, 1)
    stage.world.objects[key] = Stored(SimpleNamespace(header=b"rubbish"), stage.world.now)
    stage.run_to(8, within=100)
    check(stage.members(7) == [0, 1, 2], stage, "not all are members")
    check(not stage.oracle.stats["dropped"], stage, "work was dropped")
    return stage


def uploads_are_left_of_an_earlier_run(**broken: Any) -> Stage:
    """All else was deleted: whoever begins anew names what is there, and trains not in vain."""
    settings: Any = {"world": 3, "quorum": 2, "cells": (6,), **broken}
    earlier, stage = Stage(**settings), Stage(**settings)
    earlier.start_all()
    earlier.run_to(6)
    for key in earlier.keys("upload/00000005"):
        stage.world.objects[key] = earlier.world.objects[key]
    stage.start_all()
    stage.run_for(3 * stage.setup.timeout_s)
    named = [each for each in stage.oracle.errors if "manifest/00000000 is missing" in each]
    check(bool(named) and "delete what is left" in named[0], stage, f"{stage.oracle.errors[:2]}")
    return stage


def _lose_committed(prefix: str, text: str, **broken: Any) -> Stage:
    stage = Stage(world=3, quorum=2, cells=(6,), every=5, **broken)
    replicas = stage.start_all()
    stage.run_to(8)
    stage.run_until(lambda: all(each.machine.round == 8 for each in replicas))
    for replica in replicas:
        replica.kill()
    key = stage.keys(prefix + "00000006")[0]
    if prefix == "mean/":
        stage.damage(key)
    else:
        del stage.world.objects[key]
    stage.start_all()
    stage.run_for(3 * stage.setup.timeout_s)
    check(stage.rounds == 8, stage, "a committed round was passed over")
    named = [error for error in stage.oracle.errors if text in error]
    check(bool(named), stage, f"no error names it, but {stage.oracle.errors[:3]}")
    return stage


def call_fails_after_its_commit(**broken: Any) -> Stage:
    """The manifest names the upload, the call fails, and the script trains on."""
    stage = Stage(world=3, quorum=3, cells=(6,), **LOSSY, **broken)
    stage.start_all()
    for round in range(1, 6):
        stage.on(0, "create", f"manifest/{round:08d}", stage.cut(15), when="done")
        stage.on(1, "get", f"mean/{round:08d}", stage.cut(15))
    stage.run_to(12)
    check(stage.members(11) == [0, 1, 2], stage, "not all are members")
    return stage


def late_work_is_carried(**broken: Any) -> Stage:
    """An upload that is late goes with the next one, with exact codecs, too: nothing is dropped."""
    stage = Stage(world=3, quorum=2, cells=(6,), **broken)
    stage.start_all()
    stage.run_to(3)
    stage.on(2, "put", "upload/00000003", stage.freeze(12))
    stage.run_until(lambda: stage.oracle.stats["late"] == 1, what="one was late")
    stage.run_until(lambda: 2 in stage.members(stage.rounds - 1))
    check(not stage.oracle.stats["dropped"], stage, "late work was dropped")
    return stage


def owners_die_before_their_means(**broken: Any) -> Stage:
    """All owners of round 0 die after the manifest, before any mean."""
    stage = Stage(world=3, quorum=2, cells=(6,), **broken)
    for replica in stage.start_all():
        stage.on(replica.rank, "create", "mean/00000000", stage.kill)
    stage.run_until(lambda: not stage.alive(), what="all are dead")
    check(not stage.keys("mean/"), stage, "there is a mean")
    stage.start_all()
    stage.run_to(3, within=300)
    check(stage.members(0) == [0, 1, 2], stage, "round 0 lost its members")
    return stage


def nobody_trained(**broken: Any) -> Stage:
    """Rounds in which nobody trained move nothing."""
    stage = Stage(world=2, quorum=2, cells=(4,), training=0.0, **broken)
    stage.start_all()
    stage.run_to(4)
    states = {
        tuple(sorted(stage.oracle.truth[chain].items()))
        for chain in stage.oracle.canonical.values()
    }
    check(len(states) == 1, stage, "the parameters moved")
    check(not stage.keys("mean/"), stage, "there are means")
    return stage


def grace_that_is_too_short(**broken: Any) -> Stage:
    """A live rank that is slower than the grace is late a few times, not for ever."""
    stage = Stage(world=3, quorum=2, cells=(6,), period_s=3.0, **broken)
    stage.start_all()
    stage.run_to(10)
    stage.run_.slowness[2] = 9.0  # 27 s, and the grace that was learned is 3
    stage.run_for(900)
    late = stage.oracle.stats["late"]
    late += stage.oracle.stats["dropped"]
    check(late <= 8, stage, f"it was late {late} times")
    check(2 in stage.members(stage.rounds - 1), stage, "it is not in")
    return stage


def leaver_hands_in_all_fragments(**broken: Any) -> Stage:
    """It is told to go between two rounds: the rounds of all fragments have what it trained."""
    stage = Stage(world=3, quorum=2, cells=(6, 5, 4), **broken)
    replicas = stage.start_all()
    stage.run_to(4)
    replicas[1].leave()
    stage.run_until(lambda: replicas[1].has_left, within=60, what="rank 1 has left")
    stage.run_to(stage.rounds + 4)
    check(stage.oracle.stats["rests"] == 2, stage, "the other fragments are lost")
    return stage


def leaver_is_replaced_at_once(**broken: Any) -> Stage:
    """A new process of its rank comes before the rounds of its other fragments."""
    stage = Stage(world=3, quorum=2, cells=(6, 5, 4), **broken)
    replicas = stage.start_all()
    stage.run_to(4)
    replicas[1].leave()
    stage.run_until(lambda: replicas[1].has_left, within=60, what="rank 1 has left")
    new = stage.start(1)
    stage.run_until(lambda: stage.oracle.members[new.nonce] > 1, within=200)
    check(stage.oracle.stats["rests"] == 2, stage, "the other fragments are lost")
    return stage


def joiner_knows_who_has_left(**broken: Any) -> Stage:
    """All others die after one has left: those who come load what it brings from a checkpoint."""
    stage = Stage(world=3, quorum=2, cells=(6, 5, 4), every=1, **broken)
    replicas = stage.start_all()
    stage.run_to(3)
    replicas[1].leave()
    stage.run_until(lambda: bool(stage.oracle.rests), what="the first of its rows is committed")
    stage.run_for(1.0)
    for replica in stage.alive():
        replica.kill()
    for rank in (0, 2):
        stage.start(rank)
    stage.run_to(stage.rounds + 4)
    check(stage.oracle.stats["rests"] == 2, stage, "the other fragments are lost")
    return stage


def all_leave_and_the_run_goes_on(**broken: Any) -> Stage:
    """Nobody is there to decide the round: whoever comes back commits what they handed in."""
    stage = Stage(world=3, quorum=2, cells=(6, 5), **broken)
    replicas = stage.start_all()
    stage.run_to(4)
    for replica in replicas:
        for task in replica.group.tasks:
            task.is_leaving = True
            stage.world.wake(task)
    stage.run_until(lambda: not stage.alive(), within=60, what="all have left")
    handed = [
        key for key, body in stage.oracle.uploads.items() if b'"is_leaving":true' in body.header
    ]
    handed = [key for key in handed if "+" not in key]
    check(len(handed) == 3, stage, f"not all have handed in: {handed}")
    stage.start_all()
    stage.run_to(7, within=200)
    committed = [key for key in handed if key in stage.oracle.committed_uploads]
    check(committed == handed, stage, f"only {committed} of {handed} counts")
    vain = stage.oracle.stats["late"] + stage.oracle.stats["dropped"]
    check(not vain, stage, "somebody trained before it was committed")
    return stage


def leaves_and_comes_back(**broken: Any) -> Stage:
    """One leaves and a new process of its rank uploads, before the others come to the round."""
    stage = Stage(world=3, quorum=2, cells=(6, 5), **broken)
    replicas = stage.start_all()
    stage.run_to(4)
    for rank in (0, 2):
        stage.on(rank, "put", "upload/00000004", stage.freeze(25))
    replicas[1].leave()
    stage.run_until(lambda: replicas[1].has_left, within=60, what="rank 1 has left")
    (handed,) = stage.keys("upload/00000004/00001")
    stage.start(1)
    stage.run_to(8, within=300)
    check(handed in stage.oracle.committed_uploads, stage, f"{handed} is lost")
    return stage


def told_to_leave_while_its_round_is_decided(**broken: Any) -> Stage:
    """Its upload is in the round: that is taken, and the next one is brought the rest."""
    stage = Stage(world=3, quorum=2, cells=(6, 5, 4), **broken)
    replicas = stage.start_all()
    stage.run_to(3)

    def leave(task: Any) -> None:
        for each in replicas[2].group.tasks:
            each.is_leaving = True
            stage.world.wake(each)

    stage.on(0, "create", "manifest/00000003", leave, when="done")
    stage.run_until(lambda: replicas[2].has_left, within=90, what="rank 2 has left")
    stage.run_to(stage.rounds + 4)
    check(2 in stage.members(3), stage, "rank 2 is not in round 3")
    check(stage.oracle.stats["rests"] >= 1, stage, "the other fragments are lost")
    return stage


def told_to_leave_and_sleeps_through_two_rounds(**broken: Any) -> Stage:
    """What it hands in is of a round that is long over: it takes those, and goes with the next."""
    stage = Stage(world=3, quorum=2, cells=(6, 5, 4), **broken)
    replicas = stage.start_all()
    stage.run_to(3)
    replicas[2].leave()
    stage.on(2, "put", "upload/00000003", stage.freeze(16))
    stage.run_until(lambda: replicas[2].has_left, within=90, what="rank 2 has left")
    check(stage.rounds >= 5, stage, "it did not sleep through two rounds")
    stage.run_to(stage.rounds + 4)
    check(stage.oracle.stats["rests"] >= 1, stage, "what it handed in is lost")
    return stage


def resumed_in_another_world_after_a_leave(**broken: Any) -> Stage:
    """Nobody of the world that it left is there for the rounds of its other fragments."""
    stage = Stage(world=3, quorum=2, cells=(6, 5, 4), every=1, **broken)
    replicas = stage.start_all()
    stage.run_to(3)
    replicas[1].leave()
    stage.run_until(lambda: bool(stage.oracle.rests), what="the first of its rows is committed")
    stage.run_for(1.0)
    for replica in stage.alive():
        replica.kill()
    stage.setup.world = 2
    stage.start_all()
    stage.run_to(stage.rounds + 4)
    check(stage.oracle.stats["rests"] == 2, stage, "the other fragments are lost")
    check(len(stage.members(stage.rounds - 1)) == 2, stage, "the new world is not in")
    return stage


def decided_in_the_instant_of_the_last_upload(**broken: Any) -> Stage:
    """Two have seen the upload before the last, and decide when its replica has gone."""
    stage = Stage(world=3, quorum=2, cells=(6, 5, 4), **broken)
    replicas = stage.start_all()
    stage.run_to(3)
    stage.on(0, "create", "manifest/00000003", stage.freeze(40))

    def leave(task: Any) -> None:
        stage.world.freeze(task, 30)
        replicas[2].leave()

    stage.on(1, "create", "manifest/00000003", leave)
    stage.run_until(lambda: replicas[2].has_left, within=20, what="rank 2 has left")
    check(stage.rounds == 3, stage, "round 3 was decided before")
    stage.run_to(stage.rounds + 4)
    check(stage.oracle.stats["carried over"] == 1, stage, "the other fragments are lost")
    check(stage.oracle.stats["rests"] == 1, stage, "the last fragment is lost")
    return stage


def leaver_uploads_while_its_round_is_decided(**broken: Any) -> Stage:
    """Those who decide have looked before: it counts in the next round, as late work does."""
    stage = Stage(world=3, quorum=2, cells=(6,), **broken)
    replicas = stage.start_all()
    stage.run_to(4)
    stage.on(2, "put", "upload/00000004", stage.freeze(14))
    for rank in (0, 1):
        stage.on(rank, "create", "manifest/00000004", stage.freeze(15))
    replicas[2].leave()
    stage.run_until(lambda: replicas[2].has_left, within=60, what="rank 2 has left")
    stage.run_to(7)
    check(2 not in stage.members(4), stage, "its upload was seen")
    check(2 in stage.members(5), stage, "what it handed in is lost")
    return stage


def dropped_by_prepare(**broken: Any) -> Stage:
    """A replica that is far slower than the rounds are kept comes to be a member all the same."""
    stage = Stage(world=3, quorum=2, cells=(6,), every=2, keep=1, period_s=2.0, **broken)
    slow = stage.start_all()[2]
    stage.run_to(10)
    stage.run_.slowness[2] = 12.0  # of its training; its requests take as long as any
    stage.run_for(100)
    before = stage.oracle.members[slow.nonce]
    stage.run_for(900)
    check(stage.oracle.members[slow.nonce] > before + 5, stage, "it stays behind")
    return stage


def manifest_damaged_once(**broken: Any) -> Stage:
    """One GET of a manifest answers with damaged bytes: it is read again."""
    stage = Stage(world=3, quorum=2, cells=(6,), **broken)
    stage.start_all()
    stage.run_to(2)
    key = objects.manifest_key(2)
    stage.on(0, "create", key, lambda _: stage.damage(key, reads=1), when="done")
    stage.run_to(4, within=100)
    check(not stage.world.objects[key].damage, stage, "nobody has read it")
    check(not stage.oracle.errors, stage, f"a call has failed: {stage.oracle.errors}")
    return stage


def manifest_damaged_for_good(**broken: Any) -> Stage:
    """A manifest that no checkpoint covers is damaged: the error says what to do."""
    stage = Stage(world=3, quorum=2, cells=(6,), every=50, **broken)
    replicas = stage.start_all()
    stage.run_to(3)
    for replica in replicas:
        replica.kill()
    stage.damage(objects.manifest_key(1))
    stage.start_all()
    stage.run_for(3 * stage.setup.timeout_s)
    named = [each for each in stage.oracle.errors if "manifest/00000001 has committed" in each]
    check(bool(named) and "Restore it" in named[0], stage, f"{stage.oracle.errors[:2]}")
    return stage


DIRECTED = {
    each.__name__: each
    for each in (
        stand_in_sleeps_before_its_create,
        stand_in_wakes_at_any_time,
        decided_alone_and_slept,
        unreadable_for_one_reader,
        alone_and_its_upload_is_damaged,
        quorum_of_two_one_damaged,
        waiting_replica_holds_the_state,
        waits_for_a_mean_that_is_damaged,
        newest_checkpoint_damaged,
        mean_swept_and_made_again,
        load_fails_for_one_process,
        rejoin_fails_halfway,
        process_one_is_told_to_leave,
        killed_before_its_part,
        outlives_its_replica,
        answer_to_checkpoint_is_lost,
        one_damaged_answer,
        one_damaged_answer_for_one_process,
        mean_damaged_for_good,
        manifest_deleted,
        rubbish_in_a_later_round,
        uploads_are_left_of_an_earlier_run,
        call_fails_after_its_commit,
        late_work_is_carried,
        owners_die_before_their_means,
        nobody_trained,
        grace_that_is_too_short,
        leaver_hands_in_all_fragments,
        leaver_is_replaced_at_once,
        joiner_knows_who_has_left,
        told_to_leave_and_sleeps_through_two_rounds,
        resumed_in_another_world_after_a_leave,
        decided_in_the_instant_of_the_last_upload,
        leaver_uploads_while_its_round_is_decided,
        all_leave_and_the_run_goes_on,
        leaves_and_comes_back,
        told_to_leave_while_its_round_is_decided,
        dropped_by_prepare,
        manifest_damaged_once,
        manifest_damaged_for_good,
    )
}
