"""The way to a cluster that an API object of the official `kubernetes` client knows.

Its configuration is taken over: server, credentials with their refreshing, certificates, proxy and
headers. The official client itself is not needed here.
"""

from __future__ import annotations

import base64
import ssl
from collections.abc import Generator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx2

from atoll.backends.kubernetes.client import Access
from atoll.core.errors import ValidationError

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
        words = base64.b64encode(f"{user}:{password or ''}".encode()).decode()
        headers["authorization"] = f"Basic {words}"
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
