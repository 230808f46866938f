"""Waits and operations with scripted answers and a scripted clock: no server, no sleeping."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import atoll
from atoll.core.describe import describe_failure
from atoll.core.errors import (
    BelowMinimumWorld,
    Conflict,
    NotFound,
    Permanent,
    Temporary,
    UDTerminalState,
    ValidationError,
    WorldSizeOutOfBounds,
)
from atoll.core.model import encode
from atoll.core.phase import Phase
from atoll.core.ports import Change
from atoll.core.problem import problem_of
from atoll.core.spec import Code, TrainingSpec, WorldSize
from atoll.core.status import RankExit, RankStatus, Status, Training, WorldStatus
from atoll.sdk import flows
from atoll.sdk.effects import (
    ABSENT_S,
    PATIENCE_S,
    Effect,
    Flow,
    NextChange,
    NoControlPlane,
    Pack,
    Pause,
    Reply,
    Send,
)
from atoll.sdk.flows import TrainingRef

WHO = TrainingRef("t", "uid-1")
CODE = Code(content=b"an archive", size=10, unpacked=30, files=2)


def training(
    phase: str = "pending",
    ready: int = 0,
    *,
    target: int = 4,
    generation: int = 1,
    observed: int | None = None,
    version: int = 1,
    uid: str = "uid-1",
    exits: list[RankExit] | None = None,
) -> Training:
    world = WorldStatus(ready=ready, target=target, min=2, max=8, below_minimum=ready < 2)
    return Training(
        namespace="default",
        uid=uid,
        spec=TrainingSpec(
            name="t", world_size=WorldSize(min=2, target=target, max=8), command=["x"]
        ),
        status=Status(
            phase=Phase(phase),
            world=world,
            observed_generation=generation if observed is None else observed,
            rank_exits=exits or [],
            root_cause=(exits or [None])[0],
        ),
        generation=generation,
        resource_version=version,
    )


class Script:
    """Answers effects from two lists. A callable answer is called when its turn comes."""

    def __init__(self, reads: list[Any], changes: list[Any] | None = None) -> None:
        self.reads = reads
        self.changes = changes or []
        self.sent: list[Effect] = []
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def perform(self, effect: Effect) -> Any:
        self.sent.append(effect)
        if isinstance(effect, Pause):
            self.now += effect.seconds
            return None
        if isinstance(effect, NextChange):
            answer = self.changes.pop(0) if self.changes else None
            if answer is None:
                self.now += effect.timeout
            if isinstance(answer, Training):
                return Change(version=answer.resource_version, training=answer)
            return None if answer == "dropped" else answer
        if isinstance(effect, Pack):
            return CODE
        answer = self.reads.pop(0) if len(self.reads) > 1 else self.reads[0]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Training):
            return Reply(200, encode(answer))
        return answer

    def play(self, flow: Flow[Any]) -> Any:
        try:
            effect = next(flow)
            while True:
                try:
                    answer = self.perform(effect)
                except Exception as error:
                    effect = flow.throw(error)
                else:
                    effect = flow.send(answer)
        except StopIteration as done:
            return done.value

    def requests(self) -> list[str]:
        return [f"{e.method} {e.path}" for e in self.sent if isinstance(e, Send)]

    def wait(self, flow: Callable[..., Flow[Any]], timeout: float | None) -> Any:
        return self.play(flow(WHO, timeout, clock=self.clock))


def refused(error: Any, status: int) -> Reply:
    return Reply(status, encode(problem_of(error, status)))


KILLED = RankExit(rank=1, exit_code=137, termination_reason="OOMKilled")
WAITS = [
    flows.wait_until_min_world,
    flows.wait_until_target_world,
    flows.wait_until_complete,
    flows.wait_until_end,
]


def test_scale_up_is_not_met_by_the_status_of_the_old_spec() -> None:
    stale = training("ready", 4, target=4, generation=2, observed=1)
    fresh = training("ready", 4, target=4, generation=2, version=2)
    script = Script([stale], [fresh])
    assert script.wait(flows.wait_until_target_world, 10).ready == 4
    assert len(script.sent) == 2


def test_scale_down_is_not_met_by_the_status_of_the_old_spec() -> None:
    stale = training("ready", 6, target=3, generation=5, observed=4)
    fresh = training("ready", 3, target=3, generation=5, version=9)
    script = Script([stale], ["dropped", fresh])
    script.reads.append(stale)
    assert script.wait(flows.wait_until_target_world, 10) == WorldStatus(
        ready=3, target=3, min=2, max=8, below_minimum=False
    )


def test_a_world_that_is_stale_to_the_end_is_a_timeout() -> None:
    script = Script([training("ready", 8, target=4, generation=2, observed=1)])
    with pytest.raises(BelowMinimumWorld) as caught:
        script.wait(flows.wait_until_target_world, 10)
    assert (caught.value.required_min, caught.value.timeout) == (4, 10)


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("phase", ["failed", "cancelled"])
def test_a_failure_on_the_last_read_is_a_failure_not_a_timeout(wait: Any, phase: str) -> None:
    script = Script([training("pending"), training(phase, exits=[KILLED], version=2)])
    with pytest.raises(BelowMinimumWorld) as caught:
        script.wait(wait, 10)
    assert script.now == 10  # it was the last read
    assert caught.value.timeout == 10
    assert "rank 1: exit_code=137 reason=OOMKilled" in str(caught.value)
    assert caught.value.rank_exits == [KILLED]


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("timeout", [10.0, None])
def test_the_timeout_of_a_failure_is_the_callers(wait: Any, timeout: float | None) -> None:
    script = Script([training("ready")], [training("failed", 4, exits=[KILLED], version=2)])
    with pytest.raises(BelowMinimumWorld) as caught:
        script.wait(wait, timeout)
    assert caught.value.timeout == timeout


@pytest.mark.parametrize("wait", [flows.wait_until_complete, flows.wait_until_end])
@pytest.mark.parametrize("end", ["ready", "failed"])
def test_a_wait_for_the_end_requires_min_ranks(wait: Any, end: str) -> None:
    script = Script([training("ready", 3), training(end, 3, exits=[KILLED], version=2)])
    with pytest.raises(BelowMinimumWorld) as caught:
        script.wait(wait, 10)
    assert caught.value.required_min == training().spec.world_size.min == 2


def test_a_late_wait_says_what_all_ranks_wait_for() -> None:
    ranks = [RankStatus(rank=rank, message=f"thing {rank // 3}") for rank in range(30)]
    late = training("pending")
    late = replace(late, status=replace(late.status, ranks=ranks))
    with pytest.raises(BelowMinimumWorld) as caught:
        Script([late]).wait(flows.wait_until_min_world, 5)
    text = str(caught.value)
    assert "; ranks 0-2: thing 0; ranks 3-5: thing 1;" in text
    assert text.endswith("ranks 24-29: wait for 2 other things")


@pytest.mark.parametrize(("phase", "said"), [("pending", "pending"), ("", "not observed yet")])
def test_a_late_wait_says_the_phase(phase: str, said: str) -> None:
    with pytest.raises(BelowMinimumWorld, match=rf"0 of 4 .* after 5 s \(min 2, phase {said}\)"):
        Script([training(phase)]).wait(flows.wait_until_min_world, 5)


@pytest.mark.parametrize("wait", [flows.wait_until_complete, flows.wait_until_end])
def test_success_on_the_last_read_is_success(wait: Any) -> None:
    script = Script([training("ready", 4), training("succeeded", 4, version=2)])
    assert script.wait(wait, 10).ready == 4


@pytest.mark.parametrize("wait", WAITS)
def test_timeout_0_reads_once(wait: Any) -> None:
    script = Script([training("pending", 1)])
    with pytest.raises(BelowMinimumWorld) as caught:
        script.wait(wait, 0)
    assert script.requests() == ["GET /v1/trainings/t"]
    assert len(script.sent) == 1
    assert (caught.value.ready, caught.value.timeout) == (1, 0)


@pytest.mark.parametrize("wait", WAITS)
def test_timeout_0_of_an_unreachable_server_is_not_retried(wait: Any) -> None:
    script = Script([Temporary("gone")])
    with pytest.raises(Temporary):
        script.wait(wait, 0)
    assert len(script.sent) == 1


def test_timeout_0_returns_what_is_already_so() -> None:
    assert Script([training("ready", 4)]).wait(flows.wait_until_target_world, 0).ready == 4
    assert Script([training("succeeded", 4)]).wait(flows.wait_until_end, 0).ready == 4


@pytest.mark.parametrize("phase", ["succeeded", "failed", "cancelled"])
def test_wait_until_complete_refuses_a_training_that_is_already_over(phase: str) -> None:
    with pytest.raises(UDTerminalState) as caught:
        Script([training(phase, 4)]).wait(flows.wait_until_complete, 10)
    assert caught.value.phase == phase


def test_result_is_the_same_after_the_end() -> None:
    assert Script([training("succeeded", 4)]).wait(flows.wait_until_end, None).ready == 4
    with pytest.raises(BelowMinimumWorld):
        Script([training("failed", exits=[KILLED])]).wait(flows.wait_until_end, None)


@pytest.mark.parametrize(
    "wait", [flows.wait_until_min_world, flows.wait_until_target_world, flows.wait_until_end]
)
def test_a_training_that_ended_well_counts_as_there(wait: Any) -> None:
    assert Script([training("succeeded", 4)]).wait(wait, 10).ready == 4


@pytest.mark.parametrize("wait", WAITS)
def test_a_failure_is_not_waited_out(wait: Any) -> None:
    script = Script([training("ready", 1)], [training("failed", exits=[KILLED], version=2)])
    with pytest.raises(BelowMinimumWorld):
        script.wait(wait, 600)
    assert script.now == 0


@pytest.mark.parametrize("trouble", ["lost", "502 page", "500 empty", "500 problem", "429"])
def test_trouble_is_retried_until_the_deadline(trouble: str) -> None:
    answer = {
        "lost": Temporary("lost"),
        "502 page": Reply(502, b"<html>"),
        "500 empty": Reply(500, b""),
        "500 problem": refused(Permanent("the store is broken"), 500),
        "429": Reply(429, b""),
    }[trouble]
    script = Script([answer] * 5 + [training("succeeded", 4)])
    assert script.wait(flows.wait_until_complete, 60).ready == 4
    assert 0 < script.now < 60


def test_a_server_that_asks_for_time_is_given_it() -> None:
    busy = refused(Temporary("the disk is full", retry_after_s=3.0), 503)
    script = Script([busy, training()])
    script.play(flows.create(training().spec, "key-1", clock=script.clock))
    assert script.now == pytest.approx(3.0)


def test_trouble_to_the_end_says_so() -> None:
    script = Script([Temporary("cannot reach host:1")])
    with pytest.raises(Temporary, match="cannot reach"):
        script.wait(flows.wait_until_complete, 7)
    assert script.now == pytest.approx(7)


def test_a_control_plane_that_others_must_start_is_waited_for_longer_and_the_end_says_why() -> None:
    absent = NoControlPlane("no control plane runs")
    spec = training().spec
    script = Script([absent] * 60 + [training()])
    script.play(flows.create(spec, "key-1", clock=script.clock))
    assert script.now > PATIENCE_S
    script = Script([absent])
    with pytest.raises(NoControlPlane, match="no control plane runs"):
        script.play(flows.create(spec, "key-1", clock=script.clock))
    assert script.now == pytest.approx(ABSENT_S)
    script = Script([absent])
    with pytest.raises(NoControlPlane):  # the caller's own timeout counts
        script.wait(flows.wait_until_complete, 7)
    assert script.now == pytest.approx(7)


def test_trouble_after_a_good_read_is_a_timeout_with_what_was_known() -> None:
    script = Script([training("pending", 1), Temporary("lost")])
    with pytest.raises(BelowMinimumWorld) as caught:
        script.wait(flows.wait_until_min_world, 7)
    assert (caught.value.ready, caught.value.required_min, caught.value.timeout) == (1, 2, 7)
    assert script.now == pytest.approx(7)


def test_a_server_that_drops_every_watch_is_not_asked_in_a_rush() -> None:
    script = Script([training("pending")], ["dropped"] * 1000)
    with pytest.raises(BelowMinimumWorld):
        script.wait(flows.wait_until_min_world, 30)
    assert len(script.requests()) < 60


@pytest.mark.parametrize("wait", WAITS)
def test_a_training_deleted_while_waited_for_is_not_found(wait: Any) -> None:
    gone = Change(version=2, training=training("pending", version=2), is_removed=True)
    with pytest.raises(NotFound):
        Script([training("pending")], [gone]).wait(wait, 600)
    missing = refused(NotFound("training", "t"), 404)
    with pytest.raises(NotFound):
        Script([training("pending"), missing], ["dropped"]).wait(wait, 600)


@pytest.mark.parametrize("wait", WAITS)
def test_the_last_word_of_a_removed_training_counts(wait: Any) -> None:
    gone = Change(version=2, training=training("succeeded", 4, version=2), is_removed=True)
    assert Script([training("ready", 1)], [gone]).wait(wait, 600).ready == 4


@pytest.mark.parametrize("wait", WAITS)
def test_another_training_of_the_same_name_is_not_this_one(wait: Any) -> None:
    with pytest.raises(NotFound):
        Script([training("succeeded", 4, uid="uid-2")]).wait(wait, 10)


def test_every_state_is_seen_by_the_handle() -> None:
    seen: list[int] = []
    script = Script([training(version=1)], [training("ready", 4, version=5)])
    script.play(
        flows.wait_until_min_world(
            WHO, 9, on_read=lambda t: seen.append(t.resource_version), clock=script.clock
        )
    )
    assert seen[-1] == 5


def test_scale_of_a_training_known_to_be_over_sends_nothing() -> None:
    script = Script([])
    with pytest.raises(UDTerminalState) as caught:
        script.play(flows.scale(training("failed"), 3))
    assert script.sent == []
    assert (caught.value.phase, caught.value.requested_target) == ("failed", 3)


def test_scale_of_a_training_that_has_ended_since_sends_no_scale_request() -> None:
    script = Script([training("succeeded", 4)])
    with pytest.raises(UDTerminalState):
        script.play(flows.scale(training("ready", 4), 3))
    assert script.requests() == ["GET /v1/trainings/t"]


@pytest.mark.parametrize("target", [-1, 0, 1, 9, 10**9, True, 2.5, "3", None])
def test_scale_out_of_bounds_sends_no_scale_request(target: Any) -> None:
    script = Script([training("ready", 4)])
    with pytest.raises(WorldSizeOutOfBounds) as caught:
        script.play(flows.scale(training("ready", 4), target))
    assert (caught.value.requested, caught.value.min, caught.value.max) == (target, 2, 8)
    assert not any(request.startswith("POST") for request in script.requests())


def test_scale_answers_with_what_was_asked() -> None:
    after = training("ready", 4, target=6, generation=2, observed=1)
    script = Script([training("ready", 4), after])
    world = script.play(flows.scale(training("ready", 4), 6)).world
    assert (world.target, world.ready, world.below_minimum) == (6, 4, False)


def test_the_servers_refusal_to_scale_is_the_same_error() -> None:
    script = Script([training("ready", 4), refused(UDTerminalState("failed", 6), 409)])
    with pytest.raises(UDTerminalState) as caught:
        script.play(flows.scale(training("ready", 4), 6))
    assert (caught.value.phase, caught.value.requested_target) == ("failed", 6)


def test_a_create_that_is_retried_keeps_its_key() -> None:
    script = Script([Temporary("lost"), Reply(503, b""), training()])
    script.play(flows.create(training().spec, "key-1", clock=script.clock))
    keys = [e.headers["Idempotency-Key"] for e in script.sent if isinstance(e, Send)]
    assert keys == ["key-1"] * 3


def test_what_is_refused_is_not_retried() -> None:
    script = Script([refused(Conflict("taken"), 409)])
    with pytest.raises(Conflict, match="taken"):
        script.play(flows.create(training().spec, "k", clock=script.clock))
    assert len(script.sent) == 1


def test_delete_of_what_is_gone_is_success() -> None:
    missing = refused(NotFound("training", "t"), 404)
    assert Script([missing]).play(flows.delete(WHO, 10)) is None
    gone = Change(version=2, training=training(version=2), is_removed=True)
    script = Script([training(), Reply(202, b"{}")], [gone])
    assert script.play(flows.delete(WHO, 10, clock=script.clock)) is None


def test_delete_and_cancel_never_touch_another_training_of_the_same_name() -> None:
    other = training(uid="uid-2")
    for flow in (flows.delete(WHO, 10), flows.cancel(WHO)):
        script = Script([other])
        try:
            script.play(flow)
        except NotFound:
            pass
        assert script.requests() == ["GET /v1/trainings/t"]


def test_an_unknown_exit_code_is_never_shown_as_0() -> None:
    lost = RankExit(rank=3, exit_code=None, termination_reason="Lost")
    with pytest.raises(BelowMinimumWorld, match="rank 3: exit_code=unknown reason=Lost"):
        Script([training("failed", exits=[lost])]).wait(flows.wait_until_end, 1)


def test_the_cause_comes_first_and_brings_its_log() -> None:
    cause = RankExit(
        rank=2, exit_code=1, termination_reason="Error", log_tail=["Traceback", "boom"]
    )
    other = replace(KILLED, rank=0, collateral=True)
    failed = training("failed", exits=[cause, other])
    failed = msgspec.structs.replace(
        failed, status=replace(failed.status, rank_exits=[other, cause])
    )
    text = describe_failure(failed)
    assert text.index("rank 2: exit_code=1") < text.index("rank 0: exit_code=137")
    assert text.endswith("boom")


def test_a_failure_says_why_where_the_exits_do_not() -> None:
    cannot = RankExit(
        rank=0, exit_code=126, termination_reason="CannotRun", message="x: Permission denied"
    )
    assert describe_failure(training("failed", exits=[cannot])).endswith(
        "reason=CannotRun: the command cannot be run (x: Permission denied)"
    )
    stopped = RankExit(rank=0, exit_code=143, termination_reason="Stopped")
    late = training("failed", exits=[stopped])
    status = replace(late.status, root_cause=None, message="still running 5 s after the start")
    text = describe_failure(replace(late, status=status))
    assert "failed: still running 5 s after the start; rank 0: exit_code=143" in text


@pytest.mark.parametrize("status", [200, 301, 401, 404])
@pytest.mark.parametrize("body", [b"", b"<html>\n <b>hi</b>", b"[]", b'{"a": 1}', b"\xff"])
def test_an_answer_that_is_not_atolls_is_not_blamed_on_the_input(status: int, body: bytes) -> None:
    for flow in (flows.get("t"), flows.list_all(), flows.create(training().spec, "key")):
        next(flow)
        with pytest.raises(Permanent, match="not the answer of an atoll control plane") as caught:
            flow.send(Reply(status, body))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        UDTerminalState("failed", 3),
        UDTerminalState("failed", message="over"),
        WorldSizeOutOfBounds(9, 1, 8),
        BelowMinimumWorld("m", ready=1, required_min=2, timeout=3.0, rank_exits=[KILLED]),
        ValidationError("name", "A", "expected a"),
        NotFound("training", "a"),
        Temporary("later", 2.0),
    ],
)
def test_an_error_is_the_same_on_the_other_side_of_a_process_pool(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize("flow", WAITS)
@pytest.mark.parametrize("timeout", [1e8, 1e10, 1e300, 10**400])
def test_a_wait_may_be_as_long_as_one_likes(flow: Any, timeout: float) -> None:
    """Longer than a thread can sleep, or than the server keeps a watch open."""
    script = Script([training("pending")], [training("succeeded", 4, version=2)])
    assert script.wait(flow, timeout).ready == 4
    watch = script.sent[-1]
    assert isinstance(watch, NextChange)
    assert watch.timeout <= 365 * 86_400


@pytest.mark.parametrize("timeout", [-1, float("nan"), "5", None, True])
def test_a_delete_with_a_bad_timeout_removes_nothing(timeout: Any) -> None:
    handle = atoll.Client("http://127.0.0.1:1", "token")  # nobody listens there
    with pytest.raises(ValidationError, match="timeout"):
        atoll.DistributedTraining(handle, training()).delete(timeout)


def test_the_target_is_not_reached_while_a_rank_above_it_is_alive() -> None:
    fresh = training("ready", 2, target=2, generation=2, version=2)
    alive = RankStatus(rank=2, phase="Running", started_at=1.0, attempt=0)
    unsure = RankStatus(rank=2, is_stopping=True)
    for rank in (alive, unsure):
        leaving = replace(fresh, status=replace(fresh.status, ranks=[rank]))
        script = Script([leaving], [fresh])
        assert script.wait(flows.wait_until_target_world, 10).ready == 2
        assert len(script.sent) == 2
        with pytest.raises(BelowMinimumWorld, match="above the target and still alive: 2"):
            Script([leaving]).wait(flows.wait_until_target_world, 0)
        assert Script([leaving]).wait(flows.wait_until_min_world, 0).ready == 2


@pytest.mark.parametrize("wait", [flows.wait_until_min_world, flows.wait_until_target_world])
def test_a_world_that_is_being_cancelled_is_not_there(wait: Any) -> None:
    whole = training("ready", 4)
    cancelled = replace(whole, spec=replace(whole.spec, cancel=True))
    script = Script([cancelled], [training("cancelled", 0, version=2)])
    with pytest.raises(BelowMinimumWorld):
        script.wait(wait, 10)


def test_a_removal_that_takes_longer_is_not_taken_for_done() -> None:
    alive = RankStatus(rank=3, phase="Running", started_at=1.0, attempt=0)
    base = training("pending")
    slow = replace(base, status=replace(base.status, ranks=[alive]))
    script = Script([slow])
    with pytest.raises(
        Temporary, match="'t' is not removed after 10 s: still being stopped: rank 3;"
    ):
        script.play(flows.delete(WHO, 10, clock=script.clock))
    assert Script([slow]).play(flows.delete(WHO, 0)) is None


def refusal(field: str) -> Reply:
    problem = problem_of(ValidationError(field, "x", "expected another"), 422)
    return Reply(422, encode(problem))


def sent_specs(script: Script) -> list[TrainingSpec]:
    bodies = [effect.body for effect in script.sent if isinstance(effect, Send)]
    return [msgspec.json.decode(body, type=TrainingSpec) for body in bodies if body]


def test_code_goes_along_where_ranks_run_elsewhere() -> None:
    spec = replace(training().spec, executor="lab", working_dir="/home/me/project")
    script = Script([training()])
    script.play(flows.deploy(spec, {}, "key", Pack("/home/me/project")))
    (sent,) = sent_specs(script)
    assert (sent.code, sent.working_dir) == (CODE, None)


def test_nothing_is_packed_for_ranks_on_this_machine() -> None:
    script = Script([training()])
    script.play(flows.deploy(training().spec, {"working_dir": "/here"}, "key", Pack("/here")))
    (sent,) = sent_specs(script)
    assert (sent.code, sent.working_dir, sent.executor) == (None, "/here", "local")
    assert not any(isinstance(effect, Pack) for effect in script.sent)


def test_a_local_address_that_is_a_cluster_gets_the_code() -> None:
    script = Script([refusal("executor"), training()])
    script.play(flows.deploy(training().spec, {"working_dir": "/here"}, "key", Pack("/here")))
    assert [sent.code for sent in sent_specs(script)] == [None, CODE]


@pytest.mark.parametrize(("executor", "field"), [("local", "executor"), (None, "command")])
def test_a_refusal_that_is_not_of_the_default_executor_is_the_callers(
    executor: str | None, field: str
) -> None:
    spec = replace(training().spec, executor=executor)
    script = Script([refusal(field), training()])
    with pytest.raises(ValidationError, match=field):
        script.play(flows.deploy(spec, {"working_dir": "/here"}, "key", Pack("/here")))
    assert len(script.sent) == 1


def test_a_control_plane_whose_ranks_run_in_place_gets_none_and_it_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = Script([refusal("code"), training()])
    script.play(flows.deploy(training().spec, {}, "key", Pack("/here")))
    assert [sent.code for sent in sent_specs(script)] == [CODE, None]
    assert "no code is sent" in caplog.text
    script = Script([refusal("image")])
    with pytest.raises(ValidationError, match="image"):
        script.play(flows.deploy(training().spec, {}, "key", Pack("/here")))
