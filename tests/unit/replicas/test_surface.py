"""How a launched gang lives and ends, on an executor that starts nothing."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from atoll.core import plan
from atoll.core.errors import Denied, NotFound, Permanent, Temporary, ValidationError
from atoll.core.phase import ExitReason
from atoll.core.ports import Executor, Key, StopCause, ignore
from atoll.core.spec import TrainingSpec
from atoll.core.status import (
    DesiredState,
    Exit,
    Followup,
    LogLine,
    Observation,
    ObservedRank,
    Training,
)
from atoll.replicas import plane
from atoll.replicas.surface import ReplicaSurface, read_gpu


class FakeExecutor(Executor):
    """Ranks run as soon as they are asked for, and end when they are asked to, or by `end`."""

    name = "fake"

    def __init__(self) -> None:
        self.desired_states: dict[str, DesiredState] = {}
        self.ended: dict[str, Exit] = {}
        self.applies: list[DesiredState] = []
        self.questions = 0
        self.refusal: Callable[[DesiredState], Exception | None] = lambda desired: None
        self.trouble: Exception | None = None
        self.changed: asyncio.Queue[Key | Exception] = asyncio.Queue()

    async def apply(self, training: Training, desired: DesiredState) -> None:
        self.applies.append(desired)
        error = self.trouble or self.refusal(desired)
        if error is not None:
            raise error
        self.desired_states[training.uid] = desired
        if desired.size == 0:
            self.ended[training.uid] = Exit(
                code=143, at=time.time(), reason="Stopped", is_stopped=True
            )
        self.changed.put_nowait(training.key)

    async def observe(self, training: Training) -> Observation:
        self.questions += 1
        if self.trouble is not None:
            raise self.trouble
        desired, ended = self.desired_states.get(training.uid), self.ended.get(training.uid)
        if desired is None:
            return Observation()
        rank = ObservedRank(
            rank=0, state="exited" if ended else "running", started_at=time.time(), exit=ended
        )
        return Observation(ranks=[rank], desired=desired, is_supervised=ended is None)

    async def release(self, training: Training) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.desired_states.pop(training.uid, None)
        self.ended.pop(training.uid, None)

    async def purge(self, training: Training) -> None:
        await self.release(training)

    async def changes(self) -> AsyncIterator[Key]:
        while True:
            news = await self.changed.get()
            if isinstance(news, Exception):
                raise news
            yield news

    async def logs(
        self,
        training: Training,
        *,
        ranks: Sequence[int] | None = None,
        tail: int | None = None,
        follow: Callable[[], bool] | None = None,
    ) -> AsyncIterator[LogLine]:
        for line in ():
            yield line


class Library(ReplicaSurface):
    backend_name = "fake"
    _stop_grace_s = 0.5

    def __init__(self, executor: FakeExecutor) -> None:
        self.fake = executor

    def _make_backend(self) -> Executor:
        return self.fake

    def trainings(self) -> list[Training]:
        return list(self._plane.call(self._plane.store.list()))


class SharedFake(FakeExecutor):
    is_shared = True

    """Other processes may find its gangs, and stop them."""

    async def find(self, job_name: str, uid: str | None) -> Training | None:
        return None

    async def stop_cause(self, training: Training) -> StopCause:
        return StopCause()

    def stop_elsewhere(self, uid: str) -> None:
        """Another process stops the gang, and nobody here has been told yet."""
        self.desired_states[uid] = DesiredState(
            version=self.desired_states[uid].version + 1, size=0
        )
        self.ended[uid] = Exit(code=143, at=time.time(), reason="Stopped", is_stopped=True)


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "STALE_S", 0.05)
    monkeypatch.setattr(plane, "AFTER_GRACE_S", 0.5)


def test_what_the_executor_will_never_do_ends_the_gang_with_its_words() -> None:
    """As in the control plane: it is tried once, and the training has failed."""

    class Forgetful(FakeExecutor):
        async def observe(self, training: Training) -> Observation:
            return Observation()  # so it is asked a second time

    fake = Forgetful()
    fake.refusal = lambda desired: Permanent("403 forbidden") if len(fake.applies) > 1 else None
    with Library(fake) as library:
        handles = library.launch_replicas(2, "os")
        reports = library.collect(handles, timeout=20)
        assert [report["status"] for report in reports] == ["failed", "failed"]
        assert ["403 forbidden" in report["error"] for report in reports] == [True, True]
        assert [library.poll(handle) for handle in handles] == ["failed", "failed"]
        assert len(fake.applies) == 2


def test_collect_takes_any_iterable_and_refuses_what_is_none() -> None:
    fake = FakeExecutor()
    with Library(fake) as library:
        (handle,) = library.launch_replicas(1, "os")
        library.cancel(handle)
        assert [
            report["rank"] for report in library.collect(each for each in (handle, handle))
        ] == [
            0,
            0,
        ]
        assert library.collect([]) == []
        for bad in (handle, None, "replicas-1", {"handle": handle}):
            with pytest.raises(ValidationError, match="handles: .* expected a list of handles"):
                library.collect(bad)  # type: ignore[arg-type]


def test_what_a_backend_ignores_is_said_at_the_launch(caplog: pytest.LogCaptureFixture) -> None:
    class WithoutGpus(FakeExecutor):
        SUPPORTS = (ignore("gpu_count", "it has none"),)

    with Library(WithoutGpus()) as library:
        library.launch_replicas(1, "os")
        assert caplog.messages == []
        library.launch_replicas(1, "os", gpu=2)
    assert caplog.messages == ["fake does not support gpu_count 2: it has none"]


@pytest.mark.parametrize("gpu", [0, True, 1.5, "", ":2", "A100:", "A100:x", "A100:0", "A100:9999"])
def test_a_gpu_that_is_none_is_refused(gpu: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        read_gpu(gpu)
    assert refused.value.field == "gpu"


def test_a_gang_that_somebody_else_changed_is_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = FakeExecutor()
    with Library(fake) as library:
        (handle,) = library.launch_replicas(1, "os")
        fake.trouble = NotFound("jobs", "replicas-1")
        (training,) = library.trainings()
        library._plane.call(fake.changed.put(training.key))
        until(lambda: "'replicas-1' not found; trying again" in caplog.text)
        fake.trouble = None
        library.cancel(handle)
    assert [record.exc_info for record in caplog.records if record.exc_info] == []


def test_a_report_is_plain_data() -> None:
    fake = FakeExecutor()
    with Library(fake) as library:
        (handle,) = library.launch_replicas(1, "os")
        uid = handle.metadata["uid"]
        fake.ended[uid] = Exit(code=1, at=time.time(), reason=ExitReason.ERROR)
        (training,) = library.trainings()
        library._plane.call(fake.changed.put(training.key))
        (report,) = library.collect([handle], timeout=20)
        assert report["reason"] == "Error"
        assert {type(value) for value in report.values()} <= {int, float, str, type(None)}


def test_a_launch_that_is_refused_for_good_raises_and_leaves_nothing() -> None:
    fake = FakeExecutor()
    fake.refusal = lambda desired: Permanent("no such cluster") if desired.size else None
    with Library(fake) as library:
        with pytest.raises(Permanent, match="no such cluster"):
            library.launch_replicas(1, "os")
        assert library.trainings() == []


def test_a_launch_is_tried_again_while_the_backend_is_away_for_a_moment() -> None:
    fake = FakeExecutor()
    away = Temporary("starting up", retry_after_s=0.0)
    fake.refusal = lambda desired: away if len(fake.applies) < 3 else None
    with Library(fake) as library:
        (handle,) = library.launch_replicas(1, "os")
        until(lambda: library.poll(handle) == "running")
        assert len(fake.applies) == 3


def test_a_launch_gives_up_on_a_backend_that_stays_away_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plane, "LAUNCH_PATIENCE_S", 0.1)
    fake = FakeExecutor()
    fake.trouble = Temporary("cannot be reached", retry_after_s=0.01)
    with Library(fake) as library:
        with pytest.raises(Temporary, match="cannot be reached"):
            library.launch_replicas(1, "os")
        fake.trouble = None
        until(lambda: library.trainings() == [])
        assert fake.desired_states == {}


def test_bad_input_is_refused_before_anything_is_asked_for() -> None:
    class Choosy(FakeExecutor):
        def check(self, spec: TrainingSpec) -> None:
            raise ValidationError("gpu", spec.resources.gpu_models, "expected a model we have")

    with Library(Choosy()) as library:
        with pytest.raises(ValidationError, match="gpu"):
            library.launch_replicas(1, "os", gpu="RTX")
        assert library.trainings() == []
        assert library.fake.applies == []
        assert library.fake.questions == 0


def test_an_interrupted_launch_leaves_nothing() -> None:
    main = threading.main_thread().ident
    assert main is not None
    sent, interrupted = threading.Event(), threading.Event()

    def interrupt(number: int, frame: Any) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    class Interrupting(FakeExecutor):
        async def apply(self, training: Training, desired: DesiredState) -> None:
            await super().apply(training, desired)
            if desired.size and not sent.is_set():
                sent.set()
                signal.pthread_kill(main, signal.SIGINT)
                await asyncio.to_thread(interrupted.wait)  # the launch is not over before

    with Library(Interrupting()) as library:
        usual = signal.signal(signal.SIGINT, interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                library.launch_replicas(1, "os")
        finally:
            signal.signal(signal.SIGINT, usual)
        assert library.trainings() == []
        assert library.fake.desired_states == {}


@pytest.mark.parametrize("error", [Denied("403 forbidden"), Permanent("500"), Temporary("away")])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_refused_cancel_raises_and_is_over(error: Exception, is_shared: bool) -> None:
    fake = SharedFake() if is_shared else FakeExecutor()
    fake.refusal = lambda desired: error if desired.size == 0 else None
    with Library(fake) as library:
        handles = library.launch_replicas(1, "os")
        until(lambda: library.poll(handles[0]) == "running")
        for _ in range(2):
            with pytest.raises(type(error), match=str(error)):
                library.cancel(handles[0])
            assert library.poll(handles[0]) == "running"
            (report,) = library.collect(handles, timeout=0)
            assert report["status"] == "running"
        refused = len(fake.applies)
        fake.refusal = lambda desired: None
        look_again(library, fake)  # nothing of it is left to be carried out
        look_again(library, fake)
        assert library.poll(handles[0]) == "running"
        assert len(fake.applies) == refused
        library.cancel(handles[0])
        (report,) = library.collect(handles, timeout=60)
        assert (report["status"], report["exit_code"]) == ("cancelled", 143)
        assert report["error"].startswith("cancelled: it exited with code 143")


def test_a_cancel_waits_for_a_backend_that_is_slow_to_refuse_it() -> None:
    answers = threading.Event()

    class Slow(SharedFake):
        async def observe(self, training: Training) -> Observation:
            if training.spec.cancel:
                await asyncio.to_thread(answers.wait)
                raise Temporary("away")
            return await super().observe(training)

    with Library(Slow()) as library:
        (handle,) = library.launch_replicas(1, "os")
        until(lambda: library.poll(handle) == "running")
        late = threading.Timer(library._stop_grace_s + plane.AFTER_GRACE_S + 1.0, answers.set)
        late.start()
        with pytest.raises(Temporary, match="away"):
            library.cancel(handle)
        assert library.poll(handle) == "running"


def look_again(library: Library, fake: FakeExecutor) -> None:
    """The controller looks at all trainings once more."""
    asked = fake.questions
    for training in library.trainings():
        library._plane.call(fake.changed.put(training.key))
    until(lambda: fake.questions > asked)


def test_what_may_be_read_is_told_though_nothing_may_be_done() -> None:
    """As with an account that may only look: a chore beside the look is refused."""

    class Reading(SharedFake):
        async def observe(self, training: Training) -> Observation:
            observation = await super().observe(training)
            return replace(observation, followups=(Followup(),))

        async def perform(self, training: Training, followup: Followup) -> None:
            if self.is_refusing:
                raise Denied("403 forbidden")

        is_refusing = False

    fake = Reading()
    with Library(fake) as library:
        handles = library.launch_replicas(1, "os")
        until(lambda: library.poll(handles[0]) == "running")
        fake.is_refusing = True
        look_again(library, fake)
        look_again(library, fake)
        assert library.poll(handles[0]) == "running"
        (report,) = library.collect(handles, timeout=0)
        assert report["status"] == "running"
        fake.is_refusing = False


def test_a_gang_that_failed_before_it_was_cancelled_has_failed() -> None:
    fake = SharedFake()
    with Library(fake) as library:
        (handle,) = library.launch_replicas(1, "os")
        until(lambda: library.poll(handle) == "running")
        uid = handle.metadata["uid"]
        fake.ended[uid] = Exit(code=3, at=time.time(), reason=ExitReason.ERROR)  # not seen yet
        library.cancel(handle)
        (report,) = library.collect([handle], timeout=60)
        assert (report["status"], report["exit_code"]) == ("failed", 3)
        (training,) = library.trainings()
        assert training.status.phase == "failed"


def test_asking_how_it_is_asks_nothing_of_the_backend() -> None:
    fake = FakeExecutor()
    with Library(fake) as library:
        (handle,) = library.launch_replicas(1, "os")
        until(lambda: library.poll(handle) == "running")
        fake.trouble = AssertionError("asked")
        for _ in range(100):
            assert library.poll(handle) == "running"
        fake.trouble = None


def test_closing_ends_what_was_launched_and_says_so_afterwards() -> None:
    fake = FakeExecutor()
    library = Library(fake)
    (handle,) = library.launch_replicas(1, "os")
    until(lambda: library.poll(handle) == "running")
    library.close()
    assert fake.desired_states == {}
    assert library.poll(handle) == "cancelled"


def test_a_close_that_the_backend_refuses_raises_and_can_be_repeated() -> None:
    fake = FakeExecutor()
    library = Library(fake)
    library.launch_replicas(1, "os")
    fake.trouble = Permanent("403 forbidden")
    with pytest.raises(Permanent, match="403"):
        library.close()
    assert fake.desired_states
    fake.trouble = None
    library.close()
    assert fake.desired_states == {}


def test_waiting_ends_when_the_gangs_can_no_longer_be_followed() -> None:
    fake = FakeExecutor()
    with Library(fake) as library:
        (handle,) = library.launch_replicas(1, "os")
        until(lambda: library.poll(handle) == "running")
        library._plane.call(fake.changed.put(RuntimeError("the watch broke")))
        with pytest.raises(Permanent, match="the watch broke"):
            library.collect([handle], timeout=20)
        with pytest.raises(Permanent, match="the watch broke"):
            library.poll(handle)
        with pytest.raises(Permanent, match="the watch broke"):
            library.launch_replicas(1, "os")
    assert fake.desired_states == {}


def test_a_cancel_beside_another_process_that_was_faster_is_no_error() -> None:
    fake = SharedFake()
    with Library(fake) as library:
        (handle,) = library.launch_replicas(1, "os")
        until(lambda: library.poll(handle) == "running")
        fake.stop_elsewhere(handle.metadata["uid"])
        library.cancel(handle)
        assert library.poll(handle) == "cancelled"
