"""Commands that reach into a rank: run something beside it, signal it, see where it is."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys

import click

from atoll.cli.options import Duration, json_option, name_argument
from atoll.cli.output import full, print_json, print_note
from atoll.core.errors import Permanent
from atoll.core.rank_access import (
    EXEC_TIMEOUT_S,
    MAX_EXEC_S,
    MAX_STDIN_BYTES,
    TIMED_OUT,
    ExecTarget,
    StackList,
    signal_of,
)
from atoll.core.text import escape_control
from atoll.sdk import flows
from atoll.sdk.client import Client


@click.command()
@name_argument
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--rank",
    "-r",
    type=click.IntRange(min=0),
    default=0,
    help="Rank to run it in.",
    show_default=True,
)
@click.option(
    "--stdin", "-i", "has_stdin", is_flag=True, help="Pass standard input to the command."
)
@click.option(
    "--tty", "-t", "has_tty", is_flag=True, help="Give the command a terminal, as in `-it -- bash`."
)
@click.option(
    "--timeout",
    type=Duration(),
    help=f"Kill the command after this time. On another machine at most {MAX_EXEC_S:g} s.",
    show_default=f"no limit; on another machine {EXEC_TIMEOUT_S:g} s",
)
@json_option
def exec(
    name: str,
    command: tuple[str, ...],
    rank: int,
    has_stdin: bool,
    has_tty: bool,
    timeout: float | None,
    is_json: bool,
) -> None:
    """Run a command in the environment and directory of a rank.

    For example `atoll exec NAME -- nvidia-smi`. The exit code is that of the command, which ends
    when the rank ends. On Kubernetes, this runs `kubectl exec` with your own rights.
    """
    if is_json and (has_tty or has_stdin):
        raise click.UsageError("--json: not with --stdin or --tty")
    client = Client()
    training = client.get(name)
    ref = flows.TrainingRef(training.name, training.uid)
    target = client.run(flows.exec_target(ref, rank))
    if not is_json:
        if target.kubectl:
            if timeout is not None:  # what runs in the pod would outlive a kubectl that is killed
                expected = f"expected 'timeout {timeout:g}' in the command"
                raise click.UsageError(f"--timeout: kubectl does not end commands: {expected}")
            raise SystemExit(_kubectl(target, command, has_stdin=has_stdin, has_tty=has_tty))
        if _is_here(target, training.uid):
            raise SystemExit(_enter(target, command, timeout, has_stdin=has_stdin))
    if has_tty:
        raise click.UsageError(f"--tty: rank {rank} runs on {target.host}: expected to be there")
    data = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1) if has_stdin else b""
    limit_s = EXEC_TIMEOUT_S if timeout is None else timeout
    result = training.exec(command, rank, stdin=data, timeout=limit_s)
    if is_json:
        print_json({"rank": rank, **full(result)})
    else:
        sys.stdout.write(result.stdout)
        sys.stdout.flush()
        sys.stderr.write(result.stderr)
        if result.is_cut:
            print_note("it printed more than 1 MiB, which is all that is shown")
    raise SystemExit(result.exit_code)


def _kubectl(
    target: ExecTarget, command: tuple[str, ...], *, has_stdin: bool, has_tty: bool
) -> int:
    if shutil.which("kubectl") is None:
        raise Permanent("the rank runs in a pod, which kubectl enters: install kubectl")
    flags = [*(["-i"] if has_stdin else []), *(["-t"] if has_tty else [])]
    # A kubeconfig of a control plane on another machine is not here: the caller's own is used.
    _, _, file = target.kubectl[0].partition("--kubeconfig=")
    place = target.kubectl[1:] if file and not os.access(file, os.R_OK) else target.kubectl
    done = subprocess.run(["kubectl", "exec", *flags, *place, "--", *command], check=False)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def _is_here(target: ExecTarget, uid: str) -> bool:
    """Whether the process of the rank is one of this machine that this user may enter."""
    from atoll.backends.local.processes import environment_of

    if target.pid is None or target.host != socket.gethostname():
        return False
    env = environment_of(target.pid)
    return env.get(b"ATOLL_UID") == uid.encode()


def _enter(
    target: ExecTarget, command: tuple[str, ...], timeout: float | None, *, has_stdin: bool
) -> int:
    """Run it as a child with the terminal of this process, until it or the rank ends."""
    from atoll.backends.local.rank_access import bound_command, open_process, surroundings_of

    assert target.pid is not None
    with open_process(target.pid, 0) as pidfd:
        surroundings = surroundings_of(target.pid)
        assert surroundings is not None, "its environment was read before"
        # The terminal sends Ctrl-C to the command, too, and that decides what it means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        child = subprocess.Popen(
            bound_command(command),
            env=surroundings.env,
            cwd=surroundings.directory,
            stdin=None if has_stdin else subprocess.DEVNULL,
        )
        poll = select.poll()
        with open_process(child.pid, 0) as ended:
            poll.register(pidfd, select.POLLIN)
            poll.register(ended, select.POLLIN)
            # Nothing is ready when time is up.
            ready = [fd for fd, _ in poll.poll(None if timeout is None else timeout * 1000)]
            if ended not in ready:
                child.kill()
                late = f"{command[0]} was killed after {timeout or 0:g} s"
                print_note(f"rank {target.rank} has ended" if ready else late)
            code = child.wait()
    return TIMED_OUT if not ready else 128 - code if code < 0 else code


@click.command()
@name_argument
@click.argument("rank", type=click.IntRange(min=0))
@click.option(
    "--signal",
    "-s",
    "name_of_signal",
    default="SIGKILL",
    help="Name or number of the signal.",
    show_default=True,
)
@json_option
def kill(name: str, rank: int, name_of_signal: str, is_json: bool) -> None:
    """Send a signal to the process of a rank.

    For example to see it restart, if its training has --max-restarts.
    """
    signal_of(name_of_signal)
    result = Client().get(name).kill(rank, name_of_signal)
    if is_json:
        print_json({"name": name, **full(result)})
    else:
        print(f"{name}: sent {result.signal} to rank {rank}, process {result.pid} on {result.host}")


@click.command()
@name_argument
@click.argument("rank", type=click.IntRange(min=0), required=False)
@click.option(
    "--stored",
    "is_stored",
    is_flag=True,
    help="Show the stacks that atoll took by itself: of ranks that stalled, that it had to kill, "
    "or whose round timed out.",
)
@click.option("--threads", "has_threads", is_flag=True, help="Show all threads of each process.")
@json_option
def stacks(name: str, rank: int | None, is_stored: bool, has_threads: bool, is_json: bool) -> None:
    """Show the stacks of all ranks, or of RANK.

    Equal stacks are folded. For a training that has ended, the stacks that atoll took by itself.
    """
    result = Client().get(name).stacks(rank, stored=is_stored)
    print_json(result) if is_json else print(stacks_text(result, has_threads=has_threads))


def stacks_text(stacks: StackList, *, has_threads: bool) -> str:
    """The folded lines, then each stack once; with `has_threads`, each thread of each process."""
    lines = [group.message for group in stacks.folded] or ["no stacks were taken"]
    causes = {one.cause: one.rank for one in reversed(stacks.items) if one.cause}
    lines += [f"taken because {cause} (rank {rank})" for cause, rank in causes.items()]
    if has_threads:
        for one in stacks.items:
            for process in one.processes:
                lines += ["", f"rank {one.rank}, process {process.pid}: {process.command}"]
                for thread in process.threads:
                    lines.append(f"  thread {thread.name}".rstrip())
                    lines += [
                        f"    {frame.file}:{frame.line} {frame.function}" for frame in thread.frames
                    ]
    else:
        for group in stacks.folded:
            if group.stack:
                lines += ["", f"{group.message}:", *(f"  {line}" for line in group.stack)]
    return "\n".join(map(escape_control, lines))
