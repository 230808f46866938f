"""The stacks of a rank that a wrapper follows, and what the control plane asks of it.

A request is in the document of the desired state, which every wrapper reads anyway; the answer is a
record of the attempt. Stacks that are taken by themselves stay beside the results, as long as the
logs. With `agent/wrapper.py` this is one file for Python 3.7 and its standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time

if __package__:
    from atoll.agent import process, records, stack_text, stacks
else:  # beside it in one archive
    process, records = __import__("process"), __import__("records")
    stacks, stack_text = __import__("stacks"), __import__("stack_text")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from atoll.agent.wrapper import RankAttempt

CLOSE_S = 5.0  # for what is on its way to a store when the rank has ended


class Inspector:
    """Takes the stacks of one running command, and answers requests for its rank."""

    def __init__(self, attempt: RankAttempt, results: records.RecordStore) -> None:
        self.summary: list[str] = []  # of the last stacks that were taken by themselves
        self._attempt = attempt
        self._results = results
        self._command: process.Command | None = None
        self._turn = threading.Lock()  # forked children share the file of their dumps
        self._keeping: threading.Thread | None = None
        self._answering: threading.Thread | None = None
        self._is_idle = False
        # What was asked before this attempt began is not meant for it.
        self._answered = ((attempt.desired or {}).get("request") or {}).get("id")
        # No `tempfile`: it takes as long to import as all the rest.
        temporary = os.environ.get("TMPDIR") or "/tmp"
        self._folder = f"{temporary}/atoll-control-{os.getpid()}-{time.time_ns()}"

    def listen(self) -> str:
        """The socket on which the rank asks for the stacks of all ranks; empty if there is none."""
        try:
            os.mkdir(self._folder, 0o700)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(self._folder + "/control")
            listener.listen(8)
        except OSError:  # its rounds end without stacks
            return ""
        threading.Thread(target=self._serve, args=[listener], daemon=True).start()
        return self._folder + "/control"

    def follow(self, command: process.Command) -> None:
        self._command = command

    def close(self) -> None:
        """Waits for what is on its way to a store: stacks, and the last answer."""
        deadline = time.monotonic() + CLOSE_S
        for thread in (self._keeping, self._answering):
            if thread is not None:
                thread.join(max(deadline - time.monotonic(), 0.0))
        with contextlib.suppress(OSError):
            os.unlink(self._folder + "/control")
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)

    def keep(self, cause: str, *, can_continue: bool = False) -> threading.Event:
        """Takes the stacks in a thread, and stores them. The event: they are taken."""
        taken = threading.Event()
        keeping = threading.Thread(
            target=self._keep, args=[cause, can_continue, taken], daemon=True
        )
        keeping.start()
        self._keeping = keeping
        return taken

    def note_idle(self, idle_s: float | None, limit_s: float | None) -> None:
        """Keeps the stacks of a rank that has not moved for too long, once until it moves."""
        is_idle = limit_s is not None and idle_s is not None and idle_s >= limit_s
        if is_idle and not self._is_idle:
            self.keep(f"it did not move for {idle_s:.0f} s")
        self._is_idle = is_idle

    def answer(self, request: dict[str, Any] | None) -> None:
        """Does what is asked of this rank, once, in a thread: stacks may take seconds."""
        if not request or request["id"] == self._answered:
            return
        self._answered = request["id"]
        ranks, own = request["ranks"], self._attempt.rank
        is_meant = own in ranks if ranks is not None else own not in request.get("without", ())
        if is_meant and self._command is not None:
            answering = threading.Thread(target=self._answer, args=[request], daemon=True)
            answering.start()
            self._answering = answering

    def _answer(self, request: dict[str, Any]) -> None:
        assert self._command is not None
        if self._command.status is not None:  # its pid may be another process's by now
            return
        if request.get("cause"):
            self.keep(request["cause"])
            return
        if request.get("signal"):
            self._command.kill(request["signal"])
            document = {}
        else:
            document = self._take("", can_continue=False)
        store = self._attempt.record_store
        with contextlib.suppress(Exception):  # of whatever client the store has: none is an answer
            self._put(store, records.ANSWER, {**document, "id": request["id"]})

    def _keep(self, cause: str, can_continue: bool, taken: threading.Event) -> None:
        try:
            document = self._take(cause, can_continue=can_continue)
            self.summary = stack_text.summary_of(document)
        finally:
            taken.set()
            if self._command is not None:
                self._command.wake()
        with contextlib.suppress(Exception):  # the exit has their first lines all the same
            self._put(self._results, records.STACKS, document)

    def _take(self, cause: str, *, can_continue: bool) -> dict[str, Any]:
        assert self._command is not None
        attempt, py_spy = self._attempt, stacks.find_py_spy()
        with self._turn:
            return {
                "rank": attempt.rank,
                "attempt": attempt.attempt,
                "at": time.time(),
                "cause": cause,
                "processes": stacks.take(self._command.pid, py_spy, can_continue=can_continue),
            }

    def _put(self, store: records.RecordStore, kind: str, document: dict[str, Any]) -> None:
        name = records.name_of(self._attempt.rank, self._attempt.attempt, kind)
        store.put(name, json.dumps(document).encode())

    def _serve(self, listener: socket.socket) -> None:
        """Each connection is a rank whose round timed out: `stacks.request_all`."""
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(Exception):
                connection.settimeout(stacks.REQUEST_S)
                if process.TAKE_STACKS in connection.recv(4096):
                    self._put(self._attempt.record_store, records.ASK, {"at": time.time()})
                    self.keep(process.ROUND_CAUSE).wait(stacks.REQUEST_S)
                    connection.send(process.TAKE_STACKS)
