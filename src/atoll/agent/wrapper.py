"""Runs one attempt of one rank, and writes its records where everybody can read them.

`python3 -S -I atoll.pyz RECORDS RANK ATTEMPT [--host NAME]`

RECORDS is a folder that all hosts see, or the URI of an object store. An attempt is claimed once: a
second process that is started for it ends at once. The first one waits for the start gate, runs
the command, sends heartbeats, stops it when it is not wanted, and writes how it ended. With
`agent/process.py` this is one file for Python 3.7 and its standard library (`wrapper_file`);
only an object store needs atoll with its `store` extra.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import sys
import threading
import time
from math import inf

if __package__:
    from atoll.agent import inspector, process, records
else:  # beside it in one archive
    inspector, process, records = map(__import__, ("inspector", "process", "records"))

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from atoll.agent.inspector import Inspector
    from atoll.agent.records import RecordStore


FROZEN_AFTER_S = 3.0  # stopped by a signal, as the supervisor of local ranks has it
WRITE_PATIENCE_S = 600.0  # for the record of an end: a file server is restarted in minutes
DUE_MARGIN_S = 10.0  # after the deadline, which a controller that lives keeps before
EVICTION_MARGIN_S = 1.0  # before the backend's own kill, in which the record is written
MAX_MISSED_HEARTBEATS = 3  # in a row: others may have given this attempt up
HANDED_OVER = "the time of its job is over: the next attempt takes over"


class Folder(records.RecordStore):
    """Records in a folder that all hosts share."""

    poll_s = 0.25  # a read of one small file
    heartbeat_s = 1.0  # a `utime`; NFS shows it to others a few seconds later

    def __init__(self, path: str) -> None:
        self.path = self.uri = path

    def create(self, name: str, data: bytes) -> bool:
        """By a link to a whole file: whoever sees the name sees all of it."""
        draft = process.write_draft(self._of(name), data)
        try:
            os.link(draft, self._of(name))
        except FileExistsError:
            pass  # or this very link, if the answer of a file server was lost
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            return self._create_by_name(name, data)
        finally:
            os.unlink(draft)
        process.sync_folder(self.path)
        return self.get(name) == data

    def put(self, name: str, data: bytes) -> None:
        process.write_file(self._of(name), data)

    def get(self, name: str) -> bytes | None:
        try:
            with open(self._of(name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def heartbeat(self, name: str) -> None:
        try:
            os.utime(self._of(name))
        except FileNotFoundError:
            with open(self._of(name), "wb"):
                pass

    def entries(self) -> dict[str, int]:
        stamps = {}
        try:
            with os.scandir(self.path) as listing:
                for entry in listing:
                    stamps[entry.name] = 0
                    if entry.name.endswith("." + records.HEARTBEAT):
                        with contextlib.suppress(FileNotFoundError):
                            stamps[entry.name] = os.stat(entry.path).st_mtime_ns
        except FileNotFoundError:
            return {}
        return stamps

    def delete(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._of(name))

    def _of(self, name: str) -> str:
        return f"{self.path}/{name}"

    def _create_by_name(self, name: str, data: bytes) -> bool:
        try:
            fd = os.open(self._of(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        process.sync_folder(self.path)
        return True


def open_record_store(uri: str) -> RecordStore:
    """The records under a path, file:// or the URI of an object store."""
    if uri.startswith("/"):
        return Folder(uri)
    if uri.startswith("file://"):
        from urllib.parse import unquote, urlsplit

        return Folder(unquote(urlsplit(uri).path))
    from atoll.objectstore.bucket import Bucket

    return Bucket.open(uri)


def read(record_store: RecordStore, name: str) -> dict[str, Any] | None:
    """The document of that name; None if there is none, or something else."""
    data = record_store.get(name)
    if data is None:
        return None
    try:
        document = json.loads(data.decode())
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def write(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True).encode() + b"\n"


