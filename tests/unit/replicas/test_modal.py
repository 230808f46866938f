"""Calls of a function that the script has decorated for Modal, as composer launches replicas."""

from __future__ import annotations

import itertools
import json
from typing import Any

import modal.exception as failures
import pytest
from modal.call_graph import InputInfo, InputStatus

from atoll import ModalSpawnExecutor, ReplicaHandle, ServerlessExecutor
from atoll.core.errors import Temporary, ValidationError

ARGS = {"rendezvous_uri": "s3://bucket/run"}


class Call:
    """A call as the client of Modal shows it."""

    def __init__(self, id: str, kwargs: dict[str, Any]) -> None:
        self.object_id = id
        self.kwargs = kwargs
        self.error: BaseException | None = TimeoutError()  # as while it runs
        self.value: Any = None
        self.is_cancelled = False

    def get(self, timeout: float | None = None) -> Any:
        assert timeout == 0, "a look does not wait"
        if self.error is not None:
            raise self.error
        return self.value

    def end(self, value: Any = None, error: BaseException | None = None) -> None:
        self.value, self.error = value, error

    def cancel(self, terminate_containers: bool = False) -> None:
        assert terminate_containers
        self.is_cancelled = True
        self.error = failures.RemoteError("the input was cancelled")

    def get_call_graph(self) -> list[InputInfo]:
        status = InputStatus.TERMINATED if self.is_cancelled else InputStatus.FAILURE
        return [InputInfo("in-1", 0, "ta-1", status, "f", "m", [])]


class Function:
    """A function decorated with @app.function()."""

    def __init__(self, room: int = 100) -> None:
        self.calls: list[Call] = []
        self._room = room
        self._ids = (f"fc-{number}" for number in itertools.count())

    def spawn(self, **kwargs: Any) -> Call:
        if len(self.calls) == self._room:
            raise failures.ResourceExhaustedError("no more")
        self.calls.append(Call(next(self._ids), kwargs))
        return self.calls[-1]


def launched(n: int = 2, **options: Any) -> tuple[Function, ModalSpawnExecutor, list[Any]]:
    function = Function()
    executor = ModalSpawnExecutor(modal_function=function)
    return function, executor, executor.launch_replicas(n, "train.py", ARGS, **options)


def test_it_is_an_executor_of_replicas() -> None:
    executor = ModalSpawnExecutor(modal_function=Function())
    assert isinstance(executor, ServerlessExecutor)
    assert executor.supports_inter_replica_network is False
    with pytest.raises(ValidationError, match="modal_function"):
        ModalSpawnExecutor(modal_function=print)


def test_every_call_gets_its_rank_the_world_the_store_and_the_arguments() -> None:
    function = Function()
    executor = ModalSpawnExecutor(modal_function=function)
    args = {**ARGS, "lr": 0.1, "world_size": 3, "rank_env": "MY_RANK"}
    handles = executor.launch_replicas(3, function, args)  # type: ignore[arg-type]
    assert [handle.rank for handle in handles] == [0, 1, 2]
    assert [call.kwargs for call in function.calls] == [
        {**ARGS, "lr": 0.1, "world_size": 3, "rank": rank} for rank in range(3)
    ]


@pytest.mark.parametrize(
    ("n", "args", "field"),
    [
        (0, ARGS, "n_replicas"),
        (2, {}, "entrypoint_args.rendezvous_uri"),
        (2, {**ARGS, "world_size": 3}, "entrypoint_args.world_size"),
        (2, {**ARGS, "rank": 0}, "entrypoint_args.rank"),
        (2, [], "entrypoint_args"),
    ],
)
def test_what_cannot_be_launched_is_named(n: int, args: Any, field: str) -> None:
    function = Function()
    with pytest.raises(ValidationError) as error:
        ModalSpawnExecutor(modal_function=function).launch_replicas(n, "f", args)
    assert error.value.field == field
    assert function.calls == []


def test_each_ends_in_its_own_way() -> None:
    function, executor, handles = launched(5)
    assert {executor.poll(handle) for handle in handles} == {"running"}
    first, second, third, fourth, fifth = function.calls
    first.end({"loss": 0.5})
    second.end(error=ValueError("oops"))
    third.end(error=failures.FunctionTimeoutError("timed out"))
    fourth.end(error=TimeoutError("of its own"))
    executor.cancel(handles[4])
    assert fifth.is_cancelled
    reports = executor.collect(handles)
    assert [report["status"] for report in reports] == [
        "succeeded", "failed", "failed", "failed", "cancelled",
    ]  # fmt: skip
    assert [report["exit_code"] for report in reports] == [0, 1, 1, 1, None]
    assert reports[0]["result"] == {"loss": 0.5}
    assert reports[1]["error"] == "ValueError: oops"
    executor.cancel(handles[0])
    assert executor.stream_logs(handles[0]).startswith("(the logs")


def test_one_that_fails_for_good_is_not_called_cancelled() -> None:
    function, executor, (handle,) = launched(1)
    function.calls[0].end(error=failures.RemoteError("the container died"))
    assert executor.poll(handle) == "failed"


def test_who_waits_too_long_is_told_what_still_runs() -> None:
    _, executor, handles = launched(1)
    (report,) = executor.collect(handles, timeout=0)
    assert report["status"] == "running"
    assert report["error"] == "running after 0 s of waiting"


def test_the_deadline_ends_a_call_that_still_runs() -> None:
    function, executor, (handle,) = launched(1, timeout=5)
    assert executor.poll(handle) == "running"
    handle.metadata["deadline"] -= 5
    (report,) = executor.collect([handle])
    assert function.calls[0].is_cancelled
    assert report["status"] == "failed"
    assert "still running" in report["error"]
    assert executor.poll(handle) == "failed"


def test_a_service_that_does_not_answer_says_nothing_of_the_call() -> None:
    function, executor, (handle,) = launched(1)
    function.calls[0].end(error=failures.ConnectionError("unreachable"))
    with pytest.raises(Temporary, match="unreachable"):
        executor.poll(handle)


def test_a_launch_that_breaks_off_leaves_nothing_running() -> None:
    function = Function(room=2)
    with pytest.raises(failures.ResourceExhaustedError):
        ModalSpawnExecutor(modal_function=function).launch_replicas(3, "f", ARGS)
    assert [call.is_cancelled for call in function.calls] == [True, True]


def test_with_ends_what_it_launched_and_handles_are_json() -> None:
    function = Function()
    with ModalSpawnExecutor(modal_function=function) as executor:
        (handle,) = executor.launch_replicas(1, "f", ARGS)
        assert ReplicaHandle.from_json(handle.to_json()) == handle
        assert json.loads(handle.to_json())["metadata"]["call_id"] == "fc-0"
    assert function.calls[0].is_cancelled
    with pytest.raises(ValidationError, match="backend_name"):
        executor.poll(ReplicaHandle(0, "modal", handle.metadata))
