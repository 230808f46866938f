"""`atoll weights`: what is in a weight channel, and a follower for programs that read a folder."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll.cli.options import json_option

if TYPE_CHECKING:
    from atoll.core.weights import Channel


NOTE_S = 3.0  # without a version: long enough for one that is there to be found
FOREVER_S = 3600.0  # until the next call, which waits again
GRACE_S = 5.0  # from SIGTERM for a command to SIGKILL
RETRY_S = 10.0  # until a folder is tried again: its disk may have room by then


class _Weights(click.Group):
    """`atoll weights URI|NAME` is `atoll weights list URI|NAME`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            args = ["list", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=_Weights)
def weights() -> None:
    """Show and follow the weights that a trainer publishes.

    `atoll weights URI` and `atoll weights NAME` list versions and followers.
    """


@weights.command("list")
@click.argument("source", metavar="URI|NAME")
@click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Newest versions."
)
@json_option
def list_versions(source: str, limit: int, is_json: bool) -> None:
    """List the versions of a channel and their followers.

    URI is s3://, gs://, az://, file:// or the path of a folder, with a slash in it: ./policy. It is
    read from the store. NAME is a training: what its ranks report of the channels that they publish
    or follow.
    """
    from atoll.cli.output import print_json

    if is_uri(source):
        from atoll.weights.channel import read_channel

        channel = read_channel(source, limit=limit)
        print_json(channel) if is_json else print(as_text(channel, limit))
        return
    channels = _channels_of(source)
    if is_json:
        print_json(channels)
    elif channels:
        print("\n\n".join(f"{each.uri}\n{as_text(each, limit)}" for each in channels))
    else:
        print(f"{source} has no weights: only ranks with atoll.weights publish or follow them")


def is_uri(source: str) -> bool:
    """Whether it is a URI or a path; else it is the name of a training, which has no slash."""
    return "/" in source or source in (".", "..", "~")


def _channels_of(name: str) -> list[Channel]:
    from atoll.core.errors import NotFound, ValidationError
    from atoll.sdk.client import Client

    try:
        return Client().get(name).weights()
    except NotFound as error:
        if not Path(name).is_dir():
            raise
        expected = f"there is no such training; for the folder, write ./{name}"
        raise ValidationError("uri", name, expected) from error


def as_text(channel: Channel, limit: int) -> str:
    from atoll.cli.output import table
    from atoll.core.text import format_bytes, format_duration

    if not channel.versions:
        text = "no version yet"
    else:
        rows = [
            (
                str(each.number),
                "" if each.step is None else str(each.step),
                format_bytes(each.bytes),
                f"{each.changed:,}",
                {True: "full", False: "delta", None: ""}[each.is_full],
                format_duration(each.age_s),
                "" if each.rank is None else f"{each.training}/{each.rank}",
            )
            for each in channel.versions[:limit]
        ]
        header: tuple[str, ...] = (
            "VERSION", "STEP", "BYTES", "CHANGED", "COPY", "AGE", "RANK"
        )  # fmt: skip
        text = table(*_without_empty(header, rows))
    if not channel.followers:
        return text
    followers = [
        (
            each.name,
            "" if each.rank is None else f"{each.training}/{each.rank}",
            str(each.number) if each.number else "joining",
            str(each.behind),
            "-" if each.lag_s is None else format_duration(each.lag_s) if each.behind else "0s",
            format_duration(each.age_s) + ("" if each.is_fresh else " (ended)"),
        )
        for each in channel.followers
    ]
    header = ("FOLLOWER", "RANK", "VERSION", "BEHIND", "LAG", "RENEWED")
    return f"{text}\n\n{table(*_without_empty(header, followers))}"


def _without_empty(
    header: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Without columns that are empty: a store does not know ranks, nor a rank full copies."""
    filled = [at for at in range(len(header)) if any(row[at] for row in rows)]
    return [header[at] for at in filled], [[row[at] for at in filled] for row in rows]


@weights.command("follow")
@click.argument("uri")
@click.argument("folder", type=click.Path(file_okay=False))
@click.option(
    "--then", "command", metavar="CMD", help="Command to run in a shell after each version."
)
@click.option("--name", help="Name in the list of followers; the host's by default.")
@click.option("--once", "is_once", is_flag=True, help="Exit after the first version.")
@json_option
def follow_versions(
    uri: str, folder: str, command: str | None, name: str | None, is_once: bool, is_json: bool
) -> None:
    """Write each version at URI into FOLDER.

    A version is FOLDER/vN, and the link FOLDER/current points to the newest.

    FOLDER is empty at first; versions before the last two are deleted in it. CMD finds the folder
    of the version in ATOLL_WEIGHTS_PATH, its number in ATOLL_WEIGHTS_NUMBER and its step in
    ATOLL_WEIGHTS_STEP. If CMD fails, the next version is followed anyway; with --once the
    exit code is 1. With --json, what CMD prints goes to stderr. Ctrl-C and SIGTERM end it, and CMD
    with it.
    """
    from atoll.cli.output import print_json, print_note
    from atoll.weights import Follower, Temporary
    from atoll.weights.api import own_folder
    from atoll.weights.channel import check_folder

    check_folder(uri)
    own_folder(folder)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    timeout_s, unwritten = NOTE_S, None
    with Follower(uri, name=name) as follower:
        while True:
            try:
                version = follower.next(timeout=timeout_s) or unwritten
            except Temporary as error:
                print_note(str(error))
                continue
            if version is None:
                if timeout_s == NOTE_S:
                    print_note(f"there is no version at {uri} yet: waiting for the first")
                timeout_s = FOREVER_S
                continue
            try:
                path = follower.write(folder)
            except OSError as error:
                print_note(f"version {version.number} is not in {folder}: {error.strerror}")
                timeout_s, unwritten = RETRY_S, version
                continue
            timeout_s, unwritten = FOREVER_S, None
            row: dict[str, Any] = {"number": version.number, "step": version.step, "path": path}
            if is_json:
                print_json(row)
            else:
                print(f"version {version.number}: {path}", flush=True)
            code = _run(command, row, is_json=is_json) if command else 0
            if code:
                print_note(f"version {version.number}: {command!r} exited with {code}")
            if is_once:
                sys.exit(1 if code else 0)


def _run(command: str, row: dict[str, Any], *, is_json: bool) -> int:
    env = {
        "ATOLL_WEIGHTS_PATH": row["path"],
        "ATOLL_WEIGHTS_NUMBER": str(row["number"]),
        "ATOLL_WEIGHTS_STEP": "" if row["step"] is None else str(row["step"]),
    }
    # Lines of JSON stay alone on stdout.
    stdout = 2 if is_json else None  # the descriptor of stderr
    process = None
    try:
        with _held_signals():
            # A group of its own, so that all of it can be ended.
            process = subprocess.Popen(
                command, shell=True, env=os.environ | env, stdout=stdout, start_new_session=True
            )
        return process.wait()
    except BaseException:  # Ctrl-C or SIGTERM
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
                os.killpg(process.pid, signal.SIGKILL)
        raise


@contextlib.contextmanager
def _held_signals() -> Iterator[None]:
    """Signals take effect after this: between the start of a command and the return of Popen nobody
    would know what to end."""
    came: list[int] = []
    before = {
        each: signal.signal(each, lambda number, frame: came.append(number))
        for each in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    for number in came:
        signal.raise_signal(number)