class RankAttempt:
    """The records of one attempt, as its own process writes them."""

    def __init__(self, record_store: RecordStore, rank: int, attempt: int, host: str) -> None:
        self.record_store = record_store
        self.rank = rank
        self.attempt = attempt
        self.host = host
        self.desired: dict[str, Any] | None = None

    def claim(self, **facts: Any) -> bool:
        """Whether this process, and no other, is to run the attempt."""
        pid = os.getpid()
        token = f"{self.host}-{pid}-{time.time_ns()}"
        claim = records.claim_record(
            self.rank, self.attempt, time.time(), token=token, host=self.host, pid=pid, **facts
        )
        return self.record_store.create(self._name(records.CLAIM), write(claim))

    def started(self, pid: int) -> None:
        start = records.start_record(self.rank, self.attempt, time.time(), host=self.host, pid=pid)
        self.record_store.put(self._name(records.START), write(start))

    def heartbeat(self) -> None:
        self.record_store.heartbeat(self._name(records.HEARTBEAT))

    def end(self, record: dict[str, Any]) -> bool:
        """Writes how it ended, once; False if somebody else has concluded that already."""
        deadline, pause_s = time.monotonic() + WRITE_PATIENCE_S, 0.1
        record = records.exit_record(self.rank, self.attempt, record)
        line = process.record_line(record, records.MAX_RECORD_BYTES)
        while True:
            try:
                return self.record_store.create(self._name(records.EXIT), line)
            except Exception as error:  # of whatever client the store has
                if time.monotonic() > deadline:
                    raise
                say(f"the record of its end cannot be written yet: {error}")
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 10.0)

    def is_concluded(self) -> bool:
        """Whether somebody has written how it ended."""
        return self.record_store.get(self._name(records.EXIT)) is not None

    def is_unwanted(self, *, unless_missing: bool = False) -> bool:
        """By the desired state as it is now, which `desired` holds from then on.

        `unless_missing`: what runs is not ended because the desired state is lost.
        """
        desired = read(self.record_store, records.DESIRED)
        if desired is None:
            return not unless_missing
        self.desired = desired
        return records.is_unwanted(desired, self.rank, self.attempt)

    def _name(self, kind: str) -> str:
        return records.name_of(self.rank, self.attempt, kind)


class DesiredStateWatcher:
    """Follows the desired state beside a running command, in a thread: a store may be slow."""

    def __init__(
        self, attempt: RankAttempt, command: process.Command, inspector: Inspector
    ) -> None:
        self.is_stop_wanted = False
        self.is_concluded = False
        self._attempt = attempt
        self._command = command
        self._inspector = inspector
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(timeout=5.0)

    def _follow(self) -> None:
        record_store, heartbeat_at, is_started = (
            self._attempt.record_store,
            0.0,
            bool(self._command.failure),
        )
        while True:
            with contextlib.suppress(Exception):  # of whatever client the store has: asked again
                now = time.monotonic()
                if not is_started:
                    self._attempt.started(self._command.pid)
                    is_started = True
                if now >= heartbeat_at + record_store.heartbeat_s:
                    is_late = (
                        heartbeat_at
                        and now > heartbeat_at + MAX_MISSED_HEARTBEATS * record_store.heartbeat_s
                    )
                    heartbeat_at = now
                    self._attempt.heartbeat()
                    # Who was silent may have been given up, and must not run on.
                    if is_late and self._attempt.is_concluded():
                        self.is_concluded = True
                        self._command.wake()
                if not self.is_stop_wanted and self._attempt.is_unwanted(unless_missing=True):
                    self.is_stop_wanted = True
                    self._command.wake()
                self._inspector.answer((self._attempt.desired or {}).get("request"))
            if self._over.wait(record_store.poll_s):
                return


