"""Processes that tests start import the same atoll as the tests do."""

from __future__ import annotations

import contextlib
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

with contextlib.suppress(ImportError):  # not in .venv-integrations
    from hypothesis import settings

    # An example that takes long says how busy the machine is.
    settings.register_profile("atoll", deadline=None)
    settings.load_profile("atoll")

_SOURCE = str(Path(__file__).parents[1] / "src")
if _SOURCE not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [_SOURCE, os.environ.get("PYTHONPATH", "")])
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
