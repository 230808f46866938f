"""Which pods a control plane lets go when it sweeps: its own alone."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

from atoll.backends.kubernetes.client import Cluster
from atoll.backends.kubernetes.followups import GangWriter
from atoll.backends.kubernetes.names import FINALIZER, MANAGED, PLANE, UID
from atoll.backends.kubernetes.options import KubernetesOptions as Options


def pod(name: str, plane: str | None) -> dict[str, Any]:
    labels = {MANAGED: "atoll", UID: name} | ({PLANE: plane} if plane else {})
    metadata = {"name": name, "namespace": "a", "labels": labels, "finalizers": [FINALIZER]}
    return {"metadata": metadata, "spec": {}, "status": {}}


PODS = [pod("operators", None), pod("known", None), pod("laptops", "one"), pod("other", "two")]


def is_selected(labels: dict[str, str], selector: str) -> bool:
    """As the API server selects, as far as sweeping asks it to."""
    for part in selector.split(","):
        name, has_value, value = part.partition("=")
        if part.startswith("!"):
            if part[1:] in labels:
                return False
        elif not has_value or labels.get(name) != value:
            return False
    return True


@pytest.mark.parametrize(
    ("plane", "swept"), [(None, ["operators"]), ("one", ["laptops"]), ("three", [])]
)
def test_a_sweep_leaves_pods_of_other_control_planes_alone(
    plane: str | None, swept: list[str]
) -> None:
    patched: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.method == "PATCH":
            patched.append(request.url.path.rpartition("/")[2])
            return httpx2.Response(200, json={})
        selector = request.url.params["labelSelector"]
        items = [p for p in PODS if is_selected(p["metadata"]["labels"], selector)]
        return httpx2.Response(200, json={"items": items, "metadata": {"resourceVersion": "1"}})

    async def known() -> set[str]:
        return {"known"}

    async def sweep() -> None:
        transport = httpx2.MockTransport(answer)
        client = httpx2.AsyncClient(base_url="http://cluster", transport=transport)
        options = Options(labels={PLANE: plane} if plane else {})
        none: Any = None
        await GangWriter(Cluster(client), options, none, none, is_owner=True).sweep(known)
        await client.aclose()

    asyncio.run(sweep())
    assert patched == swept
