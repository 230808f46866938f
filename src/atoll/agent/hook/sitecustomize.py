"""Python runs this in every rank before the program: it registers a dump of all stacks.

The folder of this file is first in the PYTHONPATH of ranks. A signal has the dump written by C
code, whatever the program does, into memory of the process that `atoll/agent/stacks.py` reads
through /proc. It costs a file descriptor. A `sitecustomize` of the user's own runs, too.
"""

import os
import sys


def _register() -> None:
    try:
        import faulthandler

        numbers = __import__("_signal")  # what `signal` is made of: that takes 3 ms to import

        file = os.memfd_create("atoll-stacks")
        faulthandler.register(numbers.SIGRTMAX - 2, file=file, all_threads=True, chain=False)
    except Exception:  # another system, or a Python without it: the rank runs all the same
        return


def _run_next() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
    own = sys.modules.pop(__name__, None)
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if own is not None:
            sys.modules[__name__] = own


if __name__ == "sitecustomize":
    _register()
    _run_next()
