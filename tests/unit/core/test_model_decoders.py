"""Threads that meet a type for the first time at the same moment."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILDREN = 6
# Each type is new to both threads. The interpreter goes from one to the other as often as it can,
# so a child that is not protected dies nearly always.
CHILD = """
import sys, threading
import msgspec
from atoll.core.model import convert, json_decoder, msgpack_decoder
from atoll.core.model import decode

how = sys.argv[1]
kinds = []
for number in range(200):
    leaf = msgspec.defstruct("Leaf", [("a", int), ("b", list[int]), ("c", dict[str, float])])
    kinds.append(msgspec.defstruct("Kind", [(f"f{at}", leaf) for at in range(5)]))
value = {f"f{at}": {"a": 1, "b": [1], "c": {"x": 1.0}} for at in range(5)}
text, packed = msgspec.json.encode(value), msgspec.msgpack.encode(value)
meeting = threading.Barrier(2)

def work():
    for kind in kinds:
        meeting.wait()
        if how == "decode":
            decode(text, kind)
        elif how == "json":
            json_decoder(kind).decode(text)
        elif how == "msgpack":
            msgpack_decoder(kind).decode(packed)
        else:
            convert(value, kind)

sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def ends(how: str) -> list[int]:
    codes = []
    for _ in range(CHILDREN):
        child = subprocess.run([sys.executable, "-c", CHILD, how], capture_output=True)
        codes.append(child.returncode)
    return codes


@pytest.mark.parametrize("how", ["decode", "json", "msgpack", "convert"])
def test_two_threads_may_decode_a_type_for_the_first_time_at_once(how: str) -> None:
    assert ends(how) == [0] * CHILDREN
