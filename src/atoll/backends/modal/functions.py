"""Calls of a function that the user has decorated for Modal: spawned, looked at, cancelled.

A call is found again by its id from any process. Modal keeps its result for some days.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import modal
import modal.exception as failures

from atoll.core.errors import Temporary

# What says nothing of the call: the service did not answer.
UNANSWERED = (
    failures.ConnectionError,
    failures.ServiceError,
    failures.InternalError,
    failures.ClientClosed,
)


class CallState(NamedTuple):
    """How a call is, with its result or what it has failed with."""

    state: Literal["running", "succeeded", "failed", "cancelled"]
    result: Any = None
    error: str = ""


def find_call(id: str) -> Any:
    return modal.FunctionCall.from_id(id)


def inspect_call(call: Any) -> CallState:
    """Raises Temporary if Modal does not answer."""
    try:
        return CallState("succeeded", call.get(timeout=0))
    except UNANSWERED as error:
        raise Temporary(f"Modal: {error}") from error
    except failures.NotFoundError as error:
        return CallState("cancelled", error=f"the call no longer exists: {error}")
    except failures.RemoteError as error:
        state: Literal["failed", "cancelled"]
        state = "cancelled" if is_terminated(call) else "failed"
        return CallState(state, error=_one_line(error))
    except failures.InputCancellation as error:
        return CallState("cancelled", error=_one_line(error))
    except Exception as error:  # the function's own, as it raised it, or Modal's word on it
        # The client raises a bare TimeoutError while there is no result.
        if type(error) is TimeoutError and not error.args:
            return CallState("running")
        return CallState("failed", error=_one_line(error))


def cancel(call: Any) -> None:
    """Its container ends. One that has ended or is unknown is cancelled already."""
    try:
        call.cancel(terminate_containers=True)
    except failures.NotFoundError:
        return
    except UNANSWERED as error:
        raise Temporary(f"Modal: {error}") from error


def is_terminated(call: Any) -> bool:
    """Whether somebody has cancelled it; the words of its error do not tell."""
    try:
        return _has_terminated(call.get_call_graph())
    except failures.Error:
        return False


def _has_terminated(inputs: list[Any]) -> bool:
    return any(
        each.status.name == "TERMINATED" or _has_terminated(each.children) for each in inputs
    )


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
