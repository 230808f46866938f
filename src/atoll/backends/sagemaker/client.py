"""SageMaker through boto3, in threads. Errors are atoll's from here on."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Collection
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ProfileNotFound

from atoll.backends.sagemaker.options import SageMakerOptions
from atoll.core.errors import Denied, Permanent, Temporary

Json = dict[str, Any]

PAGE = 100  # the most jobs that SageMaker lists in one answer
CONFIG = Config(
    connect_timeout=10, read_timeout=30, retries={"mode": "standard", "total_max_attempts": 3}
)
IN_USE = ("ResourceInUse", "ResourceInUseException")
MISSING = ("ResourceNotFound", "ResourceNotFoundException")
REFUSED = ("ValidationException", "ValidationError", "InvalidParameterException")
DENIED = (
    "AccessDenied",
    "AccessDeniedException",
    "UnrecognizedClientException",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "ExpiredToken",
    "ExpiredTokenException",
    "OptInRequired",
)
HINT = "aws configure, AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


class NameTaken(Exception):
    """A job of that name has been created before."""


def connect(options: SageMakerOptions) -> TrainingJobs:
    """Raises Permanent, in one line, without credentials or a region. Nothing is asked yet."""
    try:
        # boto3 itself reads AWS_DEFAULT_REGION alone; everything else of AWS reads AWS_REGION.
        region = options.region or os.environ.get("AWS_REGION") or None
        session = boto3.Session(profile_name=options.profile, region_name=region)
        if session.region_name is None:
            raise Permanent("SageMaker needs a region: the option region, or AWS_REGION")
        if session.get_credentials() is None:
            raise Permanent(f"SageMaker needs AWS credentials: {HINT}")
        return TrainingJobs(session.client("sagemaker", config=CONFIG))
    except ProfileNotFound as error:
        raise Permanent(f"profile: {error}: name one of ~/.aws/config") from error
    except BotoCoreError as error:
        raise Permanent(f"SageMaker cannot be used: {_line(error)}") from error


class TrainingJobs:
    """The requests that atoll sends, and how many of each."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.requested: Counter[str] = Counter()
        self.region: str = client.meta.region_name
        # A store that is not Amazon's own is one for the ranks, too.
        self.store_endpoint = os.environ.get("AWS_ENDPOINT_URL_S3", "")

    async def create(self, request: Json) -> None:
        """Raises NameTaken for a name that is taken."""
        if await self._ask(self._client.create_training_job, IN_USE, **request) is None:
            raise NameTaken

    async def summaries(self, stem: str, **since: datetime) -> tuple[list[Json], datetime | None]:
        """All jobs whose names contain `stem`, created or changed since: one question, in pages.

        And when it was answered, by AWS's clock.
        """
        match: list[Json] = []
        at: datetime | None = None
        token: dict[str, str] = {}
        while True:
            page = await self._ask(
                self._client.list_training_jobs,
                NameContains=stem,
                **since,
                MaxResults=PAGE,
                SortBy="CreationTime",
                SortOrder="Ascending",
                **token,
            )
            assert page is not None
            match += page["TrainingJobSummaries"]
            date = page["ResponseMetadata"]["HTTPHeaders"].get("date")
            at = at or (parsedate_to_datetime(date) if date else None)
            if not page.get("NextToken"):
                return match, at
            token = {"NextToken": page["NextToken"]}

    async def describe(self, name: str) -> Json:
        return await self._ask(self._client.describe_training_job, TrainingJobName=name) or {}

    async def stop(self, name: str) -> None:
        """Already ended, being stopped or unknown is success."""
        ended = (*MISSING, *REFUSED)
        await self._ask(self._client.stop_training_job, ended, TrainingJobName=name)

    async def _ask(
        self, call: Callable[..., Json], expected: Collection[str] = (), /, **arguments: Any
    ) -> Json | None:
        """The answer; None for an error of these codes. Other errors become ours."""
        self.requested[call.__name__] += 1
        try:
            return await asyncio.to_thread(call, **arguments)
        except ClientError as error:
            if _code(error) in expected:
                return None
            raise _translated(error) from error
        except NoCredentialsError as error:
            raise Permanent(f"SageMaker needs AWS credentials: {HINT}") from error
        except BotoCoreError as error:
            raise Temporary(f"SageMaker cannot be asked: {_line(error)}") from error


def _translated(error: ClientError) -> Exception:
    code = _code(error)
    text = f"SageMaker: {code}: {_line(error.response['Error'].get('Message', ''))}"
    if code in DENIED:
        return Denied(text)
    if code in (*REFUSED, *MISSING):
        return Permanent(text)
    return Temporary(text, retry_after_s=30.0 if code == "ResourceLimitExceeded" else 5.0)


def _code(error: ClientError) -> str:
    return str(error.response["Error"].get("Code", ""))


def _line(error: object) -> str:
    return " ".join(str(error).split())
