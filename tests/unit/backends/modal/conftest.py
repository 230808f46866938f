from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.modal_stand_in import ModalStandIn, forget_client


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModalStandIn]:
    """A server of our own, and a client that knows no other."""
    server = ModalStandIn()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    forget_client()
    yield server
    forget_client()
    server.close()
