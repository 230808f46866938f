"""The first of the `atoll` command: Ctrl-C is one line while the rest is loaded.

It imports only what Python has loaded already; what comes before is Python's own start.
"""

import _signal  # type: ignore[import-not-found]
import os

INTERRUPTED = 128 + _signal.SIGINT


def leave(number: int, frame: object) -> None:
    os.write(2, b"\natoll: interrupted, nothing was started\n")
    os._exit(INTERRUPTED)


# It may be ignored, as after `nohup`.
has_default_handler = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
if has_default_handler:
    _signal.signal(_signal.SIGINT, leave)


def main() -> None:
    from atoll.cli.main import main as run

    run()
