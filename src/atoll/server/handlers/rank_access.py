"""A way into a rank over HTTP: a command beside it, signals to it, and its stacks."""

from __future__ import annotations

from atoll.core.ports import Executor
from atoll.core.rank_access import (
    ExecRequest,
    KillRequest,
    KillResult,
    StackRequest,
    check_action,
    running_rank,
    running_ranks,
    signal_of,
)
from atoll.core.spec import RankNumber
from atoll.core.status import RankStatus, Training
from atoll.server.handlers.admission import executor_of
from atoll.server.handlers.trainings import UidQuery
from atoll.server.http.operations import Answer, ApiCall, json_answer
from atoll.server.stacks import stack_list


class TargetQuery(UidQuery, frozen=True):
    rank: RankNumber = 0


async def exec_target(call: ApiCall) -> Answer:
    training, rank, executor = await _target(call, "exec", call.query.rank)
    return json_answer(await executor.exec_target(training, rank))


async def exec(call: ApiCall) -> Answer:
    request: ExecRequest = call.body
    training, rank, executor = await _target(call, "exec", request.rank)
    return json_answer(await executor.exec(training, rank, request))


async def kill(call: ApiCall) -> Answer:
    request: KillRequest = call.body
    training, rank, executor = await _target(call, "kill", request.rank)
    number = signal_of(request.signal)
    await executor.kill(training, rank, number)
    result = KillResult(rank=rank.rank, signal=number.name, host=rank.node, pid=rank.pid)
    return json_answer(result)


class StacksQuery(UidQuery, frozen=True):
    rank: list[RankNumber] = []


async def take_stacks(call: ApiCall) -> Answer:
    request: StackRequest = call.body
    training = await call.training()
    executor = executor_of(training, call.plane)
    check_action(executor, training, "stacks")
    stacks = await executor.take_stacks(training, running_ranks(training, request.ranks))
    return json_answer(stack_list(stacks))


async def stored_stacks(call: ApiCall) -> Answer:
    training = await call.training()
    executor = executor_of(training, call.plane)
    check_action(executor, training, "stacks")
    stacks, ranks = await executor.stored_stacks(training), call.query.rank
    return json_answer(stack_list([one for one in stacks if not ranks or one["rank"] in ranks]))


async def _target(call: ApiCall, action: str, number: int) -> tuple[Training, RankStatus, Executor]:
    training = await call.training()
    executor = executor_of(training, call.plane)
    check_action(executor, training, action)
    return training, running_rank(training, number), executor
