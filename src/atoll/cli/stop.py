"""`atoll stop`: ends the user's own control plane, and with --all its trainings first."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import click

from atoll.cli.options import json_option
from atoll.core.errors import BelowMinimumWorld, Permanent, UDTerminalState

STOP_S = 60.0
LOOK_S = 0.02


@click.command()
@click.option("--all", "is_all", is_flag=True, help="Cancel all trainings before.")
@json_option
def stop(is_all: bool, is_json: bool) -> None:
    """Stop the control plane of this user. Ranks go on; the next command starts it again.

    None that runs is no error. A control plane that ATOLL_URL names is not stopped.
    """
    from atoll.backends.local.state import state_dir
    from atoll.cli.show import counted, print_json

    if os.environ.get("ATOLL_URL"):
        words = "ATOLL_URL names a control plane: stop it where it runs, or unset ATOLL_URL"
        raise Permanent(f"{words} to stop your own")
    where = state_dir()
    names = cancelled(where) if is_all else []
    pid = stopped(where)
    if is_json:
        print_json({"pid": pid, "cancelled": names})
        return
    if names:
        print(f"cancelled {counted(len(names), 'training')}: {', '.join(names)}")
    if pid is None:
        print("no control plane runs")
    else:
        rest = "" if is_all else "; its ranks go on, and the next command starts it again"
        print(f"stopped the control plane (pid {pid}){rest}")


def cancelled(where: Path) -> list[str]:
    """The names of trainings that ran, once nothing of them is alive."""
    from atoll.sdk.client import Client
    from atoll.sdk.embedded import running

    if running(where) is None and not any((where / "ranks").glob("*")):
        return []
    with Client() as client:
        trainings = [t for t in client.list() if not t.last.status.phase.is_terminal]
        for training in trainings:
            training.cancel()
        for training in trainings:
            try:
                training.wait_until_complete(training.last.spec.stop_grace_s + STOP_S)
            except BelowMinimumWorld as error:
                if not training.last.status.phase.is_terminal:
                    raise Permanent(f"{training.name} did not end: {error}") from error
            except UDTerminalState:
                pass  # over before it was cancelled
    return [training.name for training in trainings]


def stopped(where: Path) -> int | None:
    """The pid of the control plane that was stopped; None if none ran."""
    from atoll.sdk.embedded import announced, start_time

    endpoint = announced(where)
    if endpoint is None:
        return None
    pid = int(endpoint["pid"])
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return None
    except PermissionError as error:
        raise Permanent(f"the control plane (pid {pid}) is of another user") from error
    until = time.monotonic() + STOP_S
    while start_time(pid) == str(endpoint["startTime"]):
        if time.monotonic() > until:
            raise Permanent(f"the control plane (pid {pid}) still runs after {STOP_S:g} s")
        time.sleep(LOOK_S)
    return pid
