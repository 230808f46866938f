"""Every method has its `_async` twin, and the two take the same."""

from __future__ import annotations

import inspect

import pytest

from atoll import Client, DistributedTraining

NOT_FOR_USERS = {"run", "arun"}
HAS_NO_TWIN = {"local"}  # makes an object, asks nobody


def methods(kind: type) -> dict[str, object]:
    return {
        name: member
        for name, member in inspect.getmembers(kind, inspect.isroutine)
        if not name.startswith("_") and name not in NOT_FOR_USERS
    }


@pytest.mark.parametrize("kind", [Client, DistributedTraining])
def test_every_method_has_an_async_twin_with_an_equal_signature(kind: type) -> None:
    found = methods(kind)
    plain = {name for name in found if not name.endswith("_async")} - HAS_NO_TWIN
    twins = {name.removesuffix("_async") for name in found if name.endswith("_async")}
    assert plain == twins
    for name in plain:
        sync, twin = (
            inspect.signature(found[each])  # type: ignore[arg-type]
            for each in (name, f"{name}_async")
        )
        assert sync.parameters == twin.parameters, name


def test_the_contracts_members_are_there() -> None:
    members = """name phase is_terminal world ranks rank_exits root_cause scale refresh
    wait_until_min_world wait_until_target_world wait_until_complete result results cancel delete
    logs stream_logs events metrics stats rounds bench bench_diagnostics""".split()
    assert [m for m in members if not hasattr(DistributedTraining, m)] == []
    assert [
        m for m in ("deploy_distributed", "get", "list", "local") if not hasattr(Client, m)
    ] == []
