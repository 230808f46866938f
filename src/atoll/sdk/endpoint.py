"""Endpoints: where the control plane is, and what of the caller goes to ranks on this machine.

The user's own control plane is found if it runs and started if it does not. It is a process of its
own: it outlives the program that needed it first, and all programs of one user share it. A
`PrivatePlane` belongs to one client and ends with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import atoll
from atoll.backends.local.state import (
    ENDPOINT,
    EnclosingRank,
    check_writable,
    enclosing_rank,
    state_dir,
)
from atoll.core.errors import AtollError, Permanent, Temporary, ValidationError
from atoll.core.stores import keys_of, missing_keys
from atoll.files.ownership import private
from atoll.sdk import config
from atoll.sdk.effects import NoControlPlane, OtherRelease, describe_difference

if TYPE_CHECKING:
    import subprocess

    from atoll.core.spec import TrainingSpec

LOOPBACK = ("localhost", "::1")
_LOOPBACK_NET = re.compile(r"127(\.\d{1,3}){3}")

# Where programs and libraries are: a local rank finds what its caller would find, whichever shell
# the control plane was started from.
SHARED_ENV = (
    "CONDA_PREFIX",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
    "PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
)


class PlainToken(UserWarning):
    """A token travels over a network where others can read it."""


class Address(NamedTuple):
    """Where a control plane is. The user's own is reached through the socket in `directory`; its
    URL is for browsers, and nothing is sent to it from here."""

    url: str
    token: str | None = None
    directory: Path | None = None

    @property
    def is_local(self) -> bool:
        host = urlsplit(self.url).hostname or ""
        return host in LOOPBACK or bool(_LOOPBACK_NET.fullmatch(host))


class Endpoint(Protocol):
    def address(self) -> Address:
        """Where to send requests. May start a control plane, and blocks while it starts."""

    def lost(self) -> None:
        """Nothing listens at the address any more: the next `address()` reads it again."""

    def local_fields(self, spec: TrainingSpec) -> dict[str, Any]:
        """Fields of the spec that come from the caller's machine if ranks run on it."""

    def close(self) -> None:
        """Ends whatever was started only for this client."""


class Fixed:
    """An endpoint at a fixed address."""

    def __init__(self, url: str, token: str | None, field: str = "url") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValidationError(field, url, "expected http://host:port or https://host")
        if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
            raise ValidationError("token", "…", "expected one line of printable characters")
        self._address = Address(url.rstrip("/"), token)
        if token is not None and parts.scheme == "http" and not self._address.is_local:
            text = (
                f"the token is sent to {parts.hostname} without encryption, and who reads it on "
                "the way can use it: use https (atoll serve --tls-cert), or a tunnel"
            )
            warnings.warn(text, PlainToken, stacklevel=4)

    def address(self) -> Address:
        return self._address

    def lost(self) -> None:
        pass

    def local_fields(self, spec: TrainingSpec) -> dict[str, Any]:
        return local_fields(spec, is_own=False) if self._address.is_local else {}

    def close(self) -> None:
        pass


def is_local_executor(executor: str | None) -> bool:
    """Whether ranks of this executor run on the caller's machine, as far as is known here."""
    if executor not in (None, "local"):
        return False
    url = os.environ.get("ATOLL_URL")
    return not url or Address(url).is_local


def local_fields(spec: TrainingSpec, *, is_own: bool = True) -> dict[str, Any]:
    """The caller's directory, search paths and keys of the store; values in the spec take
    precedence.

    Raises ValidationError if the keys are missing and the control plane is the caller's own: it
    has none that the caller has not.
    """
    env = {name: os.environ[name] for name in SHARED_ENV if name in os.environ}
    if spec.rendezvous.uri is not None:
        env |= store_variables(spec)
        if is_own:
            check_keys(spec, env | spec.env)
    return {"working_dir": spec.working_dir or _current_directory(), "env": env | spec.env}