class StopPolicy:
    """Decides when a running command is stopped, and when it is killed."""

    def __init__(
        self,
        command: process.Command,
        watch: DesiredStateWatcher,
        launch: dict[str, Any],
        inspector: Inspector,
        ends_at: float | None = None,
    ) -> None:
        self.reason = ""  # why it was ended; empty if it ended by itself
        self.message = ""
        self.no_stacks = ""  # why none were taken before it was killed
        self._inspector = inspector
        self._taken: threading.Event | None = None  # its stacks, before it is killed
        self._taken_by = inf  # then it is killed without them
        self._early_s = 0.0  # by which they are taken before the kill, which cannot wait
        self._command = command
        self._watch = watch
        self._grace_s = launch["stop_grace_s"]
        self._eviction_s = launch["eviction_s"]
        self._ends_at = ends_at  # monotonic: its job ends soon after, and another takes over
        self._kill_at: float | None = None
        self.stop_requested_at = 0.0  # wall, as the program dates its failure
        # Where nobody else is left to keep it.
        deadline_s = launch.get("deadline_s")
        self._due_at = None if deadline_s is None else time.monotonic() + deadline_s + DUE_MARGIN_S

    def tick(self) -> float:
        """Acts, and returns the seconds after which to call it again at the latest."""
        now, command = time.monotonic(), self._command
        if command.is_orphan:
            self.note_orphan()
        elif self._watch.is_concluded:
            self.no_stacks = "it was given up as lost"
            self._kill("SupervisorLost", self.no_stacks)
        elif self.reason != "Stopped" and (self._watch.is_stop_wanted or self._is_time_up(now)):
            self.reason, self._kill_at = "Stopped", now + self._grace_s
            self.stop_requested_at = time.time()
            self.message = "" if self._watch.is_stop_wanted else HANDED_OVER
            command.kill(signal.SIGTERM)
        elif self._due_at is not None and now >= self._due_at and not self.reason:
            self.reason, self._kill_at = "DeadlineExceeded", now + self._grace_s
            command.kill(signal.SIGTERM)
        elif command.signalled and self._kill_at is None:
            self._kill_at = now + max(self._eviction_s - EVICTION_MARGIN_S, 0.1)
            self._early_s = process.STACKS_S
        elif command.stopped_at is not None and now >= command.stopped_at + FROZEN_AFTER_S:
            self._kill("Frozen", f"stopped by a signal for over {FROZEN_AFTER_S:g} s")
        if self._kill_at is None:
            return 0.5
        if now >= self._kill_at - self._early_s and not self._wait_for_stacks(now):
            if now >= self._kill_at:
                command.kill(signal.SIGKILL)
                self._kill_at = now + 1.0
        return max(min(self._kill_at - now, 0.5), 0.05)

    def _wait_for_stacks(self, now: float) -> bool:
        """Whether the kill has to wait: its stacks are taken first, if that does not take long."""
        if self._grace_s == 0 and self.reason in ("Stopped", "DeadlineExceeded"):
            self.no_stacks = "it had no grace period"
        if self.no_stacks:
            return False
        if self._taken is None:
            is_frozen = self.reason == "Frozen"
            cause = process.FROZEN_CAUSE if is_frozen else process.GRACE_CAUSE
            self._taken = self._inspector.keep(cause, can_continue=is_frozen)
            self._taken_by = now + process.STACKS_S
        if self._taken.is_set():
            return False
        if now >= self._taken_by:
            self.no_stacks = f"they were not taken within {process.STACKS_S:g} s"
        return now < self._taken_by

    def note_orphan(self) -> None:
        self.no_stacks = "the process that started its wrapper has ended"
        self._kill("SupervisorLost", self.no_stacks)

    def _is_time_up(self, now: float) -> bool:
        return self._ends_at is not None and now >= self._ends_at

    def _kill(self, reason: str, message: str) -> None:
        if not self.reason:
            self.reason, self.message = reason, message
        self._kill_at = 0.0


class Interrupted(Exception):
    """The backend has ended this process before it ran anything."""


def _interrupt(number: int, _: object) -> None:
    raise Interrupted(signal.Signals(number).name)


def wait_at_gate(attempt: RankAttempt, launch: dict[str, Any]) -> dict[str, Any] | None:
    """What the gate says once it is open; None if the attempt is not to run after all."""
    parent, record_store = os.getppid(), attempt.record_store
    heartbeat_at = 0.0
    while not attempt.is_unwanted() and os.getppid() == parent:
        if not launch.get("gated"):
            return {}
        gate = read(record_store, records.GATE)
        if gate is not None:
            return gate
        if time.monotonic() >= heartbeat_at + record_store.heartbeat_s:
            heartbeat_at = time.monotonic()
            attempt.heartbeat()
        time.sleep(record_store.poll_s)
    return None


