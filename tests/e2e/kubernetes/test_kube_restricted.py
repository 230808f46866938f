"""A namespace that enforces the pod security standard `restricted`, with the documented options."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from tests.e2e.kubernetes.conftest import REPOSITORY, Operator, Space
from tests.e2e.kubernetes.images import ATOLL, ETCD

pytestmark = pytest.mark.usefixtures("pods")

ENFORCED = "pod-security.kubernetes.io/enforce=restricted"


def documented() -> dict[str, object]:
    """The options as docs/kubernetes.md gives them."""
    page = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    found = re.search(r"`restricted`:\n\n```json\n(.*?)```", page, re.DOTALL)
    assert found
    options: dict[str, object] = json.loads(found[1])
    return options


def test_a_restricted_namespace_takes_ranks_gate_agents_etcd_and_bench(
    space: Space, start_operator: Callable[..., Operator]
) -> None:
    space.site.kubectl("label", "namespace", space.name, ENFORCED)
    options = {**documented(), "agentImage": ATOLL, "etcdImage": ETCD}
    start_operator("one", "--options", json.dumps(options))
    space.submit(
        "tiny",
        command=["sh", "-c", "echo $$; sleep 20"],
        rendezvous={"backend": "etcd-v2"},
        mesh=True,
        bench={"mode": "on-start"},
    )
    status = space.until("tiny", "measured", lambda s: s.get("bench", {}).get("result"), 90)
    assert status["mesh"]["state"] == "Ready"
    status = space.until_phase("tiny", "succeeded", 90)
    assert [e["exitCode"] for e in status["rankExits"]] == [0, 0]


def test_without_the_options_the_clusters_words_are_told(space: Space, operator: Operator) -> None:
    space.site.kubectl("label", "namespace", space.name, ENFORCED)
    space.submit("tiny", command=["true"])
    status = space.until(
        "tiny", "it is told", lambda s: "restricted" in str(s.get("ranks", [{}])[0].get("message"))
    )
    assert status["phase"] == "pending"