def _current_directory() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise ValidationError(
            "working_dir", None, "the current directory no longer exists: name one that does"
        ) from error


def choose_endpoint(url: str | None, token: str | None) -> Endpoint:
    """The endpoint at `url`, else at ATOLL_URL, else the user's own local control plane."""
    token = token or os.environ.get("ATOLL_TOKEN")
    if url:
        return Fixed(url, token)
    if url := os.environ.get("ATOLL_URL"):
        return Fixed(url, token, "ATOLL_URL")
    return UserPlane(token=token)


VENDOR = Path("/sys/class/dmi/id/sys_vendor")
# Files with keys that only the tools of a provider read, and how to get them from there.
ELSEWHERE = {
    "AWS_": (
        ".aws/credentials",
        'ranks do not read ~/.aws: eval "$(aws configure export-credentials --format env)"',
    ),
    "AZURE_": (".azure", "ranks use the login of 'az' with AZURE_USE_AZURE_CLI=true"),
}
GOOGLE_LOGIN = ".config/gcloud/application_default_credentials.json"  # ranks read this one


def store_variables(spec: TrainingSpec) -> dict[str, str]:
    """The caller's variables for the store of the training, such as AWS_*."""
    keys = keys_of(spec.rendezvous.uri)
    if keys is None:
        return {}
    return {name: value for name, value in os.environ.items() if name.startswith(keys.prefix)}


def check_keys(spec: TrainingSpec, env: Mapping[str, str]) -> None:
    """Raises ValidationError if ranks with `env` on this machine have no keys for their store."""
    uri = spec.rendezvous.uri
    keys, missing = keys_of(uri), missing_keys(uri, env)
    if keys is None or not missing or _vendor() == keys.instances:
        return
    home = Path(os.environ.get("HOME") or "/")
    if keys.prefix == "GOOGLE_" and (home / GOOGLE_LOGIN).exists():
        return
    expected = f"expected {' and '.join(missing)} to be set: here, by -e or in env="
    path, remedy = ELSEWHERE.get(keys.prefix, ("", ""))
    if path and (home / path).exists():
        expected += f" ({remedy})"
    raise ValidationError("rendezvous_uri", uri, expected)


def _vendor() -> str:
    try:
        return VENDOR.read_text().strip()
    except OSError:
        return ""


START_S = 60.0  # normally below a second; a machine that swaps takes much longer
STOP_S = 60.0  # ranks have 10 s by default to stop, and a loaded machine takes longer
STOP_ATTEMPTS = 3  # each is a new server, which may be killed as the one before it was
SLOTS = "ATOLL_SLOTS"  # of a control plane that is started here

# Variables of the shell that starts the server. They must not reach the ranks of other shells: each
# caller sends its own.
LEFT_OUT = (
    SLOTS,
    "CONDA_PREFIX",
    "CUDA_VISIBLE_DEVICES",
    "OLDPWD",
    "OMP_NUM_THREADS",
    "VIRTUAL_ENV",
)


def begin() -> None:
    """Start the user's own control plane in the background if it will be needed and does not run.

    The first request waits for it, and raises why it does not start.
    """

    def start_it() -> None:
        with contextlib.suppress(AtollError):
            UserPlane().address()

    if (
        not os.environ.get("ATOLL_URL")
        and running(state_dir()) is None
        and enclosing_rank() is None
    ):
        threading.Thread(target=start_it, daemon=True).start()


