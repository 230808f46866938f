"""Whatever a rank reports, everybody can read on: the report is kept, or refused, or left out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.backends.metrics_token import token_for
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Training
from atoll.metrics.store import MetricStore
from atoll.server.app import create_app
from atoll.server.http.auth import hash_token
from atoll.store.database import SQLiteTokens
from atoll.store.sqlite import MemoryStore

KEY = b"k" * 32
READ = (
    *("/v1/trainings", "/v1/trainings/t", "/v1/trainings/t/metrics", "/v1/trainings/t/rounds"),
    *("/v1/trainings/t/rounds?costs", "/v1/metrics?name=loss&ranks", "/metrics", "/readyz"),
    *("/ui/rows", "/ui/page/t", "/ui/metrics/t?name=loss", "/ui/rounds/t"),
)

odd = st.sampled_from(
    [0, 1, -1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**64), 10**30]
    + [0.5, 1.7e308, -1.7e308, 5e-324, 1e18, "nan", "inf", "-inf", "1e400", "x", None, True, [], {}]
)


def mostly(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A report with all its numbers odd would be refused for the first."""
    return st.integers(0, 9).flatmap(lambda number: good if number else odd)


now = mostly(st.just(time.time()))
whole, real = mostly(st.integers(0, 9)), mostly(st.floats(0, 9))
wholes, reals = st.lists(whole, max_size=2), st.lists(real, max_size=2)
point = st.one_of(
    st.tuples(now, whole, real),
    st.tuples(odd, whole, real),
    st.tuples(now, whole, real, real, real, whole, whole),
    st.tuples(now, odd, odd, odd, odd, odd, odd),
    st.lists(odd, max_size=8),
)
numbers = {"run": st.just("r"), "fragment": st.just(0), "round": st.integers(0, 3)}
facts = st.fixed_dictionaries(
    {**numbers, "members": wholes},
    optional={
        **{"tokens": real, "at": now, "steps": whole, "attempt": whole, "fragments": whole},
        **{"weights": reals, "sizes": wholes, "missing": wholes, "parameters": whole},
    },
)
word = st.fixed_dictionaries(
    {**numbers, "cost": st.tuples(st.just(0), whole, whole, whole, real, real)},
    optional={"facts": facts},
).map(lambda one: one | {"facts": one.get("facts", {}) | {k: one[k] for k in numbers}})
points = st.dictionaries(st.sampled_from(["loss", "tokens"]), st.lists(point, max_size=3))
report = st.fixed_dictionaries(
    {
        **{"rank": st.just(0), "attempt": whole, "process": whole},
        **{"n": mostly(st.integers(1, 9)), "metrics": points},
    },
    optional={"skipped": whole, "idle_s": real, "rounds": st.lists(word, max_size=2)},
)


class Reading:
    """A server without a controller, and one training."""

    def __init__(self, where: Path) -> None:
        self.runner = asyncio.Runner()
        self.where = where
        self.stack = contextlib.AsyncExitStack()
        self.http: httpx2.AsyncClient = self.run(self._open())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    async def _open(self) -> httpx2.AsyncClient:
        store, tokens = MemoryStore(), SQLiteTokens(self.where / "db")
        await tokens.add(hash_token("owner"), "n", "owner", 0.0)
        spec = TrainingSpec(
            name="t", command=["true"], world_size=WorldSize(min=1, target=1, max=1)
        )
        await store.create(Training(namespace="n", uid="u", spec=spec))
        app = create_app(
            store=store,
            tokens=tokens,
            executors={},
            metrics=MetricStore(self.where / "series.db"),
            report_key=KEY,
        )
        await self.stack.enter_async_context(app.lifespan_context(app))
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        return httpx2.AsyncClient(transport=transport, base_url="http://plane")

    async def check(self, body: bytes) -> int:
        reporting = {"Authorization": f"Bearer {token_for(KEY, 'n', 'u')}"}
        taken = await self.http.post("/v1/trainings/t/metrics", content=body, headers=reporting)
        assert taken.status_code in (200, 400, 413), (body, taken.text)
        owner = {"Authorization": "Bearer owner"}
        for path in READ:
            answer = await self.http.get(path, headers=owner)
            assert answer.status_code == 200, (path, body, answer.text)
        return int(taken.status_code)

    def close(self) -> None:
        async def close() -> None:
            await self.http.aclose()
            await self.stack.aclose()

        self.run(close())
        self.runner.close()


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
    found = Reading(tmp_path_factory.mktemp("reports"))
    yield found
    found.close()


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(reports=st.lists(report, min_size=1, max_size=3))
def test_no_report_keeps_anybody_from_reading(reading: Reading, reports: list[Any]) -> None:
    for each in reports:
        fresh = {**each, "id": uuid.uuid4().hex}  # else it may count as one that arrived before
        reading.run(reading.check(json.dumps(fresh).encode()))


def body(**fields: Any) -> bytes:
    whole = {"rank": 0, "attempt": 1, "process": 0, "id": "b", "n": 1, "metrics": {}, **fields}
    return json.dumps(whole).encode()


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"skipped": 2**64 - 1}, 400),
        ({"n": 2**64 - 1}, 400),
        ({"rank": 2**64 - 1}, 400),
        ({"idle_s": 1e300}, 400),
        ({"metrics": {"loss": [["nan", 1, 0.5]]}}, 200),
        ({"metrics": {"loss": [[1e300, 1, 0.5]]}}, 200),
        ({"metrics": {"loss": [[1.0, 1e300, 0.5]]}}, 200),
        ({"metrics": {"loss": [[1.0, 1, "inf", "nan", "-inf", 3, 0]]}}, 200),
    ],
)
def test_numbers_that_cannot_be_kept_are_refused_or_counted(
    reading: Reading, fields: dict[str, Any], status: int
) -> None:
    fields = {"id": str(fields), **fields}
    assert reading.run(reading.check(body(**fields))) == status


def test_a_point_that_is_left_out_is_counted_and_the_others_are_kept(tmp_path: Path) -> None:
    metric_store = MetricStore(tmp_path / "series.db")
    points = [["nan", 1, 0.5], [1.0, 2, 0.25], [1.0, 3, "nan"]]
    metric_store.take("u", [body(metrics={"loss": points})])
    assert metric_store.skipped("u") == 1
    (one,) = metric_store.series("u")
    assert [list(column) for column in one.series.columns][0] == [1.0, 1.0]
