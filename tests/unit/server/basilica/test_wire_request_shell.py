"""The command a basilica client ships, as the script a rank runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from atoll.server.basilica.wire import CONF, INJECTED, is_simple, shell_script

SHIPPED_BY_0_36_8 = (
    "echo cHJpbnQoJ3NoaXBwZWQnKQ== | base64 -d > /tmp/__basilica_source.py && "
    'exec torchrun --rdzv-backend=etcd --rdzv-endpoint="$BASILICA_RDZV_ENDPOINT" '
    '--rdzv-id="$BASILICA_RDZV_ID" --rdzv-conf=timeout=1500,last_call_timeout=900 '
    '--nnodes="$BASILICA_WORLD_MIN":"$BASILICA_WORLD_MAX" '
    '--nproc-per-node="$BASILICA_GPUS_PER_POD" --max-restarts=10 /tmp/__basilica_source.py'
)


def test_the_flag_behind_the_script_is_put_before_it() -> None:
    command = f"torchrun --rdzv-backend=etcd train.py --lr 0.1{INJECTED}"
    script = shell_script(command, args=[], backend="etcd-v2")
    assert script == f"exec torchrun {CONF} --rdzv-backend=etcd-v2 train.py --lr 0.1\n"


def test_a_conf_of_the_users_own_stays() -> None:
    command = "torchrun --rdzv-conf=last_call_timeout=60 train.py"
    assert shell_script(command, args=[], backend="c10d") == f"exec {command}\n"


def test_a_flag_that_the_client_gave_to_another_program_is_taken_away() -> None:
    command = "python launch.py --launcher=torchrun"
    assert shell_script(command + INJECTED, args=[], backend="c10d") == f"exec {command}\n"


def test_torchrun_that_is_only_asked_about_gets_no_flag() -> None:
    script = shell_script(f"which torchrun && torchrun x.py{INJECTED}", args=[], backend="c10d")
    assert script == f"which torchrun && torchrun {CONF} x.py\n"


def test_each_torchrun_of_a_command_gets_its_flags() -> None:
    script = shell_script(f"torchrun a.py && torchrun b.py{INJECTED}", args=[], backend="c10d")
    assert script == f"torchrun {CONF} a.py && torchrun {CONF} b.py\n"


@pytest.mark.parametrize("sent", ["etcd", "etcd-v2"])
@pytest.mark.parametrize("there", ["etcd-v2", "c10d"])
def test_torchrun_is_told_the_backend_there_is(sent: str, there: str) -> None:
    script = shell_script(f"torchrun --rdzv-backend={sent} x.py", args=[], backend=there)
    assert f"--rdzv-backend={there} x.py" in script


def test_ranks_that_do_not_meet_run_torchrun_each_for_itself() -> None:
    command = SHIPPED_BY_0_36_8.replace("/tmp/__basilica_source.py", "x.py")
    script = shell_script(command, args=[], backend="none")
    flags = '--standalone --nproc-per-node="$BASILICA_GPUS_PER_POD" --max-restarts=10 x.py'
    assert script.endswith(f"exec torchrun {flags}\n")
    auto = shell_script("auto", args=["x.py"], backend="none")
    assert auto == 'exec torchrun --standalone --nproc-per-node="$BASILICA_GPUS_PER_POD" "$@"\n'


def test_a_meeting_point_of_the_users_own_stays_where_ranks_do_not_meet() -> None:
    command = "torchrun --rdzv-backend=c10d --rdzv-endpoint=host:29400 --nnodes=2 x.py"
    script = shell_script(command + INJECTED, args=[], backend="none")
    assert script == f"exec {command}\n"


def test_static_ranks_know_their_number() -> None:
    command = SHIPPED_BY_0_36_8.replace("=etcd ", "=static ")
    script = shell_script(command, args=[], backend="static")
    assert '--nnodes="$BASILICA_WORLD_TARGET" --node-rank="$BASILICA_RANK"' in script
    assert "WORLD_MIN" not in script


def test_ranks_of_one_machine_do_not_run_each_others_source(tmp_path: Path) -> None:
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\nfor last; do :; done\necho "$last"\ncat "$last"\n')
    torchrun.chmod(0o755)
    script = shell_script(SHIPPED_BY_0_36_8, args=[], backend="c10d", path_first=str(tmp_path))
    outputs = [
        subprocess.run(
            ["/bin/sh"], input=script, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for _ in range(2)
    ]
    assert [output[1] for output in outputs] == ["print('shipped')"] * 2
    assert outputs[0][0] != outputs[1][0]


@pytest.mark.parametrize(
    ("command", "args", "output"),
    [
        ("echo one", ["two", "three four"], "one two three four"),
        ("echo $2 $1", ["one", "two"], "two one"),
        ('for x in "$@"; do echo "<$x>"; done', ["a b"], "<a b>"),
        ("echo '$HOME'", [], "$HOME"),
        ("echo a; echo b", [], "a\nb"),
        ("X=5 sh -c 'echo $X'", [], "5"),
        ("exit 0", [], ""),
        ("echo 'it'\\''s; fine'", [], "it's; fine"),
        ("echo one && exec echo two", ["three"], "one\ntwo three"),
        ("echo one\n", ["two"], "one two"),
        ("echo '$1'", ["two"], "$1 two"),
        ("for i in 1 2; do echo $i; done", ["unused"], "1\n2"),
        ("if true; then echo yes; fi", ["unused"], "yes"),
        ("f() { echo in f; }; { f; }", ["unused"], "in f"),
        ("echo one & wait", ["--unused"], "one"),
        ("(echo one)", ["unused"], "one"),
        ("echo one # and two", ["unused"], "one"),
        ("cat <<END\none\nEND", ["unused"], "one"),
        ("case x in x) echo one;; esac", ["unused"], "one"),
    ],
)
def test_it_runs_as_the_shell_would_run_it(
    tmp_path: Path, command: str, args: list[str], output: str
) -> None:
    path = tmp_path / "command.sh"
    path.write_text(shell_script(command, args=args, backend="c10d"))
    done = subprocess.run(["/bin/sh", str(path), *args], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, output), done.stderr


@pytest.mark.parametrize(
    ("command", "simple"),
    [
        ("python train.py --lr '0.1 x'", True),
        ("torchrun --nnodes=$BASILICA_WORLD_TARGET x.py", True),
        ("a && b", False),
        ("a; b", False),
        ("a | b", False),
        ("a > b", False),
        ("cd /tmp", False),
        ("A=1 b", False),
        ("echo `date`", False),
        ("echo 'unfinished", False),
        ("python -c 'a; b'", True),
    ],
)
def test_only_one_program_takes_the_place_of_the_shell(command: str, simple: bool) -> None:
    assert is_simple(command) is simple


def test_a_rank_that_is_killed_dies_of_the_signal_itself(tmp_path: Path) -> None:
    command = "sh -c 'kill -9 $$'"
    path = tmp_path / "command.sh"
    path.write_text(shell_script(command, args=[], backend="c10d"))
    assert subprocess.run(["/bin/sh", str(path)], capture_output=True).returncode == -9


def test_auto_builds_the_torchrun_line() -> None:
    script = shell_script("auto", args=["train.py"], backend="c10d")
    assert script.startswith(f"exec torchrun {CONF} --rdzv-backend=c10d ")
    assert script.endswith('"$@"\n')
