"""The backends whose hosts see neither each other nor a folder together, only an object store.

Records, code and sources of a training are in the store under one prefix. A backend adds its verbs
to this, and where the prefix is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.agent.bucket import Objects
from atoll.agent.metric_sinks import METRICS
from atoll.backends.launch import TORCHRUN_VARIABLES, RankLayout
from atoll.backends.recorded import Json, RecordedBackend
from atoll.backends.records import Timing
from atoll.backends.results import RESULTS
from atoll.core.status import Training

SOURCE = "source.file"  # among the records, and removed with them
FOLDER = "/tmp/atoll"  # of a rank, for what is fetched


class StoreBackend(RecordedBackend):
    """A subclass has the verbs, `prefix`, and logs. `poll_s`: how often ranks look into the store;
    they show in every fifth look that they live."""

    has_network = False

    def __init__(
        self, *, python: str, poll_s: float, clock: Callable[[], float] | None = None
    ) -> None:
        super().__init__(clock=clock)
        self.timing = timing_of(poll_s)
        self._python = python
        self._poll_s = poll_s
        self._offsets: dict[str, Objects] = {}

    def prefix(self, training: Training, part: str) -> str:
        """The URI of a part of what the store has of the training; of all, if `part` is empty."""
        raise NotImplementedError

    def record_store_of(self, training: Training) -> Objects:
        if training.uid not in self._offsets:
            self._offsets[training.uid] = Objects.open(self.prefix(training, "records"))
        return self._offsets[training.uid]

    def result_store(self, training: Training) -> Objects:
        return Objects.open(self.prefix(training, RESULTS))

    def rank_layout(self, training: Training) -> RankLayout:
        return RankLayout(
            python=self._python,
            shell="/bin/sh",
            source=f"{FOLDER}/{training.uid}",
            packages=None,
            has_atoll=True,
            rendezvous_uri=self.prefix(training, "rendezvous"),
            runs_uri=self.prefix(training, "").rstrip("/").rpartition("/")[0] + "/runs",
            meeting=None,
            metrics_uri=self.prefix(training, METRICS),
        )

    def launch(self, training: Training) -> Json:
        launch, source = super().launch(training), training.spec.source
        # A torchrun in a rank is one of its own: there is nobody it could meet.
        alone = {name for name in TORCHRUN_VARIABLES if name not in training.spec.env}
        where = {} if source is None else {f"{FOLDER}/{training.uid}/{source.filename}": SOURCE}
        return {
            **launch,
            "env": {name: value for name, value in launch["env"].items() if name not in alone},
            "unset": sorted({*launch["unset"], *alone}),
            "files": where,
            "poll_s": self._poll_s,
            "heartbeat_s": self._poll_s * 5,
        }

    async def prepare(self, training: Training) -> None:
        source = training.spec.source
        if source is not None:
            await self._put_bytes(training, SOURCE, source.content)

    async def clear(self, training: Training, *, with_logs: bool) -> None:
        if not with_logs:
            return
        everything = Objects.open(self.prefix(training, ""))
        names = await asyncio.to_thread(everything.entries)
        await asyncio.to_thread(everything.delete, list(names))
        self._offsets.pop(training.uid, None)


def timing_of(poll_s: float) -> Timing:
    """A wrapper that misses three heartbeats, and some, is lost."""
    return Timing(
        observe_s=poll_s,
        settle_s=0.5 + 2 * poll_s,
        heartbeat_timeout_s=1.0 + 17 * poll_s,
        cause_wait_s=0.5 + 2 * poll_s,
        stop_wait_s=1.0 + 4 * poll_s,
    )
