"""The times of log lines, in every form that runtimes write them."""

from __future__ import annotations

import pytest

from atoll.kubernetes.client import _nanosecond


@pytest.mark.parametrize(
    ("text", "fraction"),
    [
        ("2026-11-15T23:05:48.123456789Z", 123456789),
        ("2026-11-15T23:05:48.5Z", 500000000),
        ("2026-11-16T00:05:48.000000001+01:00", 1),
        ("2026-11-15T23:05:48Z", 0),
        ("2026-11-15T18:05:48-05:00", 0),
    ],
)
def test_nanoseconds(text: str, fraction: int) -> None:
    assert _nanosecond(text) == 1794783948 * 10**9 + fraction
