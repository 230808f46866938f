"""kill -9 at random moments while ranks start, run, fail and finish: nothing lost, nothing twice.

The seed is in the test's name, and printed; the same seed kills at the same points of the script,
though the machine decides how far things have come by then.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.control_plane import ControlPlane, PlaneDied, make_spec, serving, wait_for

from atoll.backends.local import processes
from atoll.core.spec import TrainingSpec
from atoll.core.status import Training

# name: script, options, what each rank ends with, phase, root cause, attempts a rank
MIX = {
    "fine": ("sleep 0.1; exit 0", {}, [0, 0, 0], "succeeded", None, [1, 1, 1]),
    "code": (
        "[ $RANK = 1 ] && all_began && exit 5; exec sleep 1000",
        {}, [143, 5, 143], "failed", 1, [1, 1, 1],
    ),
    "killed": (
        "[ $RANK = 2 ] && all_began && kill -9 $$; exec sleep 1000",
        {}, [143, 143, 137], "failed", 2, [1, 1, 1],
    ),
    "again": (
        "[ $RANK = 0 ] && [ $ATOLL_ATTEMPT -lt 2 ] && exit 3; sleep 0.1",
        {"max_restarts": 2}, [0, 0, 0], "succeeded", None, [3, 1, 1],
    ),
    "enough": (
        "[ $RANK = 2 ] && exit 9; sleep 0.2",
        {"min": 2}, [0, 0, 9], "succeeded", None, [1, 1, 1],
    ),
    "noisy": ("seq 20000; exit 0", {}, [0, 0, 0], "succeeded", None, [1, 1, 1]),
}  # fmt: skip


def specs(folder: Path) -> Iterator[TrainingSpec]:
    for name, (script, options, *_) in MIX.items():
        line = f"echo {name} $RANK $ATOLL_ATTEMPT >> {folder}/ran; "
        # Who fails stops the others, and must not do so before they have said that they ran.
        began = f"[ $(grep -c '^{name} ' {folder}/ran) -ge 3 ]"
        wait = f"all_began() {{ until {began}; do sleep 0.05; done; }}; "
        yield make_spec(wait + line + script, 3, name=name, stop_grace_s=20, **options)


def offer(plane: ControlPlane, spec: TrainingSpec) -> bool:
    """Whether it is known to be stored. Offered again it is still only one."""
    try:
        plane.call("create", spec=msgspec.to_builtins(spec), key=spec.name)
    except PlaneDied:
        return False
    return True


@pytest.mark.parametrize("seed", range(4))
def test_control_plane_killed_at_random_moments(tmp_path: Path, seed: int) -> None:
    kill_at_random(tmp_path, seed, kills=6)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 140))
@pytest.mark.timeout(600)
def test_control_plane_killed_at_many_more_random_moments(tmp_path: Path, seed: int) -> None:
    kill_at_random(tmp_path, seed, kills=15)


def kill_at_random(tmp_path: Path, seed: int, kills: int) -> None:
    print(f"seed {seed}")  # noqa: T201
    chance = random.Random(seed)
    to_offer = list(specs(tmp_path))
    chance.shuffle(to_offer)
    with serving(tmp_path / "state") as plane:
        for _ in range(kills):
            for spec in to_offer[: chance.randint(0, 2)]:
                if offer(plane, spec):
                    to_offer.remove(spec)
            time.sleep(chance.choice([0.0, 0.01, 0.03, 0.1, 0.3]) * chance.random())
            plane.restart()
        assert all(offer(plane, spec) for spec in to_offer)
        for name, (_, _, codes, phase, root, attempts) in MIX.items():
            training = plane.until_over(name)
            status = training.status
            assert [e.exit_code for e in status.rank_exits] == codes, (seed, name)
            assert status.phase == phase, (seed, name)
            assert (status.root_cause.rank if status.root_cause else None) == root, (seed, name)
            assert ran(tmp_path, name) == attempts_of(attempts), (seed, name)
            plane.until_released(name)
        wait_for(lambda: not plane.left())


def ran(folder: Path, name: str) -> Counter[tuple[int, int]]:
    return Counter(said(folder / "ran", name))


def said(path: Path, name: str) -> list[tuple[int, int]]:
    """Rank and attempt of each line that ranks of that training have written."""
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(rank), int(attempt)) for found, rank, attempt in lines if found == name]


def attempts_of(counts: list[int]) -> Counter[tuple[int, int]]:
    return Counter((rank, attempt) for rank, n in enumerate(counts) for attempt in range(n))


VICTIMS = {
    "supervisor": ("supervisor",),
    "watchdog": ("watchdog",),
    "both": ("watchdog", "supervisor"),
    "all three": ("watchdog", "supervisor", "plane"),
}


@pytest.mark.parametrize("who", VICTIMS)
def test_shim_killed_at_random_moments(tmp_path: Path, who: str) -> None:
    shims_killed_at_random(tmp_path, VICTIMS[who], seed=len(who), rounds=4)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("who", VICTIMS)
@pytest.mark.timeout(600)
def test_shim_killed_at_many_more_random_moments(tmp_path: Path, who: str, seed: int) -> None:
    shims_killed_at_random(tmp_path, VICTIMS[who], seed=seed, rounds=15)


def shims_killed_at_random(
    tmp_path: Path, victims: tuple[str, ...], *, seed: int, rounds: int
) -> None:
    """Each rank says when it is done, so that an exit code of 0 can be checked against it."""
    print(f"seed {seed}")  # noqa: T201
    chance = random.Random(seed)
    with serving(tmp_path / "state") as plane:
        for number in range(rounds):
            name = f"t{number}"
            script = f"""echo {name} $RANK $ATOLL_ATTEMPT >> {tmp_path}/ran
                setsid sleep 1000 & sleep 0.{chance.randint(0, 3)}
                echo {name} $RANK $ATOLL_ATTEMPT >> {tmp_path}/done"""
            plane.create(script, 4, name=name, max_restarts=number % 2)
            training = plane.get(name)
            pids_of = wait_for_supervision(plane, training)
            time.sleep(0.2 * chance.random())
            strike(plane, pids_of, victims)
            training = plane.until_over(name)
            plane.until_released(name)
            check(tmp_path, training, seed)
        wait_for(lambda: not plane.left())


def wait_for_supervision(plane: ControlPlane, training: Training) -> dict[str, int]:
    """Its pids as soon as there are any; none if it was too quick for us."""
    found: dict[str, int] = {}

    def is_there() -> bool:
        try:
            found["watchdog"], found["supervisor"] = plane.supervision_pids(training)
        except StopIteration:
            return plane.get(training.name).status.phase.is_terminal
        return True

    wait_for(is_there)
    return found


def strike(plane: ControlPlane, pids_of: dict[str, int], victims: tuple[str, ...]) -> None:
    for name in victims:
        if name == "plane":
            plane.kill()
        elif name in pids_of:
            processes.kill(pids_of[name], signal.SIGKILL)
    if "plane" in victims:
        plane.start()


def check(folder: Path, training: Training, seed: int) -> None:
    name, status = training.name, training.status
    assert max(ran(folder, name).values(), default=0) <= 1, (seed, name)
    finished = said(folder / "done", name)
    assert [e.rank for e in status.rank_exits] == list(range(4)), (seed, name)
    for ended in status.rank_exits:
        if ended.exit_code == 0:
            assert (ended.rank, status.ranks[ended.rank].attempt) in finished, (seed, name)
        elif not ended.collateral:
            assert ended.termination_reason == "SupervisorLost", (seed, name, ended)
    is_good = all(e.exit_code == 0 for e in status.rank_exits)
    assert status.phase == ("succeeded" if is_good else "failed"), (seed, name)


def test_ranks_run_on_while_there_is_no_control_plane(tmp_path: Path) -> None:
    with serving(tmp_path / "state") as plane:
        script = f"""echo up; while [ ! -e {tmp_path}/end ]; do sleep 0.02; done
            echo $RANK >> {tmp_path}/ended; [ $RANK = 0 ] || exit 4"""
        name = plane.create(script, 2, min=1)
        plane.until_ready(name, 2)
        plane.kill()
        (tmp_path / "end").touch()
        wait_for(lambda: len(read(tmp_path / "ended")) == 2)
        wait_for(lambda: not plane.left())  # the supervisor, too, has nothing left to do
        plane.start()
        training = plane.until_over(name)
        assert [e.exit_code for e in training.status.rank_exits] == [0, 4]


def read(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def test_rank_is_restarted_while_there_is_no_control_plane(tmp_path: Path) -> None:
    with serving(tmp_path / "state") as plane:
        script = f"""echo $$ >> {tmp_path}/pids
            while [ ! -e {tmp_path}/end ]; do sleep 0.02; done"""
        name = plane.create(script, max_restarts=1)
        plane.until_ready(name, 1)
        plane.kill()
        wait_for(lambda: read(tmp_path / "pids"))
        os.kill(int(read(tmp_path / "pids")[0]), signal.SIGKILL)
        wait_for(lambda: len(read(tmp_path / "pids")) == 2)
        (tmp_path / "end").touch()
        plane.start()
        training = plane.until_over(name)
        (ended,) = training.status.rank_exits
        assert (ended.exit_code, ended.restart_count) == (0, 1)
