"""The `atoll` command: the table of commands, and errors as one line with what to do.

Command bodies import what they need when they run: `atoll --help` loads nothing but this.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import NoReturn

import click

import atoll
from atoll.cli.start import INTERRUPTED, leave
from atoll.cli.terminal import prepare
from atoll.core.errors import (
    AtollError,
    Denied,
    NotFound,
    Temporary,
    ValidationError,
    WorldSizeOutOfBounds,
)
from atoll.core.text import escape_control

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

    To turn it on, put `eval "$(atoll completion bash)"` in ~/.bashrc.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    print(kind(ctx.find_root().command, {}, "atoll", "_ATOLL_COMPLETE").source())


# In the order of the help: what is used first comes first.
COMMANDS = {
    "run": "run",
    "ps": "trainings",
    "status": "trainings",
    "logs": "trainings",
    "result": "trainings",
    "metrics": "metrics",
    "rounds": "metrics",
    "events": "trainings",
    "exec": "rank_access",
    "kill": "rank_access",
    "stacks": "rank_access",
    "scale": "trainings",
    "wait": "trainings",
    "cancel": "trainings",
    "rm": "trainings",
    "sweep": "sweep",
    "rerun": "run",
    "top": "top",
    "ui": "plane",
    "executors": "plane",
    "limits": "plane",
    "doctor": "doctor",
    "serve": "plane",
    "stop": "plane",
    "token": "plane",
    "k8s": "plane",
    "weights": "weights",
    "estimate": "metrics",
    "completion": "main",
}
# What to do about an error, where its message does not say it.
HINTS: dict[type[AtollError], str] = {
    Denied: "ATOLL_TOKEN holds the token that is sent",
    Temporary: "is the control plane running? ATOLL_URL holds its address",
    WorldSizeOutOfBounds: "--min and --max are fixed at the start; 'atoll rerun NAME -n N' starts "
    "another training with N",
}
# What other tools call a command.
ELSEWHERE = {
    "attach": "logs -f NAME",
    "compare": "ps --group NAME",
    "create": "run",
    "delete": "rm",
    "describe": "status",
    "get": "ps",
    "history": "ps",
    "info": "status",
    "inspect": "status",
    "launch": "run",
    "list": "ps",
    "login": "exec -it NAME -- bash",
    "ls": "ps",
    "queue": "ps",
    "remove": "rm",
    "resume": "run --run-id ID",
    "shell": "exec -it NAME -- bash",
    "show": "status",
    "ssh": "exec -it NAME -- bash",
    "start": "run",
    "submit": "run -d",
    "tail": "logs -f NAME",
    "torchrun": "run -- torchrun",
}
USAGE = 2  # as shells and click have it
NUMBERS = (type(click.INT), type(click.FLOAT))  # with or without bounds


class Commands(click.Group):
    """Loads the module of a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"atoll.cli.{COMMANDS[name]}")
        command: click.Command = getattr(module, name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] == "help":  # `atoll help run`
            if args[1:]:
                return super().resolve_command(ctx, [args[1], "--help"])
            click.echo(ctx.get_help())
            ctx.exit()
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            if args[0].endswith(".py"):
                close = [f"atoll run {args[0]}"]
            elif args[0] in ELSEWHERE:
                close = [f"atoll {ELSEWHERE[args[0]]}"]
            else:
                close = get_close_matches(args[0], COMMANDS, n=1)
            if not close:
                raise
            text = f"{error.message.rstrip('.')}. Did you mean {close[0]!r}?"
            raise click.UsageError(text, ctx) from error

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # click would exit with 1, as for a failed training
            leave_closed_pipe()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(atoll.__version__, message="atoll %(version)s")
def app() -> None:
    """Run elastic, fault-tolerant training on one machine or a cluster."""


def main() -> None:
    prepare()
    # `run` has nothing to clean up until it follows its training.
    if signal.getsignal(signal.SIGINT) is leave and sys.argv[1:2] != ["run"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = app(prog_name="atoll", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = USAGE
    except click.ClickException as error:
        code = report_misuse(error)
    except AtollError as error:
        code = report_error(error)
    except (KeyboardInterrupt, click.Abort):
        if sys.argv[1:2] == ["run"]:  # with --detach: it may be stored
            print("\natoll: interrupted; 'atoll ps' lists it if it was stored", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:
        leave_closed_pipe()
    except OSError as error:
        drop_output()
        text = str(error) if error.filename or not error.strerror else error.strerror
        print(f"atoll: error: {escape_control(text)}", file=sys.stderr)
        code = 1
    sys.exit(code)


def leave_closed_pipe() -> NoReturn:
    """`atoll ps | head`: nothing is wrong, and nobody reads a message."""
    drop_output()
    sys.exit(128 + signal.SIGPIPE)


def drop_output() -> None:
    """Sends what is still buffered to /dev/null: writing it at exit would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report_misuse(error: click.ClickException) -> int:
    ctx = getattr(error, "ctx", None)
    path = ctx.command_path if ctx else "atoll"
    kind = getattr(getattr(error, "param", None), "type", None)
    if type(error) is click.BadParameter and isinstance(kind, NUMBERS):
        value = error.message.partition(" is not ")[0]
        message = f"{value} is not valid: {expected_number(kind)}"
        error = click.BadParameter(message, error.ctx, error.param)
    text = " ".join(error.format_message().rstrip(".").split())
    if isinstance(error, click.NoSuchOption) and path == "atoll" and not error.possibilities:
        text += f". Options follow the command: atoll run {error.option_name} …"
    if path == "atoll stop" and "extra argument" in text:
        text += ". 'atoll cancel NAME' stops a training"
    print(f"atoll: error: {escape_control(text)}: see '{path} --help'", file=sys.stderr)
    return USAGE


def expected_number(kind: object) -> str:
    noun = "a whole number" if isinstance(kind, type(click.INT)) else "a number"
    low, high = getattr(kind, "min", None), getattr(kind, "max", None)
    if low is None:
        return f"expected {noun}"
    return f"expected {noun} " + (f"of at least {low}" if high is None else f"from {low} to {high}")


def option_names() -> dict[str, str]:
    """Options of the command that runs, by the field that each sets: `--cpu` for `cpu`."""
    command: click.Command | None = app
    for word in sys.argv[1:]:
        if not isinstance(command, click.Group):
            break
        command = command.get_command(click.Context(command), word)
    options = {flag for each in (command.params if command else ()) for flag in each.opts}
    return {flag.removeprefix("--"): flag for flag in options if flag.startswith("--")}


def report_error(error: AtollError) -> int:
    if isinstance(error, ValidationError):
        from atoll.core.problem import rename_fields

        error = rename_fields(error, option_names())
    text = str(error).replace("\n", "; ")
    if isinstance(error, ValidationError) and error.value is True:  # a flag has no other value
        text = f"{error.field}: {error.expected}"
    hint = next((hint for kind, hint in HINTS.items() if isinstance(error, kind)), None)
    if isinstance(error, Temporary) and error.__cause__ is None:
        hint = None  # the control plane answered: this is its own message
    if isinstance(error, NotFound):
        listing = "token list" if error.kind == "token" else "ps"
        hint = f"'atoll {listing}' lists what exists"
    hint = error.hint or hint
    print(f"atoll: error: {escape_control(text)}" + (f": {hint}" if hint else ""), file=sys.stderr)
    return USAGE if isinstance(error, ValidationError) else 1