def meeting_of(attempt: RankAttempt, launch: dict[str, Any]) -> dict[str, str]:
    """Where the ranks meet: at rank 0, which says so when it is claimed."""
    if not launch.get("meeting"):
        return {}
    meeting = read(attempt.record_store, records.RENDEZVOUS)
    while meeting is None and not attempt.is_unwanted():  # rank 0 is on its way
        time.sleep(attempt.record_store.poll_s)
        meeting = read(attempt.record_store, records.RENDEZVOUS)
    if meeting is None:
        return {}
    own = f"{meeting['host']}:{meeting['port']}"
    values = {"host": meeting["host"], "port": str(meeting["port"]), "endpoint": own}
    return {name: values[kind] for name, kind in launch["meeting"].items()}


def call_meeting(attempt: RankAttempt) -> None:
    """Rank 0 names its host and a free port; on the same host it stays where it was."""
    before = read(attempt.record_store, records.RENDEZVOUS)
    if before is not None and before["host"] == attempt.host:
        return
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    attempt.record_store.put(records.RENDEZVOUS, write({"host": attempt.host, "port": port}))


def unpack_code(record_store: RecordStore, launch: dict[str, Any]) -> str:
    """The root of the code that travels with the training, unpacked; empty if it has none.

    Beside the records if they are in a folder, so that all ranks have it once. Raises Refused, and
    OSError.
    """
    code = launch.get("code")
    if not code:
        return ""
    if __package__:
        from atoll.agent import unpack
    else:
        unpack = __import__("unpack")
    root = code_root(record_store, launch["uid"], code["digest"])
    if not os.path.isdir(root):
        data = record_store.get(records.CODE)
        if data is None:
            raise OSError("the code of the training is lost")
        unpack.check_digest(data, code["digest"], "what is stored as code")
        unpack.unpack_or_refuse(data, root)
    return root


def code_root(record_store: RecordStore, uid: str, digest: str) -> str:
    base = getattr(record_store, "path", "")
    if base:
        return f"{base}/tree-{digest[:12]}"
    import tempfile

    return f"{tempfile.gettempdir()}/atoll-{uid[:12]}-{digest[:12]}"


def with_path(env: dict[bytes, bytes], root: str, folders: list[str]) -> dict[bytes, bytes]:
    """The environment in which Python looks for modules in these folders of the code, too."""
    paths = [os.fsencode(os.path.normpath(os.path.join(root, folder))) for folder in folders]
    before = env.get(b"PYTHONPATH")
    joined = os.pathsep.encode().join([*paths, *([before] if before else [])])
    return {**env, b"PWD": os.fsencode(root), **({b"PYTHONPATH": joined} if paths else {})}


