"""What the errors of obstore mean: final or not, and in one line. Pure."""

from __future__ import annotations

import errno
import re

import obstore.exceptions as failures

_FINAL = (
    failures.NotSupportedError,
    failures.InvalidPathError,
    failures.UnknownConfigurationKeyError,
    NotImplementedError,
    PermissionError,
    NotADirectoryError,
)
_DENIED = (failures.PermissionDeniedError, failures.UnauthenticatedError)
# Listings and bulk deletes have no error type for a refusal: the status and the code tell. Of S3,
# Google (the plain status) and Azure.
_DENIED_TEXT = re.compile(
    r"status 40[13]\b|40[13] (Forbidden|Unauthorized)"
    r"|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken"
    r"|AuthenticationFailed|AuthorizationFailure|AuthorizationPermissionMismatch"
)
# As S3, Azure and Google say it of a listing.
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|bucket does not exist")
# Where a client looks for a key when nobody gave it one: the metadata service of its machine.
_METADATA = re.compile(r"169\.254\.169\.254|metadata\.google\.internal|instance credentials")
_SERVER_ERROR = re.compile(r"status code: 5[0-9][0-9]\b")
_REASON = re.compile(r'\bmessage: "([^"]+)"')
_CODE = re.compile(r"<Code>([A-Za-z]+)</Code>")


def is_denied(error: Exception) -> bool:
    """Whether the store refused the key."""
    return isinstance(error, _DENIED) or (
        isinstance(error, failures.BaseError) and bool(_DENIED_TEXT.search(str(error)))
    )


def is_without_key(error: Exception) -> bool:
    """Whether the client failed to get a key from its machine."""
    return bool(_METADATA.search(str(error)))


def is_no_bucket(error: Exception) -> bool:
    return bool(_NO_BUCKET.search(str(error)))


def is_server_error(error: Exception) -> bool:
    return bool(_SERVER_ERROR.search(str(error)))


def is_final(error: Exception) -> bool:
    """Whether trying again will not help, for another reason."""
    is_read_only = isinstance(error, OSError) and error.errno == errno.EROFS
    return is_read_only or isinstance(error, _FINAL)


def describe(error: Exception) -> str:
    """The error in one line, with the reason that its debug output has below."""
    first, _, remainder = str(error).partition("\n")
    text = f"{type(error).__name__}: {first}"
    for match in (_CODE.search(remainder), _REASON.search(remainder)):
        if match and match[1] not in text:
            text += f": {match[1]}"
    return text
