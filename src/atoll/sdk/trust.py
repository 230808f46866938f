"""Which certificates a client trusts, and what it says where there are none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from atoll.core.errors import ValidationError

if TYPE_CHECKING:
    import ssl

CA = "ATOLL_CA"


def trust(url: str) -> ssl.SSLContext | bool:
    """What the server's certificate is checked against: `ATOLL_CA`, else `SSL_CERT_FILE` and
    `SSL_CERT_DIR`, else the usual.

    Raises ValidationError for a file that holds no certificate.
    """
    import ssl

    if not url.startswith("https://"):
        # Reading the system's certificates takes longer than all of a local request.
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if path := os.environ.get(CA):
        return _only(path)
    if os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR"):
        return ssl.create_default_context()
    return True


def _only(path: str) -> ssl.SSLContext:
    import ssl

    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        is_file = isinstance(error, ssl.SSLError)
        reason = "it has no certificate in PEM" if is_file else error.strerror
        raise ValidationError(CA, path, f"expected a file of certificates: {reason}") from error


def distrust(host: str, reason: str) -> str:
    """Why a certificate was not accepted, in words."""
    text = f"the certificate of {host} is not trusted ({reason.partition('] ')[2] or reason})"
    if not has_authorities():
        remedy = f"install ca-certificates, or name a file of them in SSL_CERT_FILE or {CA}"
        return f"{text}: this machine or image has no CA certificates: {remedy}"
    return f"{text}: name the file of its CA in {CA} or SSL_CERT_FILE"


def has_authorities() -> bool:
    """Whether this machine has the certificates of any authority."""
    import ssl

    paths = ssl.get_default_verify_paths()
    if paths.cafile is not None and os.path.getsize(paths.cafile):
        return True
    try:
        return paths.capath is not None and bool(os.listdir(paths.capath))
    except OSError:
        return False
