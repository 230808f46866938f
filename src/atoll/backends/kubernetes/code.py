"""The code of a training on a cluster: an archive in ConfigMaps, in parts, under its digest.

Pods mount the parts and unpack them before their command starts, so nobody has to reach a server
or a store. Trainings with the same code share the ConfigMaps. Each of them owns them, its Job or
its Training object, and Kubernetes deletes them with the last owner.
"""

from __future__ import annotations

import base64
import contextlib
from typing import Any

from atoll.backends.kubernetes.client import Cluster
from atoll.backends.kubernetes.names import ARCHIVE_VOLUME, CODE, CODE_VOLUME, MANAGED, REPORT_DIR
from atoll.backends.launch import CodeLayout
from atoll.core.errors import Conflict, NotFound, Temporary
from atoll.core.spec import Code

Json = dict[str, Any]

PART_BYTES = 900_000  # a ConfigMap holds 1 MiB with everything in it
ARCHIVE_DIR = "/atoll/archive"
CODE_DIR = "/atoll/code"
UNPACK = "unpack.py"  # the key in the gang's ConfigMap
PART = "part"
ATTEMPTS = 5  # to own code whose last other owner is deleted at the same moment


def part_names(code: Code) -> list[str]:
    count = -(-code.size // PART_BYTES)
    return [f"atoll-code-{code.digest[:32]}-{number:03}" for number in range(count)]


def render_parts(code: Code) -> list[Json]:
    labels = {MANAGED: "atoll", CODE: code.digest[:32]}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, "labels": labels},
            "immutable": True,
            "binaryData": {PART: base64.b64encode(_part(code, number)).decode()},
        }
        for number, name in enumerate(part_names(code))
    ]


def _part(code: Code, number: int) -> bytes:
    return code.content[number * PART_BYTES : (number + 1) * PART_BYTES]


def render_code_volumes(code: Code) -> list[Json]:
    sources = [
        {"configMap": {"name": name, "items": [{"key": PART, "path": name[-3:]}]}}
        for name in part_names(code)
    ]
    return [
        {"name": ARCHIVE_VOLUME, "projected": {"sources": sources}},
        {"name": CODE_VOLUME, "emptyDir": {}},
    ]


def render_code_mounts() -> list[Json]:
    return [
        {"name": ARCHIVE_VOLUME, "mountPath": ARCHIVE_DIR, "readOnly": True},
        {"name": CODE_VOLUME, "mountPath": CODE_DIR},
    ]


def code_layout(code: Code | None) -> CodeLayout | None:
    if code is None:
        return None
    return CodeLayout(f"{REPORT_DIR}/{UNPACK}", ARCHIVE_DIR, f"{CODE_DIR}/{code.digest[:12]}")


class CodeMissing(Temporary):
    """The ConfigMaps of code that is known by its digest alone are not there."""


class CodeMaps:
    """Puts code into a namespace, and ties it to its owners."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def put(self, namespace: str, code: Code | None) -> None:
        """The ConfigMaps are there. Raises CodeMissing if they are not and cannot be made."""
        if code is None:
            return
        if code.is_digest:
            await self._check_there(namespace, code)
            return
        for part in render_parts(code):
            with contextlib.suppress(Conflict):  # they never change
                await self._cluster.create("configmaps", namespace, part)

    async def _check_there(self, namespace: str, code: Code) -> None:
        for name in part_names(code):
            try:
                await self._read(namespace, name)
            except NotFound as error:
                raise CodeMissing(
                    f"the code of the training is not there: no ConfigMap {name} in {namespace}"
                ) from error

    async def keep(self, namespace: str, code: Code | None, owner: Json) -> None:
        """The ConfigMaps are there and have this owner, whoever deletes another one meanwhile."""
        for name in () if code is None else part_names(code):
            await self._keep(namespace, name, code, owner)

    async def _keep(self, namespace: str, name: str, code: Code | None, owner: Json) -> None:
        patch = {"metadata": {"ownerReferences": [owner]}}
        for attempt in range(ATTEMPTS):
            try:
                await self._cluster.patch("configmaps", namespace, name, patch, type="strategic")
                return
            except NotFound:  # not yet, or gone with its last owner
                if attempt == ATTEMPTS - 1:
                    raise
            await self.put(namespace, code)

    async def drop_unowned(self, namespace: str, code: Code | None) -> None:
        """For code of which nothing came: what has no owner is deleted."""
        for name in () if code is None else part_names(code):
            with contextlib.suppress(NotFound, Conflict):
                metadata = (await self._read(namespace, name))["metadata"]
                if not metadata.get("ownerReferences"):
                    version = metadata["resourceVersion"]
                    await self._cluster.delete(
                        "configmaps", namespace, name, uid=metadata["uid"], version=version
                    )

    async def _read(self, namespace: str, name: str) -> Json:
        """A patch of nothing, as roles allow no other way to read one."""
        return await self._cluster.patch("configmaps", namespace, name, {})
