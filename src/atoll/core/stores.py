"""The address of an object store, as specs and ranks have it, and the keys it asks for. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from atoll.core.checks import is_text
from atoll.core.errors import ValidationError

EXPECTED = "expected file://, memory://, s3://, gs:// or az://, or a path"


def store_uri(field: str, value: Any, folder: str | None = None) -> str | None:
    """A plain path as file:// URI, and everything else as it is.

    A relative path starts at `folder`; without one, it is refused: it would be another place for
    whoever reads it.
    """
    if value is None:
        return None
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not is_text(text) or not text:
        raise ValidationError(field, value, EXPECTED)
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
        expected = f"expected file:///{parts.netloc}{parts.path}, with three slashes, or a path"
        raise ValidationError(field, value, expected)
    if parts.scheme == "hf":
        expected = "buckets of Hugging Face cannot create an object only if it is absent"
        raise ValidationError(field, value, f"expected s3://, gs://, az:// or file://: {expected}")
    if parts.scheme:
        return str(text)
    path = PurePosixPath(text if folder is None else f"{folder}/{text}")
    if text.startswith("/"):
        path = PurePosixPath(text)
    if not path.is_absolute():
        raise ValidationError(field, value, f"{EXPECTED} from the root")
    return path.as_uri()


class StoreKeys(NamedTuple):
    """Variables by which ranks reach the stores of one provider."""

    prefix: str  # of all of them
    sets: tuple[tuple[str, ...], ...]  # one of these is enough; the first is what people have
    instances: str  # the maker of machines that have keys of their own, as their firmware says


KEYS = {
    "s3": StoreKeys(
        "AWS_",
        (
            ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
            ("AWS_WEB_IDENTITY_TOKEN_FILE",),
            ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
            ("AWS_CONTAINER_CREDENTIALS_FULL_URI",),
            ("AWS_SKIP_SIGNATURE",),
        ),
        "Amazon EC2",
    ),
    "gs": StoreKeys(
        "GOOGLE_",
        (
            ("GOOGLE_APPLICATION_CREDENTIALS",),
            ("GOOGLE_SERVICE_ACCOUNT",),
            ("GOOGLE_SERVICE_ACCOUNT_PATH",),
            ("GOOGLE_SERVICE_ACCOUNT_KEY",),
            ("GOOGLE_SKIP_SIGNATURE",),
        ),
        "Google",
    ),
    "az": StoreKeys(
        "AZURE_",
        (
            ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
            ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCESS_KEY"),
            ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_SAS_TOKEN"),
            ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_SAS_KEY"),
            ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_TOKEN"),
            ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_CLIENT_ID"),
            ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_FEDERATED_TOKEN_FILE"),
            ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_USE_AZURE_CLI"),
            ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_SKIP_SIGNATURE"),
            ("AZURE_STORAGE_USE_EMULATOR",),
        ),
        "Microsoft Corporation",
    ),
}


def keys_of(uri: str | None) -> StoreKeys | None:
    """None for stores that ask for no keys."""
    return KEYS.get(urlsplit(uri).scheme) if uri else None


def missing_keys(uri: str | None, env: Mapping[str, str]) -> list[str]:
    """Variables of the likeliest set that are not in `env`; none if some set is whole."""
    keys = keys_of(uri)
    if keys is None or any(all(env.get(name) for name in each) for each in keys.sets):
        return []
    likeliest = max(keys.sets, key=lambda each: bool(env.get(each[0])))
    return [name for name in likeliest if not env.get(name)]


def own_keys_only(base: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The inherited keys, without those of a provider for which there are own ones: a key of one
    account with the session of another opens nothing."""
    prefixes = tuple(
        keys.prefix
        for keys in KEYS.values()
        if any(name in own for each in keys.sets for name in each)
    )
    return {
        name: value for name, value in base.items() if not (prefixes and name.startswith(prefixes))
    }