class UserPlane:
    """One a user. Ten programs may start at once: a lock lets one of them start the server.

    A process of a rank starts none, as it would end with the rank: it waits for one.
    """

    def __init__(self, where: Path | None = None, token: str | None = None) -> None:
        self._where = state_dir(where)
        self._token = token
        self._known: Address | None = None
        self._is_reported = False
        self._lock = threading.Lock()

    def address(self) -> Address:
        with self._lock:
            if self._known is None:
                if read_announcement(self._where) is None:
                    self._start()
                else:
                    _warn_if_other(self._where)
                self._known = plane_address(self._where, self._token)
                self._is_reported = False
            return self._known

    def lost(self) -> None:
        self._known = None

    def local_fields(self, spec: TrainingSpec) -> dict[str, Any]:
        return local_fields(spec)

    def close(self) -> None:
        pass

    def _start(self) -> None:
        if (rank := enclosing_rank()) is not None:
            raise self._no_control_plane(rank)
        try:
            check_writable(self._where)
            with _only_one(self._where):
                if read_announcement(self._where) is None:
                    start_or_join(self._where)
        except OSError as error:
            raise Permanent(
                f"cannot keep state in {self._where}: {error.strerror}; set ATOLL_STATE_DIR"
            ) from error

    def _no_control_plane(self, rank: EnclosingRank) -> NoControlPlane:
        """The error for a rank, which must not start one. Prints once what it waits for."""
        how = "'atoll ps' outside of ranks starts it"
        if not self._is_reported:
            self._is_reported = True
            text = f"{rank} waits for the control plane of {self._where} to run again: {how}"
            sys.stderr.write(f"atoll: {text}\n")
            sys.stderr.flush()
        return NoControlPlane(
            f"no control plane runs in {self._where}, and {rank} must not start one, as it would "
            f"end with the rank: {how}; for another one set ATOLL_URL and ATOLL_TOKEN"
        )


class PrivatePlane:
    """One a client, in a directory of its own. When the client's process dies, so does it.

    Children that were forked later may use it; it is not theirs to start again or to end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: PlaneProcess | None = None
        self._where: Path | None = None
        self._owner = os.getpid()
        self._is_closed = False

    def address(self) -> Address:
        with self._lock:
            if self._is_closed:
                raise Permanent("this client is closed, and its control plane has ended")
            if self._where is None:
                import tempfile

                self._where = Path(tempfile.mkdtemp(prefix="atoll-"))
                self._owner = os.getpid()
            self._server = self._alive()
            return Address(self._server.url, read_token(self._where), self._where)

    def lost(self) -> None:
        pass

    def local_fields(self, spec: TrainingSpec) -> dict[str, Any]:
        return local_fields(spec)

    def close(self) -> None:
        with self._lock:
            where, self._where = self._where, None
            self._is_closed = True
            if where is None or self._owner != os.getpid():
                return
            # A server that was killed has left its ranks: another one clears them away.
            with contextlib.suppress(Permanent):
                for _ in range(STOP_ATTEMPTS):
                    self._server = self._alive(where)
                    if self._server.stop():
                        break
            self._server = None
        import shutil

        shutil.rmtree(where, ignore_errors=True)

    def _alive(self, where: Path | None = None) -> PlaneProcess:
        if self._server is not None:
            # A forked child cannot poll its parent's child: it would seem dead.
            if self._owner != os.getpid() or self._server.process.poll() is None:
                return self._server
            self._server.stop()
        where = where or self._where
        assert where is not None
        return start(where, is_owned=True)


class PlaneProcess:
    """A server that this process started."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url

    def stop(self) -> bool:
        """An owned one stops its ranks when its input ends. False if it died before it had."""
        import subprocess

        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(b"end\n")
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        return self.process.returncode == 0


