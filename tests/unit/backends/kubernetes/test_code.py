"""Code in ConfigMaps: its parts, and who owns them."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from atoll.backends.kubernetes.code import (
    PART_BYTES,
    CodeMaps,
    CodeMissing,
    part_names,
    render_parts,
)
from atoll.core.errors import Conflict, NotFound
from atoll.core.spec import Code

CONTENT = bytes(range(256)) * 8000
CODE = Code(content=CONTENT, size=len(CONTENT), unpacked=9, files=1)


class Maps:
    """The ConfigMaps of one namespace."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, Any]] = {}
        self.before_patch: list[str] = []  # what somebody deletes before the next patch

    async def create(self, kind: str, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        name = body["metadata"]["name"]
        if name in self.kept:
            raise Conflict(name)
        metadata = {**body["metadata"], "uid": name, "resourceVersion": "1"}
        self.kept[name] = {**body, "metadata": metadata}
        return self.kept[name]

    async def patch(
        self, kind: str, namespace: str, name: str, patch: dict[str, Any], type: str = "merge"
    ) -> dict[str, Any]:
        while self.before_patch:
            self.kept.pop(self.before_patch.pop(), None)
        if name not in self.kept:
            raise NotFound(kind, name)
        owners = patch.get("metadata", {}).get("ownerReferences", [])
        self.kept[name]["metadata"].setdefault("ownerReferences", []).extend(owners)
        return self.kept[name]

    async def delete(self, kind: str, namespace: str, name: str, *, uid: str, version: str) -> None:
        del self.kept[name]

    def owners(self) -> list[list[str]]:
        maps = self.kept.values()
        return [[o["uid"] for o in m["metadata"].get("ownerReferences", [])] for m in maps]


def owner(uid: str) -> dict[str, Any]:
    return {"apiVersion": "batch/v1", "kind": "Job", "name": uid, "uid": uid}


def test_parts_fit_into_config_maps_and_are_the_archive_in_order() -> None:
    parts = render_parts(CODE)
    assert (
        [part["metadata"]["name"] for part in parts] == part_names(CODE) == sorted(part_names(CODE))
    )
    data = [base64.b64decode(part["binaryData"]["part"]) for part in parts]
    assert b"".join(data) == CONTENT
    assert max(map(len, data)) <= PART_BYTES
    assert part_names(CODE.by_digest()) == part_names(CODE)


def test_trainings_with_the_same_code_own_it_together() -> None:
    async def check() -> None:
        maps = Maps()
        code: Any = CodeMaps(maps)  # type: ignore[arg-type]
        for uid in ("one", "two"):
            await code.put("ns", CODE)
            await code.keep("ns", CODE, owner(uid))
        assert maps.owners() == [["one", "two"]] * 3
        await code.drop_unowned("ns", CODE)
        assert len(maps.kept) == 3

    asyncio.run(check())


def test_code_that_went_with_its_last_owner_meanwhile_is_put_again() -> None:
    async def check() -> None:
        maps = Maps()
        code: Any = CodeMaps(maps)  # type: ignore[arg-type]
        await code.put("ns", CODE)
        maps.before_patch = part_names(CODE)
        await code.keep("ns", CODE, owner("two"))
        assert maps.owners() == [["two"]] * 3

    asyncio.run(check())


def test_a_digest_whose_code_is_not_there_is_told_and_what_nobody_owns_can_be_removed() -> None:
    async def check() -> None:
        maps = Maps()
        code: Any = CodeMaps(maps)  # type: ignore[arg-type]
        with pytest.raises(CodeMissing, match="no ConfigMap atoll-code-"):
            await code.put("ns", CODE.by_digest())
        await code.put("ns", CODE)
        await code.put("ns", CODE.by_digest())
        await code.drop_unowned("ns", CODE)
        assert maps.kept == {}
        await code.put("ns", None)
        await code.keep("ns", None, owner("one"))

    asyncio.run(check())
