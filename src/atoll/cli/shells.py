"""`completion`: the script that lets a shell complete commands, options and training names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

PROFILES = {
    "bash": "~/.bashrc",
    "zsh": "~/.zshrc",
    "fish": "~/.config/fish/completions/atoll.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(list(PROFILES)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a completion script for a shell.

    `eval "$(atoll completion bash)"` in ~/.bashrc turns it on.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    print(kind(ctx.find_root().command, {}, "atoll", "_ATOLL_COMPLETE").source())
