"""Results in marked lines of a log: what is read, and what is ignored."""

from __future__ import annotations

import pytest

from atoll.agent.result import (
    MARK,
    MAX_BYTES,
    Result,
    encode_value,
    nonce_of,
    result_lines,
    set_result,
)
from atoll.backends.kubernetes.results import parts_expected, read_result, visible

NONCE = nonce_of("a-launch")


def lines_of(result: Result, nonce: str = NONCE, call: str = "00000001") -> list[str]:
    return [line.decode().rstrip("\n") for line in result_lines(result, nonce, call)]


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "0 1 gASVBQAAAAAAAABLKi4=",
        f"{NONCE} 00000001 json 0 1 !!!",
        f"{NONCE} 00000001 json 0 1 A",
        f"{NONCE} 00000001 json 1 1 MQ==",
        f"{NONCE} 00000001 json 0 9999 MQ==",
        f"{NONCE} 00000001 yaml 0 1 MQ==",
        f"{NONCE} 00000001 json -1 1 MQ==",
        f"{NONCE} 00000001 json 0 1 MQ== more",
        f"{nonce_of('another')} 00000001 json 0 1 MQ==",
        "\u0660" * 40,
    ],
)
def test_a_bad_mark_is_ignored(rest: str) -> None:
    alone = read_result([f"before {MARK}{rest}"], NONCE)
    assert alone.result is None
    companion = read_result([*lines_of(encode_value(7)), MARK + rest], NONCE)
    assert companion.result == encode_value(7)


def test_the_last_complete_result_counts_and_calls_do_not_mix() -> None:
    first, second = encode_value("a" * 9000), encode_value("b" * 9000)
    a, b = lines_of(first, call="0000000a"), lines_of(second, call="0000000b")
    assert len(a) == 4
    mixed = [line for pair in zip(a, b, strict=True) for line in pair]
    assert read_result(mixed, NONCE).result == second
    assert read_result([*b, *a[:2]], NONCE).result == second
    assert read_result(a[1:], NONCE) == (None, True)
    assert parts_expected(a[-1:], NONCE) == 4
    assert parts_expected(["x", MARK], NONCE) == 0


def test_lines_fit_into_one_write_and_hide_nothing_else() -> None:
    lines = result_lines(Result("msgpack", bytes(MAX_BYTES)), NONCE, "00000001")
    assert max(map(len, lines)) <= 4096
    assert visible("half" + lines[0].decode()) == "half"
    assert visible(lines[1].decode()) is None
    assert visible("plain") == "plain"


def test_a_rank_of_a_pod_prints_its_result(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATOLL_UID", "a-launch")
    monkeypatch.setenv("ATOLL_RESULT", "log")
    set_result({"loss": 1})
    reading = read_result(capfd.readouterr().out.split("\n"), NONCE)
    assert reading.result == Result("json", b'{"loss": 1}')