def with_hook(env: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """The environment in which a Python rank registers the dump of its stacks."""
    switch, before = (
        os.fsdecode(env.get(name, b"")) for name in (process.SWITCH.encode(), b"PYTHONPATH")
    )
    path = process.hook_path(switch, before)
    return env if path is None else {**env, b"PYTHONPATH": os.fsencode(path)}


def environment_for(
    attempt: RankAttempt, launch: dict[str, Any], gate: dict[str, Any], meeting: dict[str, str]
) -> dict[bytes, bytes]:
    """The environment of this host's process, and in it what the launch says."""
    size = attempt.desired["size"] if attempt.desired else 0
    together = gate.get("together")
    added = {
        **launch["env"],
        **meeting,
        **dict.fromkeys(launch["rank_variables"], str(attempt.rank)),
        **dict.fromkeys(launch["size_variables"], str(size)),
        **dict.fromkeys(launch["node_variables"], attempt.host),
        **({launch["together"]: str(together)} if together and launch.get("together") else {}),
        "ATOLL_ATTEMPT": str(attempt.attempt),
    }
    env = {k: v for k, v in process.environment().items() if k.decode() not in launch["unset"]}
    return {**env, **{os.fsencode(name): os.fsencode(value) for name, value in added.items()}}


def open_log(attempt: RankAttempt, launch: dict[str, Any]) -> Any:
    """Where the output goes, too, if the records are in no folder; else None."""
    if not launch.get("logs"):
        return None
    from atoll.logs.bucket import UploadedLog
    from atoll.objectstore.bucket import Bucket

    store = Bucket.open("{}/{}".format(launch["logs"], attempt.rank))
    return UploadedLog(store, attempt.attempt, often_s=min(attempt.record_store.poll_s, 0.5))


def open_times(attempt: RankAttempt, launch: dict[str, Any]) -> Any:
    """Where the times of the output go, if this process writes to a log itself; else None."""
    times = launch.get("times")
    with contextlib.suppress(OSError):  # a log without times is read all the same
        return times and process.OutputTimes(times.format(rank=attempt.rank))
    return None


def result_path(attempt: RankAttempt, launch: dict[str, Any]) -> str:
    """Return the file in which the program leaves its result: the final one, or one to upload."""
    name, folder = records.name_of(attempt.rank, attempt.attempt, records.RESULT), launch["results"]
    if not folder.startswith("/"):
        import tempfile

        folder = tempfile.mkdtemp(prefix="atoll-result-")
    return f"{folder}/{name}"


def upload_result(attempt: RankAttempt, launch: dict[str, Any], path: str) -> None:
    """Upload the result before the exit that names it is written."""
    if launch["results"].startswith("/"):
        return
    with open(path, "rb") as file:
        data = file.read()
    until, pause_s = time.monotonic() + WRITE_PATIENCE_S, 0.1
    while True:
        try:
            open_record_store(launch["results"]).put(os.path.basename(path), data)
            return
        except Exception as error:  # of whatever client the store has
            if time.monotonic() > until:
                say(f"the result cannot be uploaded: {error}")
                return
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 10.0)


def fetch(record_store: RecordStore, name: str, path: str) -> None:
    """Downloads a file of the records for the rank. Other ranks may do the same there."""
    data = record_store.get(name)
    if data is None:
        raise FileNotFoundError(errno.ENOENT, "the records have no such file", name)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    process.write_file(path, data)


