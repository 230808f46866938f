"""Scaling, cancelling, deleting, slots and a full disk, on real processes and with restarts."""

from __future__ import annotations

from pathlib import Path

from tests.support.control_plane import ControlPlane, serving, wait_for
from tests.support.small_disk import fill, small_disk

from atoll.core.status import Training

FOREVER = "exec sleep 1000"


def phases(training: Training) -> list[str]:
    return [r.phase for r in training.status.ranks]


def running(training: Training) -> list[int]:
    return [r.rank for r in training.status.ranks if r.is_alive]


def test_scaling_up_down_and_up_across_restarts_of_the_control_plane(
    plane: ControlPlane, tmp_path: Path
) -> None:
    script = f"""echo $RANK.$ATOLL_ATTEMPT >> {tmp_path}/ran
        while [ ! -e {tmp_path}/end ]; do sleep 0.05; done"""
    name = plane.create(script, 2, min=1)
    plane.until_ready(name, 2)
    for target, starts in ((4, 4), (1, 4), (3, 6)):
        plane.ask(name, target=target)
        plane.restart()
        plane.until(name, lambda t, n=target: running(t) == list(range(n)))
        # A rank that was started has not yet said so.
        plane.until(name, lambda _, n=starts: len((tmp_path / "ran").read_text().split()) == n)
    first = plane.get(name).status.ranks[0]
    assert (first.attempt, first.restarts) == (0, 0)  # nobody who stayed was disturbed
    (tmp_path / "end").touch()
    training = plane.until_over(name)
    assert training.status.phase == "succeeded"
    assert {e.rank: e.exit_code for e in training.status.rank_exits} == {0: 0, 1: 0, 2: 0, 3: 143}
    lines = (tmp_path / "ran").read_text().split()
    assert sorted(lines) == ["0.0", "1.0", "1.1", "2.0", "2.1", "3.0"]


def test_rank_wanted_again_while_it_is_stopping_comes_back(plane: ControlPlane) -> None:
    script = "trap 'sleep 0.3; exit 0' TERM; echo up; while :; do sleep 0.02; done"
    name = plane.create(script, 2, min=1)
    wait_for(lambda: len(plane.log_lines(name)) == 2)
    plane.ask(name, target=1)
    plane.until(name, lambda t: "stopping" in t.status.ranks[-1].message)
    plane.ask(name, target=2)
    training = plane.until(name, lambda t: [r.attempt for r in t.status.ranks] == [0, 1])
    assert phases(plane.until_ready(name, 2)) == ["Running", "Running"]
    assert training.status.ranks[1].restarts == 0  # we stopped it: its budget is whole


def test_cancel_while_starting(plane: ControlPlane, tmp_path: Path) -> None:
    names = [plane.create(f"echo {n} >> {tmp_path}/ran; {FOREVER}", 3) for n in range(5)]
    for name in names:
        plane.ask(name, cancel=True)
    for number, name in enumerate(names):
        training = plane.until_over(name)
        assert training.status.phase == "cancelled"
        assert training.status.root_cause is None
        exits = training.status.rank_exits
        assert all(e.termination_reason == "Stopped" and not e.collateral for e in exits)
        ran = (tmp_path / "ran").read_text().split() if (tmp_path / "ran").exists() else []
        assert ran.count(str(number)) <= len(exits)  # whatever ran has an exit
        plane.until_released(name)
    wait_for(lambda: not plane.left())


def test_delete_while_stopping_removes_the_record_only_when_all_is_gone(
    plane: ControlPlane,
) -> None:
    script = "trap '' TERM; echo up; while :; do sleep 0.02; done"
    name = plane.create(script, 2, stop_grace_s=0.5)
    wait_for(lambda: len(plane.log_lines(name)) == 2)
    training = plane.ask(name, cancel=True)
    plane.until(name, lambda t: t.status.reason == "Cancelling")
    plane.ask(name, delete=True)
    plane.until_removed(name)
    assert not plane.left()
    assert not plane.directory(training).exists()


def test_name_of_a_deleted_training_can_be_used_again(plane: ControlPlane) -> None:
    for code in (3, 0):
        name = plane.create(f"exit {code}", name="again")
        training = plane.until_over(name)
        assert [e.exit_code for e in training.status.rank_exits] == [code]
        plane.ask(name, delete=True)
        plane.until_removed(name)


