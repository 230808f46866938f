"""`atoll run`, `up` and `rerun`: start a training, and stay with it or not."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from atoll.cli.executors import config_option, slots_option
from atoll.cli.options import (
    Launch,
    WholeNumber,
    json_option,
    launches,
    name_argument,
    variables_of,
)

if TYPE_CHECKING:
    from atoll.core.spec import Code

# Everything after the first word that is no option belongs to the ranks.
WITH_COMMAND = {"allow_interspersed_args": False}


@click.command(context_settings=WITH_COMMAND)
@launches
@config_option
@slots_option
@click.option("--rm", "is_removed", is_flag=True, help="Remove the record at the end.")
@click.option(
    "--dry-run",
    "is_dry",
    is_flag=True,
    help="Print what would be submitted, and exit: the script for sbatch, objects for kubectl, "
    "requests to Modal or SageMaker.",
)
@json_option
def run(launch: Launch, is_removed: bool, is_dry: bool, is_json: bool) -> None:
    """Start a training, follow its logs, and exit as it ended.

    Exit code: 0 succeeded, 1 failed, 2 bad usage, 124 --timeout passed, 130 cancelled by Ctrl-C.
    The first Ctrl-C cancels the training, the second leaves at once.
    """
    if is_dry:
        print(_preview(launch), end="")
        return
    _begin(launch)
    from atoll.cli.follow import Following
    from atoll.cli.terminal import go_on_unread, leave
    from atoll.core.errors import Temporary
    from atoll.sdk.client import Client

    go_on_unread()
    following = Following(launch.timeout)
    client = Client()
    training = client.deploy_distributed(launch.name, **launch.options)
    _say_code(training.last.spec.code)
    from atoll.cli.report import JsonReport, TextReport  # loaded while the ranks start

    report = JsonReport() if is_json else TextReport()
    code = following.run(client, training, report)
    if is_removed:
        try:
            training.delete()
        except Temporary as error:  # the exit code is the training's
            report.says(str(error))
    leave(code)


@click.command(context_settings=WITH_COMMAND)
@launches
@config_option
@slots_option
@json_option
def up(launch: Launch, is_json: bool) -> None:
    """Start a training and return. Prints its name; `atoll logs -f NAME` follows it."""
    _begin(launch)
    from atoll.cli.show import print_json, training_json
    from atoll.sdk.client import Client

    training = Client().deploy_distributed(launch.name, **launch.options)
    _say_code(training.last.spec.code)
    if is_json:
        print_json(training_json(training.last))
    else:
        print(training.name)


@click.command()
@name_argument
@click.option(
    "--name", "new_name", help="Name of the new training.", show_default="NAME-r2, NAME-r3, …"
)
@click.option(
    "--ranks",
    "-n",
    type=WholeNumber("world_size.target"),
    help="Number of ranks to start.",
    show_default="as before",
)
@click.option(
    "--env", "-e", "env", multiple=True, help="Variable to set over those it had: K=V, or K."
)
@click.option(
    "--follow", "-f", "is_followed", is_flag=True, help="Follow its logs and exit as it ended."
)
@json_option
def rerun(
    name: str,
    new_name: str | None,
    ranks: int | None,
    env: tuple[str, ...],
    is_followed: bool,
    is_json: bool,
) -> None:
    """Start a training again, as a new one, and print its name.

    Its spec and its code are copied by the control plane: nothing of this directory is sent.
    """
    from atoll.cli.show import print_json, training_json
    from atoll.sdk.client import Client

    following = None
    if is_followed:
        from atoll.cli.follow import Following

        following = Following(None)
    client = Client()
    training = client.get(name).rerun(new_name, world_size=ranks, env=variables_of(env, ()))
    if following is not None:
        from atoll.cli.report import JsonReport, TextReport
        from atoll.cli.terminal import leave

        leave(following.run(client, training, JsonReport() if is_json else TextReport()))
    elif is_json:
        print_json(training_json(training.last))
    else:
        print(training.name)


def _preview(launch: Launch) -> str:
    """What the executor would be sent. Nothing is started, and no server is asked."""
    from pathlib import Path
    from typing import Any

    from atoll.backends.local.state import state_dir
    from atoll.core.config import in_file, options_of
    from atoll.core.errors import ValidationError
    from atoll.core.executors import LOCAL, PlaneContext, load
    from atoll.core.status import Training
    from atoll.core.support import describe_unsupported, unsupported_fields
    from atoll.sdk.config import read_for_plane, stated_spec

    spec, config = stated_spec(launch.name, launch.options), read_for_plane()
    name = spec.executor or config.defaults.get("executor", LOCAL)
    if name not in config.executors:
        known = ", ".join(config.executors)
        raise ValidationError("executor", name, f"expected one of {known}")
    wanted = config.executors[name]
    kind: Any = load(wanted.kind)
    where = Path(config.path).parent if config.path else Path()
    training = Training(namespace="default", uid="0" * 32, spec=spec)
    try:
        options = options_of(kind.options_type, dict(wanted.options))
    except ValidationError as error:
        raise in_file(config.path, error, f"executors.{name}") from error
    preview: str | None = kind.preview(options, PlaneContext(state_dir(), "", where), training)
    if preview is None:
        words = "this machine starts ranks itself. Give an --executor of another kind"
        raise click.UsageError(f"--dry-run: {name!r} submits nothing: {words}")
    unsupported = unsupported_fields(spec, kind.SUPPORTS, options)
    if words := describe_unsupported(name, unsupported):
        click.echo(f"atoll: {words}", err=True)
    return preview


def _begin(launch: Launch) -> None:
    """The control plane may start while the rest is loaded, unless this is nothing to start."""
    from atoll.sdk.config import stated_spec
    from atoll.sdk.embedded import begin
    from atoll.sdk.endpoint import here, is_here

    spec = stated_spec(launch.name, launch.options)
    if is_here(spec.executor) and not os.environ.get("ATOLL_URL"):
        here(spec)
    begin()


def _say_code(code: Code | None) -> None:
    """How much of the working directory travels with the training."""
    if code is not None:
        from atoll.code.archive import in_words

        files = "1 file" if code.files == 1 else f"{code.files} files"
        sizes = f"{in_words(code.unpacked)}, {in_words(code.size)} packed"
        click.echo(f"atoll: code: {files}, {sizes}, sha256 {code.digest[:12]}", err=True)
