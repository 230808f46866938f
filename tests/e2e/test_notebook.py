"""A real Jupyter kernel: a training is shown live in place, what ranks print is text, and errors
are a few lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

BAD = "<script>alert(1)</script>"
START = f"""
import threading
from pathlib import Path
import atoll
words = "echo '{BAD}'; while [ ! -e go ]; do sleep 0.05; done"
command = ["sh", "-c", words]
training = atoll.Client().deploy_distributed("in-notebook", command=command, world_size=1)
training.wait_until_target_world()
training.show()
"""
FINISH = """
Path("go").touch()
training.show(wait=True)
for thread in threading.enumerate():
    if thread.name.startswith("atoll-show"):
        thread.join(60)
"""


class Kernel:
    """Runs cells and keeps what they show."""

    def __init__(self, atoll: Any) -> None:
        self.manager = KernelManager()
        self.manager.start_kernel(env=atoll.env, cwd=str(atoll.cwd))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code: str) -> list[tuple[str, dict[str, Any]]]:
        shown: list[tuple[str, dict[str, Any]]] = []
        self.client.execute_interactive(
            code,
            timeout=100,
            output_hook=lambda message: shown.append((message["msg_type"], message["content"])),
        )
        return [each for each in shown if each[0] not in ("status", "execute_input")]

    def html(self, code: str) -> str:
        [(kind, content)] = self.run(code)
        assert kind == "execute_result", content
        return str(content["data"]["text/html"])

    def stop(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@pytest.fixture
def kernel(atoll: Any) -> Iterator[Kernel]:
    kernel = Kernel(atoll)
    yield kernel
    kernel.stop()


def test_the_cells_of_the_page_run(atoll: Any, kernel: Kernel) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text()
    first, second = re.findall(r'^```python title="cell-\d"\n(.*?)^```', page, re.M | re.S)
    [(kind, shown)] = kernel.run(first)
    assert kind == "display_data", shown
    assert "my-run" in shown["data"]["text/html"]
    answers = [content for kind, content in kernel.run(second) if kind == "execute_result"]
    assert [answer["data"]["text/plain"] for answer in answers] == ["{'lr': 0.1, 'loss': 0.05}"]
    atoll("rm", "-f", "my-run")


def test_a_training_is_shown_live_and_what_ranks_say_is_text(atoll: Any, kernel: Kernel) -> None:
    [(kind, first)] = kernel.run(START)
    assert kind == "display_data", first
    assert "in-notebook" in first["data"]["text/html"]
    assert "ready" in first["data"]["text/plain"]
    after = kernel.run(FINISH)
    updates = [content for kind, content in after if kind == "update_display_data"]
    last = {content["transient"]["display_id"]: content["data"] for content in updates}
    place = first["transient"]["display_id"]
    assert "succeeded" in last[place]["text/html"], "the display of the first cell went on"
    assert all("succeeded" in data["text/plain"] for data in last.values())

    [(kind, ended)] = kernel.run("await training.show_async(wait=True)")
    assert kind == "display_data"
    assert "succeeded" in ended["data"]["text/plain"]

    assert "in-notebook" in kernel.html("training")
    assert "1 of 1" in kernel.html("training.world")
    assert "exited" in kernel.html("training.rank_exits")
    assert "in-notebook" in kernel.html("atoll.Client().list(prefix='in-notebook')")
    for code in ("training.logs()", "training.logs()[0]"):
        shown = kernel.html(code)
        assert BAD not in shown
        assert "&lt;script&gt;" in shown
    [(_, printed)] = kernel.run("print(training.logs()[0])")
    assert printed["text"] == f"{BAD}\n"

    [(kind, error)] = kernel.run("atoll.Client().get('no-such-training')")
    assert kind == "error"
    assert error["ename"] == "NotFound"
    assert len(error["traceback"]) <= 4
    assert "cell, line 1" in error["traceback"][1]
    assert "src/atoll" not in "".join(error["traceback"])
    atoll("rm", "-f", "in-notebook")
