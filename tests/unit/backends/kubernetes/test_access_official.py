"""What is taken over from the official client, seen by a server that it leads to."""

from __future__ import annotations

import asyncio
import base64
import ssl
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import httpx2
import pytest

from atoll.backends.kubernetes.access import access_of
from atoll.backends.kubernetes.client import Access
from atoll.core.errors import ValidationError
from kubernetes import client


def configured(**fields: Any) -> client.Configuration:
    made = client.Configuration()
    made.host = "https://eks.example:6443"
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def way(batch: Any, core: Any = None) -> Access:
    return access_of(batch, core, "team")


def api(**fields: Any) -> client.BatchV1Api:
    return client.BatchV1Api(client.ApiClient(configured(**fields)))


def sent(access: Access) -> httpx2.Headers:
    """The headers of a request, as a server gets them."""
    seen: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(200)

    async def ask() -> None:
        transport = httpx2.MockTransport(answer)
        async with httpx2.AsyncClient(
            auth=access.auth, headers=access.headers, transport=transport
        ) as http:
            await http.get(access.server)

    asyncio.run(ask())
    return seen[0].headers


def test_server_and_token_and_headers() -> None:
    made = api(api_key={"authorization": "abc"}, api_key_prefix={"authorization": "Bearer"})
    made.api_client.set_default_header("X-Team", "a")
    made.api_client.cookie = "c=1"
    access = way(made)
    assert (access.server, access.namespace) == ("https://eks.example:6443", "team")
    headers = sent(access)
    assert headers["Authorization"] == "Bearer abc"
    assert (headers["X-Team"], headers["Cookie"]) == ("a", "c=1")


def test_a_token_is_refreshed_before_each_request() -> None:
    tokens = iter(["one", "two", "three", "four"])

    def refresh(config: client.Configuration) -> None:
        config.api_key["authorization"] = f"Bearer {next(tokens)}"

    made = api(refresh_api_key_hook=refresh, api_key={"authorization": "old"})
    access = way(made)
    first, second = (sent(access)["Authorization"] for _ in range(2))
    assert first != second
    assert {first, second} <= {f"Bearer {word}" for word in ("one", "two", "three", "four")}


def test_a_name_and_a_password() -> None:
    headers = sent(way(api(username="ann", password="pw")))
    assert headers["Authorization"] == "Basic " + base64.b64encode(b"ann:pw").decode()


def test_certificates(tmp_path: Any) -> None:
    strict = way(api()).verify
    assert isinstance(strict, ssl.SSLContext)
    assert (strict.verify_mode, strict.check_hostname) == (ssl.CERT_REQUIRED, True)
    lax = way(api(verify_ssl=False)).verify
    assert isinstance(lax, ssl.SSLContext)
    assert (lax.verify_mode, lax.check_hostname) == (ssl.CERT_NONE, False)
    loose = way(api(assert_hostname=False)).verify
    assert isinstance(loose, ssl.SSLContext)
    assert (loose.verify_mode, loose.check_hostname) == (ssl.CERT_REQUIRED, False)
    for field in ("ssl_ca_cert", "cert_file"):
        with pytest.raises(ValidationError, match="certificates that can be read"):
            way(api(**{field: str(tmp_path / "missing.pem")}))


def test_a_proxy_unless_the_server_is_reached_without() -> None:
    made = way(api(proxy="http://proxy:3128", proxy_headers={"X-P": "1"})).proxy
    assert made is not None
    assert str(made.url) == "http://proxy:3128"
    assert made.headers["X-P"] == "1"
    assert way(api(proxy="http://proxy:3128", no_proxy="localhost,.example")).proxy is None
    assert way(api()).proxy is None


def test_the_name_in_the_certificate_may_be_another() -> None:
    access = way(api(tls_server_name="inside"))
    assert access.auth is not None
    request = httpx2.Request("GET", access.server)
    next(access.auth.auth_flow(request))
    assert request.extensions["sni_hostname"] == "inside"


def test_either_api_is_enough_and_both_are_of_one_cluster() -> None:
    core = client.CoreV1Api(client.ApiClient(configured()))
    assert way(None, core).server == "https://eks.example:6443"
    assert way(api(), core).server == "https://eks.example:6443"
    with pytest.raises(ValidationError, match="core_api") as refused:
        way(api(host="https://other:6443"), core)
    assert refused.value.value == "https://eks.example:6443"


@pytest.mark.parametrize(
    "stub",
    [
        object(),
        MagicMock(),
        "https://eks.example",
        SimpleNamespace(api_client=None),
        SimpleNamespace(api_client=SimpleNamespace(configuration=SimpleNamespace(host="x"))),
        client.BatchV1Api(client.ApiClient(client.Configuration())),
    ],
)
def test_an_api_without_a_configuration_is_refused(stub: Any) -> None:
    for field, pair in {"batch_api": (stub, None), "core_api": (None, stub)}.items():
        with pytest.raises(ValidationError, match="expected an API object") as refused:
            way(*pair)
        assert refused.value.field == field
