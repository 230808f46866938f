"""Stacks are read from two tools, named by the user's own line, and folded where they are equal."""

from __future__ import annotations

from typing import Any

from atoll.agent.stack_text import location_of, summary_of
from atoll.agent.stacks import threads_of_faulthandler, threads_of_py_spy
from atoll.server.stacks import fold

REDUCE = [
    {"file": "/x/site-packages/torch/distributed/c10d.py", "line": 9, "function": "all_reduce"},
    {"file": "/home/me/train.py", "line": 12, "function": "step", "code": "all_reduce(x)"},
]
OPEN = [{"file": "/home/me/data.py", "line": 3, "function": "read", "code": "open(path)"}]
DUMP = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/home/me/train.py", line 30 in watch

Current thread 0x00007f02 [main] (most recent call first):
  File "/home/me/train.py", line 12 in step
  File "/home/me/train.py", line ??? in <module>
"""


def stacks(rank: int, *frames: list[Any], **more: Any) -> dict[str, Any]:
    processes = [
        {"pid": 100 + i, "threads": [{"frames": each}], "reason": ""}
        for i, each in enumerate(frames)
    ]
    return {"rank": rank, "attempt": 0, "processes": processes, **more}


def lines(ranks: list[dict[str, Any]]) -> list[str]:
    return [group.message for group in fold(ranks)]


def test_equal_stacks_are_one_line_and_the_odd_one_has_its_own() -> None:
    ranks = [stacks(rank, OPEN if rank == 3 else REDUCE) for rank in range(6)]
    assert lines(ranks) == [
        "5 ranks (0-2, 4-5) in all_reduce (c10d.py), train.py:12 in step: all_reduce(x)",
        "rank 3 in data.py:3 in read: open(path)",
    ]


def test_a_stack_inside_of_import_has_the_lines_of_people_only() -> None:
    machinery = {"file": "<frozen importlib._bootstrap>", "line": 1, "function": "_load"}
    (group,) = fold([stacks(0, [*OPEN, machinery, REDUCE[1]])])
    assert group.stack == ["data.py:3 in read: open(path)", "train.py:12 in step: all_reduce(x)"]
    (only,) = fold([stacks(0, [machinery])])
    assert len(only.stack) == 1


def test_another_line_of_the_same_function_is_another_place() -> None:
    other = [{**REDUCE[0]}, {**REDUCE[1], "line": 13}]
    assert len(fold([stacks(0, REDUCE), stacks(1, other)])) == 2


def test_children_come_after_ranks_and_reasons_are_shown() -> None:
    no_python = {"pid": 9, "threads": [], "reason": "it is no Python"}
    sleeper = stacks(2)
    sleeper["processes"] = [no_python]
    gone = {"rank": 4, "attempt": 0, "reason": "it has ended"}
    assert lines([stacks(0, REDUCE, OPEN, OPEN), sleeper, gone]) == [
        "rank 0 in all_reduce (c10d.py), train.py:12 in step: all_reduce(x)",
        "rank 2: it is no Python",
        "rank 4: it has ended",
        "2 children of rank 0 in data.py:3 in read: open(path)",
    ]


def test_a_dump_of_pythons_own_has_the_main_thread_first() -> None:
    main, other = threads_of_faulthandler(DUMP)
    assert main["name"] == "main"
    assert main["frames"][0] == {"file": "/home/me/train.py", "line": 12, "function": "step"}
    assert main["frames"][1]["line"] == 0
    assert location_of(other["frames"]) == "wait (threading.py), train.py:30 in watch"
    assert threads_of_faulthandler("rubbish\n") == []


def test_a_dump_of_py_spy_has_the_main_thread_first() -> None:
    frame = {"filename": "/a.py", "line": 2, "name": "f", "short_filename": "a.py"}
    threads = [
        {"pid": 7, "os_thread_id": 8, "thread_name": "Thread-1", "frames": []},
        {"pid": 7, "os_thread_id": 7, "thread_name": None, "frames": [frame]},
    ]
    main, other = threads_of_py_spy(threads)
    assert (main["frames"][0]["function"], other["name"]) == ("f", "Thread-1")


def test_the_summary_fits_into_a_record() -> None:
    deep = [{"file": f"/{'x' * 90}.py", "line": i, "function": "f" * 90} for i in range(60)]
    kept = summary_of(stacks(0, deep, deep))
    assert 0 < sum(map(len, kept)) <= 1000
    assert summary_of({"reason": "it has ended"}) == ["no stacks: it has ended"]
    assert location_of([]) == "no Python code"