def start(where: Path, *, is_owned: bool = False) -> PlaneProcess:
    """A server, once it answers; its port, for browsers, is the one it had last, or a free one.

    Raises Permanent if it does not answer.
    """
    import subprocess

    command = [sys.executable, "-m", "atoll.cli", "serve", "--json", "--state-dir", str(where)]
    command += ["--port", "0", *(["--owned"] if is_owned else [])]
    settings = config.read_for_plane()  # raised here rather than in the server's log
    if settings.path is not None:
        command += ["--config", settings.path]
    if slots := os.environ.get(SLOTS):
        command += ["--slots", slots]
    check_writable(where)
    log = where / "server.log"
    with open(log, "ab", opener=private) as errors:
        log_start = errors.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if is_owned else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=where,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for the caller, not for the server
        )
    assert process.stdout is not None
    with process.stdout as read_announcement:
        ready, _, _ = select.select([read_announcement], [], [], START_S)
        line = read_announcement.readline() if ready else b""
    if not line:
        process.kill()
        code = process.wait()
        why = _last_line(log, log_start)
        raise Permanent(f"the local control plane did not start (exit code {code}): {why} ({log})")
    if not is_owned:
        _reap(process)
    return PlaneProcess(process, json.loads(line)["url"])


def start_or_join(where: Path) -> None:
    """Start a server unless one is on its way: a command that was interrupted may have begun it."""
    try:
        start(where)
    except Permanent:
        deadline = time.monotonic() + START_S
        while read_announcement(where) is None:
            if not _is_store_in_use(where) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)  # a server takes a few tenths of a second to answer


def _is_store_in_use(where: Path) -> bool:
    try:
        lock = os.open(where / "atoll.db.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _environment() -> dict[str, str]:
    """The caller's, with this very atoll first, and without what is about the caller alone."""
    home = str(Path(atoll.__file__).resolve().parent.parent)
    search_path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    paths = [home, *(os.path.abspath(part) for part in search_path)]
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in LEFT_OUT and not name.startswith("TORCHELASTIC_")
    }
    if "KUBECONFIG" in variables:  # the server works in another directory
        parts = variables["KUBECONFIG"].split(os.pathsep)
        variables["KUBECONFIG"] = os.pathsep.join(os.path.abspath(part) for part in parts if part)
    return {**variables, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Waited for in the background: it outlives us, or must not stay a zombie if it does not."""
    threading.Thread(target=process.wait, daemon=True).start()


def running(where: Path) -> str | None:
    """The address of the server that serves this directory, if it is alive."""
    endpoint = read_announcement(where)
    return None if endpoint is None else str(endpoint["url"])


def read_announcement(where: Path) -> dict[str, Any] | None:
    """The endpoint file of the server of this directory; None if no server is alive."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        endpoint: dict[str, Any] = json.loads((where / ENDPOINT).read_bytes())
        if endpoint["url"] and start_time(int(endpoint["pid"])) == str(endpoint["startTime"]):
            return endpoint
    return None


def plane_address(where: Path, token: str | None) -> Address:
    """The server of this directory, and the token of its user unless there is another one."""
    endpoint = read_announcement(where)
    if endpoint is None:
        raise Temporary(f"the control plane of {where} has ended: {where}/server.log may say why")
    return Address(str(endpoint["url"]), token or read_token(where), where)


def _warn_if_other(where: Path) -> None:
    """It works with this release as far as it can; why some things do not is good to know."""
    endpoint = read_announcement(where) or {"release": atoll.__version__}
    if text := describe_difference(endpoint.get("release")):
        pid = endpoint["pid"]
        after = f"'kill {pid}' stops it, the next use starts this one, ranks keep running"
        warnings.warn(f"{text}: {after}", OtherRelease, stacklevel=4)


def read_token(where: Path) -> str:
    try:
        return (where / "token").read_text().strip()
    except OSError as error:
        raise Permanent(f"cannot read {where / 'token'}: {error.strerror}") from error


def start_time(pid: int) -> str | None:
    """Start time of a process in kernel ticks; None if it has ended. A pid alone may be reused."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]


@contextlib.contextmanager
def _only_one(where: Path) -> Iterator[None]:
    with open(where / "start.lock", "a", opener=private) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _last_line(log: Path, start: int) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_bytes()[start:].decode(errors="replace").strip().splitlines()
        if lines:
            return lines[-1]
        if os.statvfs(log).f_bavail == 0:
            return f"no space is left in {log.parent}: free some"
    return "it printed nothing"
