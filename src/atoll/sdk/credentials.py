"""Keys of object stores: those that are set where a training is started go to its ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.errors import ValidationError
from atoll.core.stores import keys_of, missing_keys

if TYPE_CHECKING:
    from atoll.core.spec import TrainingSpec

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
    place, remedy = ELSEWHERE.get(keys.prefix, ("", ""))
    if place and (home / place).exists():
        expected += f" ({remedy})"
    raise ValidationError("rendezvous_uri", uri, expected)


def _vendor() -> str:
    try:
        return VENDOR.read_text().strip()
    except OSError:
        return ""