def run(attempt: RankAttempt) -> int:
    """Claims the attempt and runs it to its end. The code to exit with."""
    launch = read(attempt.record_store, records.LAUNCH)
    started_monotonic = time.monotonic()
    if launch is None or attempt.is_unwanted():
        say("this attempt is not wanted")
        return 0
    attempt.record_store.poll_s = launch.get("poll_s", attempt.record_store.poll_s)
    attempt.record_store.heartbeat_s = launch.get("heartbeat_s", attempt.record_store.heartbeat_s)
    if not attempt.claim(job=os.environ.get(launch.get("job_variable", ""), "")):
        say(f"another process has run, or runs, rank {attempt.rank}, attempt {attempt.attempt}")
        return process.CLAIMED
    for number in process.ENDING:
        signal.signal(number, _interrupt)
    log = open_log(attempt, launch)
    try:
        for path, name in launch.get("files", {}).items():
            fetch(attempt.record_store, name, path)
        if attempt.rank == 0 and launch.get("meeting"):
            call_meeting(attempt)
        root = unpack_code(attempt.record_store, launch)
        gate = wait_at_gate(attempt, launch)
        if gate is None:
            return _unstarted(attempt, None)
        env = environment_for(attempt, launch, gate, meeting_of(attempt, launch))
        if root:
            env = with_path(env, root, launch["code"]["path"])
        env = with_hook(env)
        result = result_path(attempt, launch)
        env[process.RESULT_VARIABLE.encode()] = os.fsencode(result)
        own = inspector.Inspector(attempt, open_record_store(launch["results"]))
        env[process.CONTROL_VARIABLE.encode()] = os.fsencode(own.listen())
        is_own_file = not env.get(process.ERROR_VARIABLE.encode())
        error_file = process.error_file_of(env)
        started_at = time.time()
        command = process.Command(
            launch["command"], env, is_bound=True, is_leader=True, folder=root or launch["folder"]
        )
    except Interrupted as error:
        return _unstarted(attempt, str(error))
    except OSError as error:  # no process to be had, or no disk for files
        return _unstarted(attempt, None, f"{error}")
    command.times = open_times(attempt, launch)
    own.follow(command)
    use = process.watch_use(env, command, is_contained=False)
    watch = DesiredStateWatcher(attempt, command, own)
    lifetime_s = launch.get("life_s")
    ends_at = None if lifetime_s is None else started_monotonic + lifetime_s
    stop_policy = StopPolicy(command, watch, launch, own, ends_at)

    def tick() -> float:
        if use is not None:
            own.note_idle(use.unchanged_s(), launch.get("stall_s"))
        return stop_policy.tick()

    command.wait(tick)
    watch.close()
    if use is not None:
        use.close()
    record = process.record_of(command, launch["command"][0], error_file, attempt.host)
    record["startedAt"] = started_at
    record.update(process.result_fields(result))
    if command.failure:
        say(record["message"])
    if command.signalled:
        record["signalled"] = signal.Signals(command.signalled).name
    if log is not None:
        log.close()
    if record.get("result"):
        upload_result(attempt, launch, result)
    if command.is_orphan and record["signal"] == "SIGKILL":
        stop_policy.note_orphan()
    if (
        stop_policy.reason == "Stopped"
        and record.get("failedAt", inf) < stop_policy.stop_requested_at
    ):
        stop_policy.reason = ""  # it failed by itself, and still unwound when it was stopped
    if stop_policy.reason and (record["code"] != 0 or stop_policy.message == HANDED_OVER):
        record["reason"] = stop_policy.reason
        record["message"] = stop_policy.message or record.get("message", "")
    record["stopped"] = stop_policy.reason == "Stopped"
    stack = own.summary
    if stop_policy.no_stacks and not stack:
        stack = ["no stacks: " + stop_policy.no_stacks]
    if stack:
        record["stack"] = stack
    # Who reads how it ended finds its stacks, and who sent the signal that ended it an answer. A
    # backend that ends it waits for neither.
    if not command.signalled:
        own.close()
    if not watch.is_concluded:
        attempt.end(record)
    leave_note(launch, record)
    own.close()
    if is_own_file:
        process.remove_with_folder(error_file)
    if not launch["results"].startswith("/"):
        process.remove_with_folder(result)
    process.end_as(record, None if command.failure else command.status)


def leave_note(launch: dict[str, Any], record: dict[str, Any]) -> None:
    """Why the rank failed, in the file that the backend shows, if it has one."""
    path = launch.get("failure_file")
    if not path or not record["code"]:
        return
    name = record["signal"] or record["code"]
    detail = record.get("message") or "\n".join(record.get("tail", [])[-5:])
    with contextlib.suppress(OSError), open(path, "w", errors="replace") as file:
        file.write(f"rank ended with {name}: {detail}"[:1000])


def _unstarted(attempt: RankAttempt, signalled: str | None, failure: str = "") -> int:
    """It was claimed and ends before it has run anything."""
    record = process.exit_fields(None, time.time())
    is_stopped = signalled is None and not failure
    record.update(host=attempt.host, ran=False, stopped=is_stopped, signalled=signalled)
    if failure:
        say(failure)
        record.update(code=process.CANNOT_RUN, reason="CannotRun", message=failure)
    attempt.end(record)
    return 0 if is_stopped else process.CANNOT_RUN if failure else 143


def say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"atoll: {text}\n".encode(errors="replace"))


def main(arguments: list[str]) -> int:
    host = os.uname().nodename
    if len(arguments) == 5 and arguments[3] == "--host":
        host = arguments[4] or host
        arguments = arguments[:3]
    if len(arguments) != 3 or not arguments[1].isdigit() or not arguments[2].isdigit():
        sys.stderr.write("usage: atoll.pyz RECORDS RANK ATTEMPT [--host NAME]\n")
        return 2
    return run(
        RankAttempt(open_record_store(arguments[0]), int(arguments[1]), int(arguments[2]), host)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
