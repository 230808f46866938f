"""The address of an object store, as specs and ranks have it. Pure."""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import Any
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
    if urlsplit(text).scheme:
        return str(text)
    path = PurePosixPath(text if folder is None else f"{folder}/{text}")
    if text.startswith("/"):
        path = PurePosixPath(text)
    if not path.is_absolute():
        raise ValidationError(field, value, f"{EXPECTED} from the root")
    return path.as_uri()
