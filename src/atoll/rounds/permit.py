"""Which stores the control plane may read for a training. Pure.

It reads with its own rights, and a training names any URI it likes: so it reads what it was
configured to read for that namespace, and files only for trainings of its own user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from atoll.core.config import RoundStore
from atoll.core.status import Training

OWN_USER = ("local", "slurm")  # kinds whose ranks run as the user of the control plane


class StoreAccess(NamedTuple):
    """Of a training: the kind of its executor, and where its ranks meet if it names no URI.

    `is_alone`: no other training meets there.
    """

    kind: str
    default_uri: str
    is_exclusive: bool = True


def uri_of(training: Training, access: StoreAccess) -> str:
    """Where the ranks meet; empty if nowhere."""
    return training.spec.rendezvous.uri or access.default_uri


def refusal_reason(
    training: Training, access: StoreAccess, stores: Sequence[RoundStore], own_namespace: str
) -> str:
    """Why the store of a training is not read, in words; empty if it is."""
    uri, is_default = uri_of(training, access), not training.spec.rendezvous.uri
    scheme = urlsplit(uri).scheme
    if not uri:
        return "the training has no store"
    if scheme == "memory":
        return "memory:// is within the ranks"
    if scheme == "file":
        if access.kind not in OWN_USER:
            return f"file:// of the executor kind {access.kind} is not on this machine"
        if is_default or training.namespace == own_namespace:
            return ""
        return "file:// is read for trainings of the control plane's own user only"
    if is_default or any(
        training.namespace in store.namespaces and covers(store.uri, uri) for store in stores
    ):
        return ""
    return (
        f"{uri} is under no [[rounds.stores]] of the control plane's atoll.toml for the "
        f"namespace {training.namespace}"
    )


def covers(base: str, uri: str) -> bool:
    """Whether `uri` is `base`, or lies under it. One that could lead out of it does not."""
    outer, inner = urlsplit(base), urlsplit(uri)
    if (outer.scheme, outer.netloc) != (inner.scheme, inner.netloc):
        return False
    if inner.query or inner.fragment or unquote(inner.path) != inner.path:
        return False
    parts, prefix = inner.path.strip("/").split("/"), outer.path.strip("/").split("/")
    if any(part in (".", "..") for part in parts) or "" in parts[1:]:
        return False
    return prefix == [""] or parts[: len(prefix)] == prefix
