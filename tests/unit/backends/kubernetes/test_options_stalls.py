"""Where it cannot be known whether ranks of a cluster move, the options say why."""

from __future__ import annotations

import pytest

from atoll.backends.kubernetes.options import SUPPORTS
from atoll.core.ports import unsupported_fields
from tests.unit.backends.kubernetes.kube import Options, training

HERE = {"reports_uri": "http://atoll-operator.atoll-system.svc", "is_start_gated": True}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (HERE, ""),
        ({**HERE, "reports_uri": None}, "reports_uri is not set"),
        ({**HERE, "is_exit_recorded": False}, "without atoll's wrapper"),
        ({**HERE, "is_start_gated": False}, "without atoll's wrapper"),
        ({**HERE, "is_start_gated": False, "is_exit_recorded": True}, ""),
    ],
)
def test_ranks_need_a_wrapper_and_somewhere_to_report(options: dict[str, object], why: str) -> None:
    spec = training(stall_s=60.0).spec
    _, words = unsupported_fields(spec, SUPPORTS, Options(**options)).get("stall_s", ("", ""))
    assert why in words
    assert bool(words) == bool(why)
