"""The page on the command, made from its help: `python -m tools.manual` prints it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click

from atoll.cli.main import app

WIDTH = 100  # as the source
HEAD = """# The `atoll` command

What `atoll --help` and `atoll COMMAND --help` print.

- Every command with output takes `--json`: one document on one line, or one per line where it
  streams (`run`, `logs`, `status -w`). Keys are those of the HTTP API, and all are always present.
- Output of ranks goes to stdout, messages of atoll to stderr. `NO_COLOR` and `FORCE_COLOR` are
  supported.
- Errors are one line on stderr. Exit codes: 0 fine or succeeded, 1 failed or refused, 2 bad usage,
  124 timed out, 130 Ctrl-C.
- `ATOLL_URL` and `ATOLL_TOKEN` name a control plane; without them it is the user's own, started
  when needed.
- Completion: `eval "$(atoll completion bash)"` in `~/.bashrc`, `eval "$(atoll completion zsh)"` in
  `~/.zshrc`, `atoll completion fish > ~/.config/fish/completions/atoll.fish`.
"""


def manual() -> str:
    parts = [HEAD]
    for context in _contexts(app, "atoll", None):
        help = context.command.get_help(context)
        parts.append(f"## {context.command_path}\n\n```text\n{help}\n```\n")
    return "\n".join(parts)


def _contexts(
    command: click.Command, name: str, parent: click.Context | None
) -> Iterator[click.Context]:
    context = click.Context(
        command,
        parent,
        name,
        terminal_width=WIDTH,
        max_content_width=WIDTH,
        **command.context_settings,
    )
    yield context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _contexts(below, name, context)


if __name__ == "__main__":
    sys.stdout.write(manual())