def test_start_gate_waits_for_all_then_takes_the_minimum_after_the_grace(tmp_path: Path) -> None:
    with serving(tmp_path / "state", slots=4) as plane:
        first = plane.create(FOREVER, 2)
        plane.until_ready(first, 2)
        name = plane.create(FOREVER, 4, min=2, start_grace_s=1.0)
        waiting = plane.until(name, lambda t: t.status.phase == "pending")
        assert not running(waiting)
        assert "start gate: capacity for 2 of 4" in waiting.status.ranks[0].message
        assert "2 of 4 slots" in waiting.status.ranks[0].message
        small = plane.until(name, lambda t: running(t) == [0, 1])
        assert small.status.started_at is not None
        assert small.status.started_at >= small.created_at + 1.0
        assert small.status.phase == "ready"
        assert "no capacity" in small.status.ranks[2].message
        plane.ask(first, cancel=True)
        full = plane.until(name, lambda t: running(t) == [0, 1, 2, 3])
        before = [(r.attempt, r.started_at) for r in small.status.ranks[:2]]
        assert [(r.attempt, r.started_at) for r in full.status.ranks[:2]] == before


def test_start_gate_opens_for_all_together_when_room_comes_in_time(tmp_path: Path) -> None:
    with serving(tmp_path / "state", slots=4) as plane:
        first = plane.create(FOREVER, 2)
        plane.until_ready(first, 2)
        name = plane.create(FOREVER, 4, min=2, start_grace_s=600)
        plane.until(name, lambda t: t.status.phase == "pending")
        plane.restart()  # what waits is not forgotten
        assert not running(plane.get(name))
        plane.ask(first, cancel=True)
        plane.until(name, lambda t: running(t) == [0, 1, 2, 3])


def test_room_of_a_rank_scaled_away_is_free_only_when_it_is_gone(tmp_path: Path) -> None:
    with serving(tmp_path / "state", slots=2) as plane:
        script = f"""trap 'touch {tmp_path}/told' TERM
            while [ ! -e {tmp_path}/leave ]; do sleep 0.02; done"""
        first = plane.create(script, 2, min=1, stop_grace_s=600)
        plane.until_ready(first, 2)
        second = plane.create(FOREVER, 1, start_grace_s=0)
        plane.ask(first, target=1)
        wait_for((tmp_path / "told").exists)
        plane.ask(second, target=2)  # so that it is looked at again
        waiting = plane.until(second, lambda t: t.status.observed_generation == 2)
        assert "capacity for 0 of 2" in waiting.status.ranks[0].message
        (tmp_path / "leave").touch()
        plane.until(second, lambda t: t.status.world.ready >= 1)


def test_finished_trainings_hold_no_slots_after_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path / "state", slots=2) as plane:
        for _ in range(3):
            name = plane.create("exit 0", 2)
            assert plane.until_over(name).status.phase == "succeeded"
            plane.restart()


def test_full_disk_loses_no_exit_and_everything_goes_on_when_there_is_space(
    tmp_path: Path,
) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "size=4m"), serving(disk / "state") as plane:
        script = f"""echo up; while [ ! -e {tmp_path}/end ]; do sleep 0.02; done
            seq 100000; exit $((RANK + 1))"""
        name = plane.create(script, 3)
        wait_for(lambda: len(plane.log_lines(name)) == 3)
        training = plane.get(name)
        fill(disk)
        (tmp_path / "end").touch()
        wait_for(lambda: '"code"' in (plane.directory(training) / "journal").read_text())
        assert plane.call("ping") == plane.pid
        (disk / "filler").unlink()
        training = plane.until_over(name)
        codes = {e.rank: e.exit_code for e in training.status.rank_exits}
        assert codes[training.status.root_cause.rank] in (1, 2, 3)  # type: ignore[union-attr]
        assert all(codes[rank] in (rank + 1, 143) for rank in range(3))
        plane.until_released(name)
        wait_for(lambda: not plane.left())


def test_training_created_on_a_full_disk_is_refused_or_starts_later(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "size=4m"), serving(disk / "state", slots=1) as plane:
        first = plane.create(f"while [ ! -e {tmp_path}/end ]; do sleep 0.02; done")
        plane.until_ready(first, 1)
        name = plane.create(f"echo $ATOLL_ATTEMPT >> {tmp_path}/ran; exit 0")
        plane.until(name, lambda t: t.status.phase == "pending")
        fill(disk)
        (tmp_path / "end").touch()
        wait_for(lambda: not plane.left())
        assert not (tmp_path / "ran").exists()
        (disk / "filler").unlink()
        assert plane.until_over(name).status.phase == "succeeded"
        assert (tmp_path / "ran").read_text().split() == ["0"]


def test_disk_with_no_room_for_new_files_costs_the_log_not_the_rank(tmp_path: Path) -> None:
    with serving(tmp_path / "state", slots=1) as plane:
        first = plane.create(f"while [ ! -e {tmp_path}/end ]; do sleep 0.02; done")
        plane.until_ready(first, 1)
        training = plane.get(plane.create("echo hello; exit 6"))
        plane.directory(training).mkdir()
        (plane.directory(training) / "logs").touch()  # so that no log can be made there
        (tmp_path / "end").touch()
        ended = plane.until_over(training.name)
        (only,) = ended.status.rank_exits
        assert (only.exit_code, only.termination_reason) == (6, "Error")
