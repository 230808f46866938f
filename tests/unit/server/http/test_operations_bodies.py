"""Where a body breaks off."""

from __future__ import annotations

import json

import pytest

from atoll.server.http.operations import _last_field


@pytest.mark.parametrize(
    ("begun", "field"),
    [
        (b"", ""),
        (b'{"args": ["a", "b", "c', "args"),
        (b'{"name": "a", "env": {"args": "1", "B": "', "env"),
        (b'{"a": "\\"args\\":", "command": [["x"], {"y": 1}', "command"),
        (json.dumps({"name": "x", "args": ["{", "["] * 9}).encode()[:-3], "args"),
    ],
)
def test_the_field_is_the_last_one_that_was_begun(begun: bytes, field: str) -> None:
    assert _last_field(begun) == field
