"""HTTPS: what `atoll serve` presents, whom clients trust, and what they say where they do not."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import atoll
from atoll.core.errors import Permanent, ValidationError
from atoll.sdk import wire
from atoll.sdk.endpoint import Fixed, PlainToken
from atoll.server.http.server import load_tls

ATOLL = [sys.executable, "-m", "atoll.cli"]


class Pair(NamedTuple):
    certificate: Path
    key: Path


def pair(where: Path, name: str, address: str) -> Pair:
    """A certificate that signs itself, for this host or address."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    alternative: Any = (
        x509.IPAddress(ipaddress.ip_address(address))
        if address[0].isdigit()
        else x509.DNSName(address)
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    made = Pair(where / f"{name}.crt", where / f"{name}.key")
    made.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    made.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return made


class Secure(NamedTuple):
    url: str
    token: str
    state: Path
    own: Pair


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    where = tmp_path_factory.mktemp("tls")
    own = pair(where, "own", "127.0.0.1")
    options = ["--tls-cert", str(own.certificate), "--tls-key", str(own.key)]
    server = subprocess.Popen(
        [*ATOLL, "serve", "--port", "0", "--json", "--state-dir", str(where / "state"), *options],
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    url = json.loads(server.stdout.readline())["url"]
    token = (where / "state" / "token").read_text().strip()
    yield Secure(url, token, where / "state", own)
    server.terminate()
    server.wait(30)
    server.stdout.close()


def test_it_serves_https_to_those_who_trust_its_certificate(
    secure: Secure, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert secure.url.startswith("https://127.0.0.1:")
    for variable in ("ATOLL_CA", "SSL_CERT_FILE"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, str(secure.own.certificate))
            with atoll.Client(secure.url, secure.token) as client:
                training = client.deploy_distributed(f"a-{variable[0].lower()}", command=["true"])
                assert training.wait_until_complete(60).ready == 1
                training.delete()


def test_a_certificate_that_is_not_trusted_is_said_in_one_line_and_not_retried(
    secure: Secure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = pair(tmp_path, "other", "127.0.0.1")
    monkeypatch.setenv("ATOLL_CA", str(other.certificate))
    with atoll.Client(secure.url, secure.token) as client:
        with pytest.raises(Permanent, match="is not trusted.*ATOLL_CA") as refused:
            client.list()
        assert "\n" not in str(refused.value)
    monkeypatch.setattr(wire, "has_authorities", lambda: False)
    with atoll.Client(secure.url, secure.token) as client:
        with pytest.raises(Permanent, match="image has no CA certificates"):
            client.list()


def test_commands_on_the_same_machine_need_nothing(secure: Secure) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ATOLL_", "SSL_"))}
    env["ATOLL_STATE_DIR"] = str(secure.state)
    done = subprocess.run([*ATOLL, "ps"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "atoll: no trainings: 'atoll run' starts one\n")


def test_a_bad_pair_is_refused_before_it_listens(tmp_path: Path) -> None:
    one, two = pair(tmp_path, "one", "localhost"), pair(tmp_path, "two", "localhost")
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.write_text("nothing\n")
    for certificate, key, field, words in [
        (one.certificate, two.key, "--tls-key", f"expected the key of {one.certificate}"),
        (one.certificate, None, "--tls-key", "expected both"),
        (None, one.key, "--tls-cert", "expected both"),
        (missing, one.key, "--tls-cert", "No such file"),
        (empty, one.key, "--tls-key", "PEM"),
    ]:
        with pytest.raises(ValidationError, match=words) as refused:
            load_tls(certificate, key)
        assert refused.value.field == field
    options = ["--tls-cert", str(one.certificate), "--tls-key", str(two.key)]
    done = subprocess.run(
        [*ATOLL, "serve", "--json", "--port", "0", "--state-dir", str(tmp_path / "s"), *options],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--tls-key" in done.stderr


def test_a_token_over_plain_http_warns_but_not_to_this_machine() -> None:
    with pytest.warns(PlainToken, match=r"sent to plane\.example without encryption"):
        Fixed("http://plane.example:7878", "atoll_x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for url in ("http://127.0.0.1:1", "http://127.0.1.1:1", "http://localhost:1"):
            Fixed(url, "atoll_x")
        Fixed("http://[::1]:1", "atoll_x")
        Fixed("https://plane.example", "atoll_x")
        Fixed("http://plane.example", None)
    env = {**os.environ, "ATOLL_URL": "http://192.0.2.1:1", "ATOLL_TOKEN": "atoll_x"}
    code = "from atoll.cli.terminal import prepare; prepare(); import atoll; atoll.Client()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stderr.count("without encryption") == done.stderr.count("\n") == 1
