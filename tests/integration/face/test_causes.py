"""What a function raised is the cause of what its caller gets, with the traceback shown once."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

import atoll
from atoll.core.errors import RankError


def raises(kind: str) -> None:
    if kind == "own":
        raise type("Odd", (Exception,), {})("of its own")
    raise ValueError(f"bad {kind}")


@pytest.mark.parametrize(
    ("kind", "type_of_cause", "text"),
    [
        ("input", ValueError, "bad input"),
        ("first\nand second line", ValueError, "bad first"),
        ("own", RankError, "Odd: of its own"),
    ],
)
def test_the_exception_of_a_function_is_the_cause(
    client: atoll.Client, kind: str, type_of_cause: Any, text: str
) -> None:
    made = client.deploy_distributed(name="raises", source=raises, args=[kind], world_size=1)
    with pytest.raises(atoll.BelowMinimumWorld) as failed:
        made.result(60)
    cause = failed.value.__cause__
    assert type(cause) is type_of_cause
    assert text in str(cause)
    shown = "".join(traceback.format_exception(failed.value))
    assert shown.count("in raises") == 1
    assert "in rank 0 of raises:" in shown


def test_a_failure_without_a_traceback_has_no_cause(client: atoll.Client) -> None:
    made = client.deploy_distributed(name="exits", command=["sh", "-c", "echo oh; exit 3"])
    with pytest.raises(atoll.BelowMinimumWorld, match="last lines of rank 0:\\n  oh") as failed:
        made.result(60)
    assert failed.value.__cause__ is None
