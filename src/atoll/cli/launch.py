"""`atoll run` and `atoll up`: start a training, and stay with it or not."""

from __future__ import annotations

import click

from atoll.cli.executors import config_option
from atoll.cli.options import Launch, json_option, launches

# Everything after the first word that is no option belongs to the ranks.
WITH_COMMAND = {"allow_interspersed_args": False}


@click.command(context_settings=WITH_COMMAND)
@launches
@config_option
@click.option("--rm", "is_removed", is_flag=True, help="Remove the record at the end.")
@json_option
def run(launch: Launch, is_removed: bool, is_json: bool) -> None:
    """Start a training, follow its logs, and exit as it ended.

    Exit code: 0 succeeded, 1 failed, 2 bad usage, 124 --timeout passed, 130 cancelled by Ctrl-C.
    The first Ctrl-C cancels the training, the second leaves at once.
    """
    _begin(launch)
    from atoll.cli.follow import Following
    from atoll.cli.terminal import go_on_unread, leave
    from atoll.core.errors import Temporary
    from atoll.sdk.client import Client

    go_on_unread()
    following = Following(launch.timeout)
    client = Client()
    training = client.deploy_distributed(launch.name, **launch.options)
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
@json_option
def up(launch: Launch, is_json: bool) -> None:
    """Start a training and return. Prints its name; `atoll logs -f NAME` follows it."""
    _begin(launch)
    from atoll.cli.show import print_json, training_json
    from atoll.sdk.client import Client

    training = Client().deploy_distributed(launch.name, **launch.options)
    if is_json:
        print_json(training_json(training.last))
    else:
        print(training.name)


def _begin(launch: Launch) -> None:
    """The control plane may start while the rest is loaded, unless this is nothing to start."""
    from atoll.sdk.config import stated_spec
    from atoll.sdk.embedded import begin

    stated_spec(launch.name, launch.options)
    begin()
