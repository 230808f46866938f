"""How to reach an API server, and as whom: from a kubeconfig, the pod's own service account, or an
API object of the official `kubernetes` client.

Of the official client only the configuration is used: server, credentials with their refresh,
certificates, proxy and headers. The client itself need not be installed.
"""

from __future__ import annotations

import base64
import ssl
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2
import msgspec
import yaml  # type: ignore[import-untyped]
from lightkube.config.client_adapter import user_auth, verify_cluster
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.config.models import NameValue, User
from lightkube.core.exceptions import ConfigError
from msgspec.structs import replace

from atoll.core.errors import Denied, Permanent, ValidationError

WHO_AM_I = "'kubectl auth whoami' shows whether KUBECONFIG holds some"
EXEC_V1 = "client.authentication.k8s.io/v1"
# lightkube does not catch what a file that is not a kubeconfig makes it raise.
_BAD_CONFIG = (
    *(ConfigError, OSError, KeyError, ValueError, AttributeError, TypeError),
    *(msgspec.ValidationError, yaml.YAMLError),
)


class Access(NamedTuple):
    """How to reach an API server, and as whom."""

    server: str
    namespace: str
    verify: ssl.SSLContext | bool
    auth: httpx2.Auth | None
    proxy: httpx2.Proxy | None = None
    headers: Mapping[str, str] | None = None


def read_access(context: str | None, kubeconfig: str | None) -> Access:
    """Raises Permanent if no usable configuration exists."""
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
    """Raises ConfigError for a missing file, which OpenSSL would not name."""
    user = config.user or User()
    for path in (config.cluster.certificate_auth, user.client_cert, user.client_key):
        if path is not None and not Path(config.abs_file(path)).is_file():
            raise ConfigError(f"{path}: no such file")


def _auth(user: User) -> httpx2.Auth | None:
    """The user's authentication, with support for exec plugins of `v1`.

    lightkube knows no version after `v1beta1`, whose answers look the same. The plugin itself is
    called with the version that the kubeconfig states.
    """
    if user.exec is not None and user.exec.apiVersion == EXEC_V1:
        request = {"apiVersion": EXEC_V1, "kind": "ExecCredential", "spec": {"interactive": False}}
        variable = NameValue("KUBERNETES_EXEC_INFO", msgspec.json.encode(request).decode())
        beta = f"{EXEC_V1}beta1"
        plugin = replace(user.exec, apiVersion=beta, env=[*(user.exec.env or ()), variable])
        user = replace(user, exec=plugin)
    return user_auth(user)


def no_credentials(error: Exception) -> Denied:
    text = f"no credentials for the Kubernetes API server: {_one_line(error)}"
    denied = Denied(text)
    denied.hint = WHO_AM_I
    return denied


def _one_line(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"the file has no {error}"
    if isinstance(error, AttributeError | TypeError):
        return "this is not a kubeconfig"
    name = getattr(error, "filename", None)
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{text}: {name}" if name and str(name) not in text else text


EXPECTED = "expected an API object of the kubernetes client, made after its configuration"
# What a client that nobody configured has as its server.
UNCONFIGURED = ("http://localhost", "https://localhost")


def access_of(batch_api: Any, core_api: Any, namespace: str) -> Access:
    """Raises ValidationError where there is nothing to take over, or two different clusters."""
    apis = {"batch_api": batch_api, "core_api": core_api}
    ways = [_access(field, api, namespace) for field, api in apis.items() if api is not None]
    if len({way.server for way in ways}) > 1:
        expected = f"expected the cluster of batch_api, {ways[0].server}"
        raise ValidationError("core_api", ways[1].server, expected)
    return ways[0]


def _access(field: str, api: Any, namespace: str) -> Access:
    client = getattr(api, "api_client", None)
    config = getattr(client, "configuration", None)
    host = getattr(config, "host", None)
    if not isinstance(host, str) or urlsplit(host).scheme not in ("http", "https"):
        raise ValidationError(field, api, EXPECTED)
    if host.rstrip("/") in UNCONFIGURED and not _headers(config):
        raise ValidationError(field, host, f"{EXPECTED} was loaded")
    try:
        verify = _verify(config)
    except OSError as error:  # of ssl, too
        raise ValidationError(
            field, host, f"expected certificates that can be read: {error}"
        ) from (error)
    headers = {**(getattr(client, "default_headers", None) or {})}
    if cookie := getattr(client, "cookie", None):
        headers["Cookie"] = cookie
    return Access(host, namespace, verify, OfficialAuth(config), _proxy(config), headers)


class OfficialAuth(httpx2.Auth):
    """Asks the configuration at each request, which refreshes its token when it is due."""

    def __init__(self, configuration: Any) -> None:
        self._configuration = configuration

    def auth_flow(
        self, request: httpx2.Request
    ) -> Generator[httpx2.Request, httpx2.Response, None]:
        request.headers.update(_headers(self._configuration))
        if name := getattr(self._configuration, "tls_server_name", None):
            request.extensions = {**request.extensions, "sni_hostname": name}
        yield request


def _headers(config: Any) -> dict[str, str]:
    settings = config.auth_settings()
    values = settings.values() if isinstance(settings, Mapping) else ()
    headers = {
        str(row["key"]).lower(): str(row["value"])
        for row in values
        if row.get("in") == "header" and row.get("value")
    }
    user, password = getattr(config, "username", None), getattr(config, "password", None)
    if user and "authorization" not in headers:
        text = base64.b64encode(f"{user}:{password or ''}".encode()).decode()
        headers["authorization"] = f"Basic {text}"
    return headers


def _verify(config: Any) -> ssl.SSLContext:
    data = getattr(config, "ca_cert_data", None)
    if isinstance(data, bytes):
        data = data.decode()
    context = ssl.create_default_context(cafile=config.ssl_ca_cert or None, cadata=data or None)
    if config.assert_hostname is False or not config.verify_ssl:
        context.check_hostname = False
    if not config.verify_ssl:
        context.verify_mode = ssl.CERT_NONE
    if config.cert_file:
        context.load_cert_chain(config.cert_file, config.key_file or None)
    return context


def _proxy(config: Any) -> httpx2.Proxy | None:
    host = urlsplit(config.host).hostname or ""
    direct = [part.strip().lstrip(".") for part in (config.no_proxy or "").split(",")]
    if not config.proxy or any(_is_of(host, part) for part in direct if part):
        return None
    return httpx2.Proxy(config.proxy, headers=config.proxy_headers or None)


def _is_of(host: str, domain: str) -> bool:
    return domain == "*" or host == domain or host.endswith(f".{domain}")
