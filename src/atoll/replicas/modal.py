"""Replicas on Modal, launched from a script: `ModalExecutor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.backends.modal.options import ModalOptions, check_installed
from atoll.core.config import options_of
from atoll.core.errors import ValidationError
from atoll.replicas.recorded import RecordedReplicas

if TYPE_CHECKING:
    from atoll.replicas.sandboxes import ScriptSandboxes


class ModalExecutor(RecordedReplicas):
    """Replicas as Sandboxes of Modal, one for each attempt of each.

    `image` is a name in a registry or a `modal.Image`, with Python and `atoll[store]`; `store` an
    object store that Modal and this machine reach, such as `s3://bucket/runs`, with the records and
    logs of all launches. Other `options` are those of `ModalOptions`. `command` runs exactly as it
    is, in the image; without it the code of the entrypoint is sent along, with the working
    directory unless `code` is False. `max_restarts`: how often each replica is restarted. Bad
    options raise ValidationError here.
    """

    backend_name = "modal"
    supports_inter_replica_network = False
    launch_word = "set of sandboxes"

    def __init__(
        self,
        image: Any = None,
        *,
        store: str | None = None,
        command: list[str] | tuple[str, ...] | None = None,
        max_restarts: int = 0,
        allow_pickle: bool = False,
        code: bool = True,
        **options: Any,
    ) -> None:
        check_installed(type(self).__name__)
        self._take(command=command, max_restarts=max_restarts, allow_pickle=allow_pickle, code=code)
        if store is None:
            expected = "expected s3://, gs:// or az://: records and logs of launches are there"
            raise ValidationError("store", store, expected)
        given = options | {"store": store}
        self.options = replace_image(options_of(ModalOptions, given), image)
        self.image = image
        self.store = store.rstrip("/")
        self.address = {"store": self.store, "app": self.options.app}

    def make_executor(self) -> ScriptSandboxes:
        from atoll.backends.modal.client import check_credentials
        from atoll.replicas.sandboxes import ScriptSandboxes

        check_credentials()
        return ScriptSandboxes(self.options)


def replace_image(options: ModalOptions, image: Any) -> ModalOptions:
    """With an image, which may be an object that no table can hold."""
    from msgspec.structs import replace

    return replace(options, image=image)
