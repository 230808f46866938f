"""Sessions of browsers: a one-time code becomes a cookie and a CSRF token.

Sessions are in memory and end with the control plane: another program that takes the port later is
sent nothing of use. A session may do what its token may, and ends with it.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from atoll.core.errors import Denied

CODE_S = 60.0  # `atoll ui` opens the browser at once
IDLE_S = 12 * 3600.0  # a night: sign in once a working day
MAX_S = 7 * 86_400.0  # a week, however busy the tab is
MAX_ENTRIES = 1_000  # sessions, unused codes and used codes: some 300 kB


class BrowserSession(NamedTuple):
    """What a cookie stands for."""

    namespace: str
    token: str  # the hash of the token that the session was made from
    csrf: str  # random; pages send it with every request, and the cookie alone never gets it
    began_at: float
    used_at: float


class UnusedCode(NamedTuple):
    ends_at: float
    namespace: str
    token: str


def _boot_time() -> float:
    """A clock that runs while the machine sleeps and does not jump when its time is set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Sessions:
    """All sessions of a control plane."""

    def __init__(
        self,
        identity: str = "",
        *,
        is_loopback: bool = False,
        now: Callable[[], float] = _boot_time,
    ) -> None:
        """`identity` is a secret that outlives the process, so that the dashboard keeps its host
        name; `is_loopback` says that the server listens on this machine only."""
        label = _hash(f"dashboard {identity or secrets.token_hex(16)}")[:16]
        # Browsers send cookies to every port of a host. So the dashboard has a host name of its
        # own, which nobody learns without a token: the browser would send the cookie to any
        # other server of this machine under that name.
        self.host = f"atoll-{label}.localhost"
        self.cookie = f"atoll_ui_{label[:8]}"
        self.is_loopback = is_loopback
        self._now = now
        self._codes: dict[str, UnusedCode] = {}
        self._redeemed: dict[str, float] = {}  # when
        self._sessions: dict[str, BrowserSession] = {}  # by the hash of the cookie

    def new_code(self, namespace: str, token: str) -> str:
        """Makes a code that signs in once, within a minute."""
        now = self._now()
        self._codes = {
            c: remaining for c, remaining in self._codes.items() if remaining.ends_at > now
        }
        _evict_oldest(self._codes)
        code = secrets.token_urlsafe(16)
        self._codes[_hash(code)] = UnusedCode(now + CODE_S, namespace, token)
        return code

    def redeem(self, code: str) -> str:
        """Returns the cookie of a new session. Raises Denied for a code that is unknown or too old,
        and for a used one with the time of its use: only its owner knows who that was."""
        hash_token, now = _hash(code), self._now()
        if hash_token in self._redeemed:
            ago_s = now - self._redeemed[hash_token]
            clock = time.strftime("%H:%M:%S UTC", time.gmtime(time.time() - ago_s))
            raise Denied(
                f"this link was already used at {clock}, {ago_s:.0f} s ago. If that was not you, "
                "somebody else is signed in as you: run 'atoll ui --revoke' to sign all browsers "
                "out, then 'atoll ui'"
            )
        code_entry = self._codes.pop(hash_token, None)
        if code_entry is None or code_entry.ends_at <= now:
            raise Denied("this link is unknown here or older than a minute: run 'atoll ui' again")
        _evict_oldest(self._redeemed)
        self._redeemed[hash_token] = now
        return self.begin(code_entry.namespace, code_entry.token)

    def begin(self, namespace: str, token: str) -> str:
        now = self._now()
        self._sessions = {h: s for h, s in self._sessions.items() if self._is_valid(s)}
        while len(self._sessions) >= MAX_ENTRIES:
            del self._sessions[min(self._sessions, key=lambda h: self._sessions[h].used_at)]
        cookie, csrf = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._sessions[_hash(cookie)] = BrowserSession(namespace, token, csrf, now, now)
        return cookie

    def find(self, cookie: str) -> BrowserSession | None:
        hash_token = _hash(cookie)
        session = self._sessions.get(hash_token)
        if session is None or not self._is_valid(session):
            return None
        self._sessions[hash_token] = session._replace(used_at=self._now())
        return session

    def end(self, cookie: str) -> None:
        self._sessions.pop(_hash(cookie), None)

    def end_all(self, namespace: str) -> int:
        """Ends the sessions and codes of a namespace; returns how many sessions there were."""
        remaining = {h: s for h, s in self._sessions.items() if s.namespace != namespace}
        ended = len(self._sessions) - len(remaining)
        self._sessions = remaining
        self._codes = {h: c for h, c in self._codes.items() if c.namespace != namespace}
        return ended

    def _is_valid(self, session: BrowserSession) -> bool:
        now = self._now()
        return now - session.used_at < IDLE_S and now - session.began_at < MAX_S


def _evict_oldest(remaining: dict[str, UnusedCode] | dict[str, float]) -> None:
    while len(remaining) >= MAX_ENTRIES:
        del remaining[next(iter(remaining))]


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
