"""`scale`, `wait`, `cancel` and `rm`: commands that change trainings or wait for them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from atoll.cli.options import json_option, name_argument, names_argument, timeout_option
from atoll.core.errors import BelowMinimumWorld, NotFound, Temporary, ValidationError

if TYPE_CHECKING:
    from atoll.core.status import Training

GOALS = click.Choice(["min", "target", "complete"])


@click.command(context_settings={"ignore_unknown_options": True})  # a target of -1 is no option
@name_argument
@click.argument("target", type=int)
@click.option("--wait", "is_waited", is_flag=True, help="Wait until all of them are ready.")
@timeout_option
@json_option
def scale(name: str, target: int, is_waited: bool, timeout: float | None, is_json: bool) -> None:
    """Change the number of ranks of a running training to TARGET."""
    from atoll.cli.show import counted, print_json, world_json
    from atoll.sdk.client import Client

    training = Client().get(name)
    before = training.last.spec.world_size.target
    training.scale(target)
    if is_waited:
        training.wait_until_target_world(timeout)
    if is_json:
        print_json({"name": name, "previousTarget": before, **world_json(training.last)})
    else:
        wanted = f"{before} -> {counted(target, 'rank')} wanted"
        print(f"{name}: {wanted}{', all ready' if is_waited else ''}")


@click.command()
@name_argument
@click.option(
    "--for", "goal", type=GOALS, default="complete", help="Goal to wait for.", show_default=True
)
@timeout_option
@json_option
def wait(name: str, goal: str, timeout: float | None, is_json: bool) -> None:
    """Wait for a training to end, or for its ranks.

    Exit code: 0 goal reached, 1 failed or cancelled, 124 --timeout passed.
    """
    from atoll.cli.follow import FAILED, SUCCEEDED, TIMED_OUT
    from atoll.cli.report import end_report
    from atoll.cli.show import counted, print_json, says, training_json
    from atoll.sdk import flows
    from atoll.sdk.client import Client

    client = Client()
    last = client.get(name).last
    waits: dict[str, Any] = {
        "min": flows.wait_until_min_world,
        "target": flows.wait_until_target_world,
        "complete": flows.wait_until_end,
    }

    def keep(training: Training) -> None:
        nonlocal last
        last = training

    code, late = SUCCEEDED, ""
    try:
        client.run(waits[goal](flows.Who(last.name, last.uid), timeout, on_read=keep))
    except BelowMinimumWorld as error:
        is_late = not last.status.phase.is_terminal
        code, late = (TIMED_OUT, str(error)) if is_late else (FAILED, "")
    if is_json:
        print_json({"goal": goal, "exitCode": code, **training_json(last)})
    elif late:
        says(late)
    elif code == FAILED or goal == "complete":
        print(end_report(last), file=sys.stderr if code else sys.stdout)
    else:
        print(f"{name}: {counted(last.status.world.ready, 'rank')} ready")
    raise SystemExit(code)


@click.command()
@names_argument(is_required=True)
@json_option
def cancel(names: tuple[str, ...], is_json: bool) -> None:
    """Stop the ranks of trainings. Their logs and records are kept."""
    from atoll.cli.show import print_json, training_json
    from atoll.sdk.client import Client

    client = Client()
    trainings = [client.get(name) for name in names]
    for training in trainings:
        training.cancel()
        phase = training.last.status.phase
        if not is_json:
            state = f"was already {phase.value}" if phase.is_terminal else "cancelling"
            print(f"{training.name}: {state}")
    if is_json:
        print_json([training_json(training.last) for training in trainings])


@click.command()
@names_argument(is_required=False)
@click.option(
    "--finished", "is_finished", is_flag=True, help="Remove all trainings that have ended."
)
@json_option
def rm(names: tuple[str, ...], is_finished: bool, is_json: bool) -> None:
    """Remove trainings with their ranks, logs and records. A missing training is no error."""
    from atoll.cli.show import print_json
    from atoll.sdk.client import Client

    if bool(names) == is_finished:
        raise ValidationError("names", list(names) or None, "give names, or --finished")
    client = Client()
    trainings = [t for t in client.list() if t.last.status.phase.is_terminal] if is_finished else []
    for name in names:
        try:
            trainings.append(client.get(name))
        except NotFound:
            if not is_json:
                print(f"{name}: not there")
    removed, left = [], []
    for training in trainings:
        try:
            training.delete()
        except Temporary as error:
            left.append(training.name)
            print(f"atoll: {error}", file=sys.stderr)
            continue
        removed.append(training.name)
        if not is_json:
            print(f"{training.name}: removed")
    if is_json:
        print_json({"removed": removed, **({"notRemoved": left} if left else {})})
    if left:
        raise SystemExit(1)
