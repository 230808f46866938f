from __future__ import annotations

from collections.abc import Iterator

import modal
import pytest
from tests.support.modal_stand_in import ModalStandIn


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModalStandIn]:
    """A server of our own, and a client that knows no other."""
    server = ModalStandIn()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    modal.Client.set_env_client(None)
    yield server
    modal.Client.set_env_client(None)
    server.close()
