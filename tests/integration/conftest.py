from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.control_plane import ControlPlane, serving


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane of its own for one test."""
    with serving(tmp_path / "state") as plane:
        yield plane


@pytest.fixture(scope="module")
def shared_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One that the tests of a module share; they neither kill it nor fill it."""
    with serving(tmp_path_factory.mktemp("plane") / "state") as plane:
        yield plane
