from __future__ import annotations

import importlib
import sys

import pytest

from atoll.core.errors import ValidationError


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_a_callback_always_imports_and_says_what_to_install(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    module = importlib.import_module(f"atoll.integrations.{library}")
    module.__dict__.pop("DiLoCoCallback", None)
    callback = module.DiLoCoCallback
    with pytest.raises(
        RuntimeError, match=rf"^DiLoCoCallback needs {library}.*pip install '\.\[{library}\]'"
    ):
        callback(sync_every=5)


def test_a_world_of_all_replicas_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from atoll.integrations.transformers import TrainerHooks

    for name, value in {"ATOLL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(ValidationError, match="--replicas"):
        TrainerHooks(sync_every=5)
    # Under torchrun inside a rank they are of the processes of this replica.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert TrainerHooks(sync_every=5).diloco is None
