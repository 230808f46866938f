"""Runs a training again under another name, with a copy of its spec and code."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator

from msgspec.structs import replace

from atoll.core.checks import check_name
from atoll.core.errors import Conflict, NotFound
from atoll.core.model import SpecModel
from atoll.core.ports import Store
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Training
from atoll.server.handlers.admission import admit, check_backend, check_run
from atoll.server.handlers.trainings import idempotency_key
from atoll.server.http.encoded import redact
from atoll.server.http.operations import Answer, ApiCall, json_answer

MAX_NAME_CHARS = 63  # characters of a name
MAX_NAMES = 1000
_RERUN = re.compile(r"-r([0-9]{1,3})$")


class Rerun(SpecModel, frozen=True):
    """What to change. `env` is merged over the copied variables."""

    name: str | None = None  # default: made from the old name
    world_size: WorldSize | None = None
    env: dict[str, str] = {}
    args: list[str] | None = None

    def __post_init__(self) -> None:
        if self.name is not None:
            check_name("name", self.name)


async def rerun(call: ApiCall) -> Answer:
    changes: Rerun = call.body
    old, key = await call.plane.store.get(call.key), idempotency_key(call)
    source = await _with_source(call.plane.store, old)
    spec = admit(apply_changes(source, changes), call.plane, call.namespace, is_code_stored=True)
    await check_run(spec, call.plane, call.namespace)
    await check_backend(spec, call.plane, call.namespace)
    executor = call.plane.executors[spec.executor or ""]
    if missing := executor.missing_path(spec):
        raise Conflict(f"training {old.name!r} cannot be run again: {missing} is gone")
    for name in names_after(old.name) if changes.name is None else (changes.name,):
        new = Training(
            namespace=call.namespace,
            uid=uuid.uuid4().hex,
            spec=replace(spec, name=name),
            created_at=time.time(),
        )
        try:
            stored = await call.plane.store.create(new, idempotency_key=key)
        except NotFound as error:
            raise _code_missing(old) from error
        except Conflict:
            if changes.name is not None:
                raise
            continue
        return json_answer(redact(stored), 201 if stored.uid == new.uid else 200)
    raise Conflict(f"{old.name!r} was run again {MAX_NAMES} times: give the new one a name")


def apply_changes(spec: TrainingSpec, changes: Rerun) -> TrainingSpec:
    """The spec with these changes, and without a cancellation."""
    return replace(
        spec,
        cancel=False,
        world_size=changes.world_size or spec.world_size,
        env={**spec.env, **changes.env},
        args=spec.args if changes.args is None else changes.args,
    )


def names_after(name: str) -> Iterator[str]:
    """Names for runs after `name`: `a-r2`, `a-r3`, …"""
    match = _RERUN.search(name)
    base, first = (name, 2) if match is None else (name[: match.start()], int(match[1]) + 1)
    for number in range(first, first + MAX_NAMES):
        end = f"-r{number}"
        yield base[: MAX_NAME_CHARS - len(end)].rstrip("-") + end


async def _with_source(store: Store, old: Training) -> TrainingSpec:
    spec = old.spec
    if spec.source is None or not spec.source.is_digest:
        return spec
    try:
        content = await store.source(old)
    except NotFound as error:
        raise _code_missing(old) from error
    return replace(spec, source=replace(spec.source, content=content))


def _code_missing(old: Training) -> Conflict:
    return Conflict(f"training {old.name!r} cannot be run again: its code is gone")
