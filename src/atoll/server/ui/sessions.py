"""Sessions of browsers: a code of one use becomes a cookie, which is known by its hash alone.

A session can do what its token can, and ends with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

CODE_S = 60.0
IDLE_S = 12 * 3600.0
LONGEST_S = 7 * 86_400.0
NOTE_S = 300.0  # how exactly the last use is kept in the file
MOST = 1_000  # sessions, and codes that wait


class BrowserSession(NamedTuple):
    """What a cookie stands for."""

    namespace: str
    token: str  # the hash of the token that it came from
    began_at: float
    used_at: float


class Sessions:
    """All sessions of a control plane; in a private file, if it has one."""

    def __init__(
        self,
        plane_id: str = "",
        path: Path | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.cookie = f"atoll_ui_{plane_id[:12]}" if plane_id else "atoll_ui"
        self.host = f"atoll-{plane_id[:8]}.localhost" if plane_id else ""
        self._path = path
        self._now = now
        self._codes: dict[str, tuple[float, str, str]] = {}
        self._sessions = self._read()

    def new_code(self, namespace: str, token: str) -> str:
        """A code that signs in once, within a minute."""
        now = self._now()
        self._codes = {c: kept for c, kept in self._codes.items() if kept[0] > now}
        while len(self._codes) >= MOST:
            del self._codes[next(iter(self._codes))]
        code = secrets.token_urlsafe(16)
        self._codes[_hash(code)] = (now + CODE_S, namespace, token)
        return code

    def redeem(self, code: str) -> str | None:
        """The cookie of a new session; None if the code is unknown, used or too old."""
        ends_at, namespace, token = self._codes.pop(_hash(code), (0.0, "", ""))
        return self.begin(namespace, token) if ends_at > self._now() else None

    def begin(self, namespace: str, token: str) -> str:
        now = self._now()
        self._sessions = {h: s for h, s in self._sessions.items() if self._is_valid(s)}
        while len(self._sessions) >= MOST:
            del self._sessions[min(self._sessions, key=lambda h: self._sessions[h].used_at)]
        cookie = secrets.token_urlsafe(32)
        self._sessions[_hash(cookie)] = BrowserSession(namespace, token, now, now)
        self._write()
        return cookie

    def find(self, cookie: str) -> BrowserSession | None:
        hashed = _hash(cookie)
        session = self._sessions.get(hashed)
        if session is None or not self._is_valid(session):
            return None
        now = self._now()
        if now - session.used_at > NOTE_S:
            self._sessions[hashed] = session._replace(used_at=now)
            self._write()
        return session

    def end(self, cookie: str) -> None:
        if self._sessions.pop(_hash(cookie), None) is not None:
            self._write()

    def end_all(self, namespace: str) -> int:
        """Ends the sessions of a namespace; returns how many there were."""
        kept = {h: s for h, s in self._sessions.items() if s.namespace != namespace}
        ended = len(self._sessions) - len(kept)
        self._sessions = kept
        self._write()
        return ended

    def _is_valid(self, session: BrowserSession) -> bool:
        now = self._now()
        return now - session.used_at < IDLE_S and now - session.began_at < LONGEST_S

    def _read(self) -> dict[str, BrowserSession]:
        if self._path is None:
            return {}
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            stored = json.loads(self._path.read_bytes())
            return {hashed: BrowserSession(*parts) for hashed, parts in stored.items()}
        return {}

    def _write(self) -> None:
        """Keeps them for the next control plane here. Where it cannot, they end with this one."""
        if self._path is None:
            return
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump(self._sessions, file)
            draft.replace(self._path)


def csrf_of(cookie: str) -> str:
    """What a page of ours knows beside the cookie, and a page of others does not."""
    return hmac.new(cookie.encode(), b"atoll csrf", hashlib.sha256).hexdigest()


def is_csrf_of(cookie: str, told: str) -> bool:
    return hmac.compare_digest(csrf_of(cookie), told)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
