"""Processes that tests start import the same atoll as the tests do, and can be interrupted."""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# `make test &` and `nohup make test` ignore these, and what is ignored is inherited. A handler is
# not: the suite goes on ignoring them, and what it starts begins as in a terminal.
for ignored in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, lambda *_: None)

# Thousands of processes of atoll are started, and each would compile it anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

_PATHS = [str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
if not os.environ.get("ATOLL_INTEGRATIONS"):  # those have everything as users have it
    _PATHS.insert(0, str(Path(__file__).with_name("support") / "light_torch"))
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys(path for each in _PATHS for path in each.split(os.pathsep) if path)
)

if find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # How long a busy machine takes for an example says nothing about a test.
    settings.register_profile("atoll", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("atoll")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write golden files instead of comparing"
    )
