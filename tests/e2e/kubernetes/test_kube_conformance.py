"""The one fault table, on pods of a real cluster. Rows it cannot provoke are listed with why."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conformance.table import ROWS, Row
from tests.conformance.test_table import run as run_row
from tests.e2e.kubernetes.conformance_backend import KubernetesBackend
from tests.e2e.kubernetes.conftest import Site, make_space
from tests.e2e.kubernetes.nodes import Node


@pytest.fixture(scope="module")
def backend(
    site: Site, spare_node: Callable[[], Node], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KubernetesBackend]:
    if not site.nodes:
        pytest.skip("the table needs nodes of its own: kubelet and containerd on this machine")
    with make_space(site) as space:
        made = KubernetesBackend(space, tmp_path_factory.mktemp("rows"), spare_node)
        yield made
        made.close()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_kubernetes(backend: KubernetesBackend, row: Row) -> None:
    run_row(backend, row)
