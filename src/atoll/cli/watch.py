"""`status -w` and `top`: a screen that is drawn again, or lines where there is no screen."""

from __future__ import annotations

import shutil
import sys
import time
from math import inf

from atoll.cli.report import world_text
from atoll.cli.show import print_json, training_json
from atoll.cli.tables import ps_table, ranks_table, status_text
from atoll.cli.terminal import can_redraw
from atoll.core.status import Training
from atoll.sdk.client import Client

_CLEAR = "\x1b[H\x1b[J"


class Watched:
    """Each state of one training, as it comes."""

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self._is_screen = can_redraw(sys.stdout) and not is_json
        self._version = -1
        self._last: Training | None = None

    def see(self, training: Training) -> None:
        if training.resource_version == self._version:
            return
        self._version, self._last = training.resource_version, training
        if self._is_json:
            print_json(training_json(training))
        elif self._is_screen:
            print(_CLEAR + fitted(status_text(training)), end="", flush=True)
        else:
            print(f"{training.name} {world_text(training)}", flush=True)

    def close(self) -> None:
        """The last state in full: a screen cuts it, lines do not have it."""
        if self._last is not None and not self._is_json:
            print((_CLEAR if self._is_screen else "") + status_text(self._last))


def look_again(client: Client, interval_s: float, count: int | None, *, is_json: bool) -> None:
    """All trainings, `count` times; for ever on a terminal, once elsewhere, if not said."""
    is_screen = can_redraw(sys.stdout) and not is_json
    left: float = inf if is_screen else 1
    left = left if count is None else count
    while left > 0:
        found = [training.last for training in client.list()]
        if is_json:
            print_json([training_json(t) for t in found])
        elif is_screen:
            print(_CLEAR + fitted(top_text(found)), end="", flush=True)
        else:
            print(top_text(found), flush=True)
        left -= 1
        if left > 0:
            time.sleep(interval_s)
    if is_screen:
        print()


def top_text(found: list[Training]) -> str:
    """What runs first, then what is over; the ranks of what runs below."""
    now = time.time()
    alive = [t for t in found if not t.status.phase.is_terminal]
    over = [t for t in found if t.status.phase.is_terminal]
    for group in (alive, over):
        group.sort(key=lambda training: training.created_at, reverse=True)
    running = sum(rank.phase == "Running" for t in alive for rank in t.status.ranks)
    counts = f"{len(alive)} active, {running} ranks running, {len(over)} over"
    head = f"{time.strftime('%H:%M:%S')}  {counts}"
    parts = [head, ps_table(alive + over[:10])]
    parts += [f"{t.name}\n{ranks_table(t, now)}" for t in alive if t.status.ranks]
    return "\n\n".join(parts)


def fitted(text: str) -> str:
    """As much as the screen holds, so that drawing again begins at the top."""
    width, height = shutil.get_terminal_size()
    lines = text.split("\n")
    if len(lines) >= height:
        lines = [*lines[: height - 2], f"… {len(lines) - height + 2} more lines"]
    # A cut inside a colour would leave it on.
    return "\n".join(line if "\x1b" in line else line[:width] for line in lines)
