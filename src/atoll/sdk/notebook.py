"""A live view of a training: updated in place in a notebook, elsewhere as lines of text."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from atoll.core.describe import describe_end, describe_status
from atoll.core.errors import AtollError, NotFound, Temporary
from atoll.core.html import text, training_html
from atoll.core.metrics import LatestMetric
from atoll.core.status import Training
from atoll.core.text import escape_control
from atoll.sdk import flows

if TYPE_CHECKING:
    from atoll.sdk.training import DistributedTraining

EVERY_S = 1.0  # as often as a reader notices a change
METRICS = ("loss",)

# Takes the newest state, what was reported last, and a remark.
Show = Callable[[Training, Sequence[LatestMetric], str], None]


def show(handle: DistributedTraining, *, wait: bool, every_s: float = EVERY_S) -> None:
    """Show the training now and each change until it ends, in the background unless `wait`."""
    notebook = _notebook()
    if notebook is None:
        draw = _as_text()
        if not wait:
            draw(handle.last, (), "")
            return
    else:
        draw = _in_notebook(notebook)
    _draw(handle, draw)
    if wait:
        follow(handle, draw, every_s)
    else:
        threading.Thread(
            target=follow,
            args=(handle, draw, every_s),
            name=f"atoll-show-{handle.name}",
            daemon=True,
        ).start()


def follow(
    handle: DistributedTraining,
    draw: Show,
    every_s: float,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Draw until the training is over or deleted. Waits for a control plane that is away."""
    while not handle.last.status.phase.is_terminal:
        pause(every_s)
        try:
            handle.refresh()
        except NotFound:
            draw(handle.last, (), "it was deleted; this is what was known last")
            return
        except Temporary as error:
            draw(handle.last, (), f"not connected: {error}")
            continue
        except AtollError as error:
            draw(handle.last, (), str(error))
            return
        _draw(handle, draw)


def _draw(handle: DistributedTraining, draw: Show) -> None:
    try:
        newest_metrics = handle._client.run(flows.newest_metrics(METRICS, [handle.last.name])).items
    except AtollError:
        newest_metrics = []  # the control plane is away
    draw(handle.last, newest_metrics, "")


def _notebook() -> Any:
    """IPython's `display`, if a notebook runs this; None elsewhere, also in IPython's terminal."""
    core = sys.modules.get("IPython")
    shell = core.get_ipython() if core is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    return display


def _in_notebook(display: Any) -> Show:
    handle: list[Any] = []
    lock = threading.Lock()

    def draw(training: Training, newest_metrics: Sequence[LatestMetric], remark: str) -> None:
        note = f"<p><i>{text(remark)}</i></p>" if remark else ""
        bundle = {
            "text/html": note + training_html(training, newest_metrics),
            "text/plain": " ".join(filter(None, (describe_training(training), remark))),
        }
        with lock:
            if handle:
                handle[0].update(bundle, raw=True)
            else:
                handle.append(display(bundle, raw=True, display_id=True))

    return draw


def _as_text() -> Show:
    last = [""]

    def draw(training: Training, newest_metrics: Sequence[LatestMetric], remark: str) -> None:
        line = " ".join(filter(None, (describe_training(training), escape_control(remark))))
        if line != last[0]:
            last[0] = line
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    return draw


def describe_training(training: Training) -> str:
    status = training.status
    if status.phase.is_terminal:
        return escape_control(describe_end(training))
    return escape_control(
        f"{training.display_name} {status.phase.value or 'new'}: {describe_status(status)}"
    )
