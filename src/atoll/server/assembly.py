"""`assemble()`: the background tasks that every control plane has, wired to one another.

The control plane of one machine and the operator differ in store, executors and clock, and in
nothing that is here.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence

from atoll.controller.informer import Informer
from atoll.controller.loop import Controller, keep_swept
from atoll.core.clock import Now
from atoll.core.config import RoundStore
from atoll.core.metrics import RankUsage
from atoll.core.ports import Executor, Store
from atoll.metrics.collect import Collector
from atoll.metrics.store import MetricStore
from atoll.rounds.follow import RoundFollower, metrics_uri_of, store_access_of
from atoll.server.background import CONTROLLER, Work
from atoll.server.deliver import Deliverer
from atoll.server.gauges import Gauges
from atoll.store.outbox import Outbox

Usage = Callable[[], Awaitable[Mapping[str, Sequence[RankUsage]]]]


def assemble(
    *,
    store: Store,
    executors: Mapping[str, Executor],
    kinds: Mapping[str, str],
    informer: Informer,
    clock: Callable[[], Now],
    metrics: MetricStore,
    gauges: Gauges,
    outbox: Outbox,
    round_stores: Sequence[RoundStore],
    own_namespace: str,
    machine_use: Usage | None = None,
    may_return: Callable[[str], bool] = lambda uid: False,
) -> dict[str, Work]:
    """The tasks by name; `CONTROLLER` is the one without which nothing works.

    `kinds` has the kind of each executor. Stores of rounds that the configuration names are read
    for trainings of `own_namespace` alone. `machine_use` measures ranks on this machine;
    `may_return` says whether a training that is not stored may be adopted again.
    """

    def control() -> Awaitable[None]:
        controller = Controller(
            store,
            executors,
            informer=informer,
            clock=clock,
            on_pass=lambda done: gauges.record_pass(done.seconds),
            idle_s=metrics.idle_tracker.idle_s,
            rounds=metrics.rounds.observed,
        )
        metrics.rounds.on_news = controller.wake
        return controller.run()

    collector = Collector(metrics, metrics_uri_of(executors), machine_use, may_return)
    follower = RoundFollower(
        metrics.rounds, store_access_of(executors, kinds), round_stores, own_namespace
    )
    tasks: dict[str, Work] = {
        CONTROLLER: control,
        "webhooks": Deliverer(outbox).run,
        "metrics": lambda: collector.run(informer),
        "rounds": lambda: follower.run(informer),
    }
    for name, executor in executors.items():
        tasks[f"sweep of {name}"] = functools.partial(keep_swept, store, executor)
    return tasks
