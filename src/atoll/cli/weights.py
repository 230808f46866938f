"""`atoll weights`: what is in a weight channel, and a follower for programs that read a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import click

from atoll.cli.options import json_option


class _Weights(click.Group):
    """`atoll weights URI` is `atoll weights list URI`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            args = ["list", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=_Weights)
def weights() -> None:
    """Show and follow the weights that a trainer publishes.

    `atoll weights URI` lists versions and followers.
    """


@weights.command("list")
@click.argument("uri")
@click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Newest versions."
)
@json_option
def list_versions(uri: str, limit: int, is_json: bool) -> None:
    """List the versions at URI (s3://, gs://, az://, file:// or a folder) and their followers."""
    from atoll.cli.output import print_json, table
    from atoll.core.text import format_bytes, format_duration
    from atoll.weights.channel import read_channel

    channel = read_channel(uri, limit=limit)
    if is_json:
        print_json(channel)
        return
    if not channel.versions:
        print(f"{uri}: no version yet")
    else:
        rows = [
            (
                str(each.number),
                "" if each.step is None else str(each.step),
                format_bytes(each.bytes),
                f"{each.changed:,}",
                "full" if each.is_full else "delta",
                format_duration(each.age_s),
            )
            for each in channel.versions
        ]
        print(table(("VERSION", "STEP", "BYTES", "CHANGED", "COPY", "AGE"), rows))
    if channel.followers:
        rows_of_followers = [
            (
                each.name,
                str(each.number) if each.number else "joining",
                str(each.behind),
                format_duration(each.age_s) + ("" if each.is_fresh else " (gone)"),
            )
            for each in channel.followers
        ]
        print()
        print(table(("FOLLOWER", "VERSION", "BEHIND", "LEASE"), rows_of_followers))


@weights.command("follow")
@click.argument("uri")
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--then", "command", metavar="CMD", help="Run this in a shell after each version.")
@click.option("--name", help="Name in the list of followers; the host's by default.")
@click.option("--once", "is_once", is_flag=True, help="End after the first version.")
@json_option
def follow_versions(
    uri: str, folder: str, command: str | None, name: str | None, is_once: bool, is_json: bool
) -> None:
    """Write each version at URI as FOLDER/vN, and point the link FOLDER/current to it.

    CMD finds the folder in ATOLL_WEIGHTS_PATH, the version in ATOLL_WEIGHTS_NUMBER and
    ATOLL_WEIGHTS_STEP. If CMD fails, the next version is followed all the same. Ctrl-C ends it.
    """
    from atoll.cli.output import print_json, print_note
    from atoll.weights import Follower, Temporary

    with Follower(uri, name=name) as follower:
        while True:
            try:
                version = follower.next(timeout=3600.0)
            except Temporary as error:
                print_note(str(error))
                continue
            if version is None:
                continue
            path = follower.write(folder)
            row: dict[str, Any] = {"number": version.number, "step": version.step, "path": path}
            if is_json:
                print_json(row)
            else:
                print(f"version {version.number}: {path}", flush=True)
            code = _run(command, row) if command else 0
            if code:
                print_note(f"version {version.number}: {command!r} exited with {code}")
            if is_once:
                sys.exit(1 if code else 0)


def _run(command: str, row: dict[str, Any]) -> int:
    env = {
        "ATOLL_WEIGHTS_PATH": row["path"],
        "ATOLL_WEIGHTS_NUMBER": str(row["number"]),
        "ATOLL_WEIGHTS_STEP": "" if row["step"] is None else str(row["step"]),
    }
    return subprocess.run(command, shell=True, env=os.environ | env).returncode
