"""The sandboxes of launches from scripts, which several processes may follow."""

from __future__ import annotations

from atoll.backends.modal.executor import ModalBackend
from atoll.replicas.recorded import RecordedLaunches


class ScriptSandboxes(RecordedLaunches, ModalBackend):
    """Records are in the executor's own store, where a launch is found by its name alone."""
