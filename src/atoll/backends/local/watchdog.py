"""Supervises the local ranks of one training, apart from the control plane.

Three processes, each the child of the one before. The *reaper*, a shell, only waits: should
watchdog and supervisor both be killed, it ends what is left below them. The *watchdog* watches the
supervisor: if that dies or freezes, it kills every process of the training and records how each
rank ended. The *supervisor* starts, stops and restarts ranks and records each exit first. Watchdog
and supervisor hold the training's lock: a free lock means that nobody is in charge.
The local executor passes the lock and a listening socket as inherited files. Only the standard
library and light modules are imported: a rank cannot start before this has loaded.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from atoll.agent.records import AttemptFacts
from atoll.backends.local import processes
from atoll.backends.local.journal import JournalWriter, Record
from atoll.backends.local.protocol import WATCHDOG_FILE
from atoll.backends.local.rank_process import lost_record
from atoll.files.writing import clear_way

# A supervisor that stays stopped by a signal for this long is killed. A debugger or a laptop that
# sleeps stops processes for moments; ranks without a supervisor wait no longer than this.
FROZEN_AFTER_S = 3.0


def main(directory: str, lock: int, listener: int) -> None:
    """Runs as the watchdog; returns when no process of the training is left."""
    os.set_inheritable(lock, False)
    os.set_inheritable(listener, False)
    dismiss = _fork_below_reaper(Path(directory))
    reaper = os.getppid()
    processes.adopt_orphans()
    is_heir = _write_first_mark(mark_of(Path(directory)))
    supervisor = os.fork()
    if supervisor == 0:
        from atoll.backends.local.supervisor import supervise

        supervise(Path(directory), listener, is_heir=is_heir)
        os._exit(0)
    os.close(listener)
    watch(Path(directory), supervisor)
    processes.remove_cgroup(Path(directory))
    with contextlib.suppress(OSError):
        os.write(dismiss, b"dismissed\n")
        if os.getppid() == reaper:
            os.kill(reaper, signal.SIGCONT)  # one that was stopped would stay


# Waits until it is dismissed, or until watchdog and supervisor have both died. What they leave
# comes to it as its children, whatever has become of its environment or session; some may carry
# their variable, or be in its control group, and be elsewhere. It ends after two rounds in which
# there was nothing. It is a shell, so that killing atoll by name does not kill it. Every command
# that is no builtin also reaps the children.
REAPER = """
read order
order=$order.
empty=0
while [ $empty -lt 2 ]; do
    below= ; read below < /proc/$$/task/$$/children
    if [ $order = dismissed. ]; then [ -n "$below" ] || exit 0; sleep 0.01; continue; fi
    marked=$(grep -ls "ATOLL_SUPERVISOR=$1" /proc/[0-9]*/environ)
    inside= ; [ -z "$2" ] || inside=$(cat "$2/cgroup.procs")
    empty=$((empty + 1))
    for file in $marked $below $inside; do
        empty=0; pid=${file#/proc/}; kill -9 "${pid%/environ}"
    done
    sleep 0.02
done
[ -z "$2" ] || rmdir "$2"
"""


def _fork_below_reaper(directory: Path) -> int:
    """Forks; the parent becomes the reaper, and the child goes on. Returns the pipe to dismiss it.

    Orphans of this process come to the reaper, which is not killed with the watchdog's children.
    """
    orders, dismiss = os.pipe2(os.O_CLOEXEC)
    read_end, is_posted = os.pipe2(os.O_CLOEXEC)
    processes.adopt_orphans()
    watchdog = os.fork()
    if watchdog != 0:
        # The signals that Python ignores would stay ignored.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for target, file in enumerate((orders, nowhere, nowhere)):
            os.dup2(file, target)
        # Every rank carries this, so the reaper never kills the ranks of a later supervisor.
        mark = _own_mark(watchdog)
        command = ["sh", "-c", REAPER, "reaper", mark, processes.cgroup_for(directory, mark)]
        with contextlib.suppress(OSError):  # no shell: the next control plane will clear up
            os.execvpe("sh", command, {"PATH": os.environ.get("PATH", os.defpath)})
        os._exit(0)
    os.setsid()
    os.environ["ATOLL_SUPERVISOR"] = _own_mark(os.getpid())
    os.close(orders)
    os.close(is_posted)
    os.read(read_end, 1)  # until the reaper stands there
    os.close(read_end)
    return dismiss


def _own_mark(pid: int) -> str:
    return f"{pid}.{processes.start_ticks(pid)}."


def mark_of(directory: Path) -> Path:
    """The file that names the watchdog; it exists until every process has been cleared away."""
    return directory / WATCHDOG_FILE


def _write_first_mark(mark: Path) -> bool:
    """Writes the mark; returns whether there was one: an earlier watchdog was killed."""
    was_there = mark.exists()
    with contextlib.suppress(OSError):  # on a full disk, the existing one is enough
        write_mark(mark, mark_for(os.getpid()))
    return was_there


def mark_for(pid: int) -> str:
    """The text of the mark."""
    return f"{pid} {processes.start_ticks(pid)}"


def write_mark(mark: Path, text: str) -> None:
    """Names the watchdog. A mark that does so already is left alone."""
    clear_way(mark)
    if not mark.exists() or mark.read_bytes() != text.encode():
        mark.write_text(text)


def watch(directory: Path, supervisor: int) -> None:
    """Waits for the end of the supervisor; records the exits that one that was killed has not."""
    status = _wait_for(supervisor)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return
    ended = kill_descendants()
    journal = JournalWriter(directory / "journal")
    now = journal.now()
    records = [lost_record(directory, one, ended, now) for one in journal.facts.running()]
    append_persistently(journal, records)
    mark_of(directory).unlink(missing_ok=True)


def _wait_for(supervisor: int) -> int:
    """Waits for the supervisor and returns its wait status. One that stays frozen is killed."""
    while True:
        _, status = os.waitpid(supervisor, os.WUNTRACED | os.WCONTINUED)
        if not os.WIFSTOPPED(status):
            if os.WIFCONTINUED(status):
                continue
            return status
        deadline = time.monotonic() + FROZEN_AFTER_S
        while time.monotonic() < deadline:
            time.sleep(0.1)
            pid, status = os.waitpid(supervisor, os.WNOHANG | os.WCONTINUED)
            if pid and not os.WIFCONTINUED(status):
                return status
            if pid:
                break
        else:
            processes.kill(supervisor)


def kill_descendants() -> dict[int, int]:
    """Kills every descendant of this process. Returns the wait status of each, by pid.

    Orphans come to this process, so killing children until there are none reaches all of them.
    """
    ended: dict[int, int] = {}
    while True:
        for pid in processes.children(os.getpid()):
            processes.kill(pid)
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return ended
        ended[pid] = status


def kill_orphans(left: Sequence[AttemptFacts], directory: Path, uid: str) -> None:
    """Kills ranks without a supervisor and all they started; returns when nothing is left."""
    while True:
        marked = {pid for pid in processes.all_pids() if _uid(pid) == uid}
        alive = {a.pid for a in left if processes.is_running(a.pid, a.start_ticks)}
        for pid in marked | processes.cgroup_members(directory):
            processes.kill(pid)
        for pid in alive:
            processes.kill_group(pid, signal.SIGKILL)
        if not marked and not alive and not processes.cgroup_members(directory):
            return
        time.sleep(0.01)


def _uid(pid: int) -> str:
    return processes.environment_of(pid).get(b"ATOLL_UID", b"").decode(errors="replace")


def append_persistently(journal: JournalWriter, records: list[Record]) -> None:
    """Appends to the journal, and retries for as long as the disk is full."""
    while records:
        try:
            journal.append(records)
            return
        except OSError:
            time.sleep(0.5)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
