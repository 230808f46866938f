"""Endpoints: where the control plane is, and what of the caller goes to ranks on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from atoll.core.errors import ValidationError
from atoll.core.stores import keys_of, missing_keys

if TYPE_CHECKING:
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

    def __init__(self, url: str, token: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValidationError("url", url, "expected http://host:port or https://host")
        if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
            raise ValidationError("token", "…", "expected one line of printable characters")
        self._address = Address(url.rstrip("/"), token)
        if token is not None and parts.scheme == "http" and not self._address.is_local:
            import warnings

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
    url = url or os.environ.get("ATOLL_URL")
    token = token or os.environ.get("ATOLL_TOKEN")
    if url:
        return Fixed(url, token)
    from atoll.sdk.embedded import UserPlane

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
