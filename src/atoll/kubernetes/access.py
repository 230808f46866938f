"""Which API server, and as whom: kubeconfigs as lightkube reads them, errors in one line."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

import httpx2
import msgspec
import yaml  # type: ignore[import-untyped]
from lightkube.config.client_adapter import user_auth, verify_cluster
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.config.models import NameValue, User
from lightkube.core.exceptions import ConfigError
from msgspec.structs import replace

from atoll.core.errors import Denied, Permanent

EXEC_V1 = "client.authentication.k8s.io/v1"
# lightkube lets through what YAML and a file of another shape raise.
_BAD_CONFIG = (
    *(ConfigError, OSError, KeyError, ValueError, AttributeError, TypeError),
    *(msgspec.ValidationError, yaml.YAMLError),
)


class Access(NamedTuple):
    server: str
    namespace: str
    verify: ssl.SSLContext | bool
    auth: httpx2.Auth | None


def read_access(context: str | None, kubeconfig: str | None) -> Access:
    """Raises Permanent where there is none that can be used."""
    try:
        loaded = KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_env()
        config = loaded.get(context)
        assert config is not None
        user = config.user
        _check_files(config)
        verify = verify_cluster(config.cluster, user, config.abs_file) if user else True
        auth = _auth(user) if user else None
    except _BAD_CONFIG as error:
        raise Permanent(f"no usable Kubernetes configuration: {_one_line(error)}") from error
    return Access(config.cluster.server, config.namespace, verify, auth)


def _check_files(config: SingleConfig) -> None:
    """OpenSSL would not say which one is missing."""
    user = config.user or User()
    for path in (config.cluster.certificate_auth, user.client_cert, user.client_key):
        if path is not None and not Path(config.abs_file(path)).is_file():
            raise ConfigError(f"{path}: no such file")


def _auth(user: User) -> httpx2.Auth | None:
    """An exec plugin of `v1` answers as one of `v1beta1` does, which is the newest lightkube knows;
    the plugin itself is told what the file says."""
    if user.exec is not None and user.exec.apiVersion == EXEC_V1:
        asked = {"apiVersion": EXEC_V1, "kind": "ExecCredential", "spec": {"interactive": False}}
        told = NameValue("KUBERNETES_EXEC_INFO", msgspec.json.encode(asked).decode())
        known = f"{EXEC_V1}beta1"
        plugin = replace(user.exec, apiVersion=known, env=[*(user.exec.env or ()), told])
        user = replace(user, exec=plugin)
    return user_auth(user)


def no_credentials(error: Exception) -> Denied:
    return Denied(f"no credentials for the Kubernetes API server: {_one_line(error)}")


def _one_line(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, AttributeError | TypeError):
        return "this is not a kubeconfig"
    name = getattr(error, "filename", None)
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{text}: {name}" if name and str(name) not in text else text
