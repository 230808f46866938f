"""GPUs of this machine as ranks find them, with ids that only the configuration knows."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

from tests.e2e.conftest import is_alive, until

HOLD = ("sh", "-c", "echo device $CUDA_VISIBLE_DEVICES; while [ ! -e go ]; do sleep 0.05; done")


def devices_of(atoll: Any, name: str) -> list[str]:
    return re.findall(r"device (\S+)", atoll("logs", name).stdout)


def shown(atoll: Any, name: str, count: int) -> list[str]:
    until(lambda: len(devices_of(atoll, name)) == count)
    return devices_of(atoll, name)


def kill_server(atoll: Any) -> None:
    pid = atoll.server_pid()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid))


def test_each_rank_has_its_own_also_across_trainings_and_a_killed_control_plane(
    lone_atoll: Any,
) -> None:
    lone_atoll.configure("[executors.local]\ngpus = [4, 5, 6, 7]\n")
    assert (
        lone_atoll("run", "-d", "--name", "a", "-n", "2", "--gpus", "1", "--", *HOLD).returncode
        == 0
    )
    assert sorted(shown(lone_atoll, "a", 2)) == ["4", "5"]
    kill_server(lone_atoll)
    assert (
        lone_atoll("run", "-d", "--name", "b", "-n", "1", "--gpus", "2", "--", *HOLD).returncode
        == 0
    )
    assert shown(lone_atoll, "b", 1) == ["6,7"]
    assert (
        lone_atoll("run", "-d", "--name", "c", "-n", "2", "--gpus", "1", "--", *HOLD).returncode
        == 0
    )
    until(lambda: "GPUs" in lone_atoll("status", "c").stdout)
    assert "4 of 4 GPUs of" in lone_atoll("status", "c").stdout
    assert devices_of(lone_atoll, "c") == []
    assert lone_atoll("rm", "-f", "b").returncode == 0
    assert sorted(shown(lone_atoll, "c", 2)) == ["6", "7"]
    (lone_atoll.cwd / "go").touch()
    assert lone_atoll("wait", "c").returncode == 0


def test_more_than_the_machine_has_are_refused_by_name(lone_atoll: Any) -> None:
    lone_atoll.configure('[executors.local]\ngpus = 2\ncpu = 2\nmemory = "1Gi"\n')
    for options, message in (
        (("-n", "3", "--gpus", "1"), "has 2 GPUs, and 3 ranks would need 3"),
        (("--cpu", "3"), ", and a rank would need 3 CPUs"),
        (
            ("-n", "2", "--memory", "600Mi"),
            "has 1 GiB of memory for all ranks ('atoll limits'), and 2 ranks would need 1.2 GiB",
        ),
    ):
        done = lone_atoll("run", *options, "--", "true")
        assert done.returncode == 2, done.stderr
        assert options[-2] in done.stderr
        assert message in done.stderr
    assert lone_atoll.json("ps") == []


def test_a_gpu_where_there_is_none_is_refused_unless_the_cpu_is_asked_for(lone_atoll: Any) -> None:
    done = lone_atoll("run", "--gpus", "1", "--", "true")
    assert done.returncode == 2, done.stderr
    assert "--gpus: 1 is not valid: this machine has no GPU that is known" in done.stderr
    assert lone_atoll.json("ps") == []


def test_the_callers_own_variable_is_what_ranks_choose_from(lone_atoll: Any) -> None:
    show = ("sh", "-c", "echo device $CUDA_VISIBLE_DEVICES")
    words = ("run", "-n", "2", "--gpus", "1", "--", *show)
    done = lone_atoll(*words, CUDA_VISIBLE_DEVICES="2,3")
    assert sorted(re.findall(r"device (\S+)", done.stdout)) == ["2", "3"]
    both = lone_atoll("run", "-n", "2", "--", *show, CUDA_VISIBLE_DEVICES="2,3")
    assert re.findall(r"device (\S+)", both.stdout) == ["2,3", "2,3"]


FOUND = """
echo "$RANK/$WORLD_SIZE local $LOCAL_RANK/$LOCAL_WORLD_SIZE on $CUDA_VISIBLE_DEVICES threads \
${OMP_NUM_THREADS-any}"
"""


def test_local_rank_is_a_device_that_the_rank_sees(lone_atoll: Any) -> None:
    def found(*words: str, **env: str) -> list[str]:
        done = lone_atoll("run", *words, "--", "sh", "-c", FOUND, **env)
        assert done.returncode == 0, done.stderr
        return sorted(re.findall(r"\d/\d local.*", done.stdout))

    lone_atoll.configure("[executors.local]\ngpus = [4, 5, 6, 7]\n")
    own = found("-n", "2", "--gpus", "2")
    assert [line.split(" on ")[0] for line in own] == ["0/2 local 0/1", "1/2 local 0/1"]
    assert sorted(re.findall(r" on (\S+)", "\n".join(own))) == ["4,5", "6,7"]
    assert {line.rpartition(" ")[2] for line in own} == {"1"}
    assert found("-n", "3", CUDA_VISIBLE_DEVICES="2,3", OMP_NUM_THREADS="5") == [
        "0/3 local 0/2 on 2,3 threads 5",
        "1/3 local 1/2 on 2,3 threads 5",
        "2/3 local 0/2 on 2,3 threads 5",
    ]
    assert found("-n", "2", "-e", "OMP_NUM_THREADS=4", CUDA_VISIBLE_DEVICES="") == [
        "0/2 local 0/2 on  threads 4",
        "1/2 local 1/2 on  threads 4",
    ]
    alone = ("-n", "1", "--rendezvous", "c10d")  # one rank is a world only if that is asked for
    assert found(*alone, CUDA_VISIBLE_DEVICES="3") == ["0/1 local 0/1 on 3 threads any"]


def test_what_is_not_honoured_is_told_in_one_line(lone_atoll: Any) -> None:
    lone_atoll.configure("[executors.local]\ngpus = 0\n")
    done = lone_atoll("run", "--image", "x/y:1", "--memory", "64Mi", "--gpus", "1", "--", "true")
    assert done.returncode == 0
    (told,) = [line for line in done.stderr.splitlines() if "does not support" in line]
    assert told.startswith("atoll: ")
    assert "local does not support image x/y:1: ranks are processes of this" in told
    assert "; nor gpu_count 1: this machine has no GPU that is known" in told
    name = lone_atoll.json("ps")[0]["name"]
    assert "UnsupportedFields" in lone_atoll("events", name).stdout
    assert "honour" not in lone_atoll("run", "--", "true").stderr
