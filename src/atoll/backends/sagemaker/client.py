"""SageMaker through boto3, in threads. Errors are atoll's from here on."""

from __future__ import annotations

import contextlib
import os
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ProfileNotFound

from atoll.backends.records import Json
from atoll.backends.sagemaker.options import SageMakerOptions
from atoll.backends.service import ServiceClient, one_line
from atoll.core.errors import Denied, Permanent, Temporary

PAGE = 100  # the most jobs that SageMaker lists in one answer
CONFIG = Config(
    connect_timeout=10, read_timeout=30, retries={"mode": "standard", "total_max_attempts": 3}
)
IN_USE = ("ResourceInUse", "ResourceInUseException")
REFUSED = (
    *("ValidationException", "ValidationError", "InvalidParameterException"),
    *("ResourceNotFound", "ResourceNotFoundException"),
)
DENIED = (
    *("AccessDenied", "AccessDeniedException", "UnrecognizedClientException", "OptInRequired"),
    *("InvalidClientTokenId", "InvalidSignatureException"),
    *("ExpiredToken", "ExpiredTokenException"),
)
HINT = "aws configure, AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


class NameTaken(Exception):
    """A job of that name has been created before."""


class Rejected(Permanent):
    """SageMaker refuses the request as it is, or knows no such job."""


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
        return TrainingJobs(session.client("sagemaker", config=CONFIG), options.starts)
    except ProfileNotFound as error:
        raise Permanent(f"profile: {error}: name one of ~/.aws/config") from error
    except BotoCoreError as error:
        raise Permanent(f"SageMaker cannot be used: {one_line(error)}") from error


class TrainingJobs(ServiceClient):
    """The requests that atoll sends."""

    ERRORS = (ClientError, BotoCoreError)

    def __init__(self, client: Any, at_once: int) -> None:
        super().__init__(at_once)
        self._client = client
        self.region: str = client.meta.region_name
        # A store that is not Amazon's own is one for the ranks, too.
        self.store_endpoint = os.environ.get("AWS_ENDPOINT_URL_S3", "")

    def translate(self, error: Exception, question: str) -> Exception:
        if isinstance(error, NoCredentialsError):
            return Permanent(f"SageMaker needs AWS credentials: {HINT}")
        if not isinstance(error, ClientError):
            return Temporary(f"SageMaker cannot be asked: {one_line(error)}")
        code = str(error.response["Error"].get("Code", ""))
        text = f"SageMaker: {code}: {one_line(error.response['Error'].get('Message', ''))}"
        if code in IN_USE:
            return NameTaken(text)
        if code in DENIED:
            return Denied(text)
        if code in REFUSED:
            return Rejected(text)
        return Temporary(text, retry_after_s=30.0 if code == "ResourceLimitExceeded" else 5.0)

    async def create(self, request: Json) -> None:
        """Raises NameTaken for a name that is taken."""
        await self.ask_thread(self._client.create_training_job, **request)

    async def summaries(self, stem: str, **since: datetime) -> tuple[list[Json], datetime | None]:
        """All jobs whose names contain `stem`, created or changed since: one question, in pages.

        And when it was answered, by AWS's clock.
        """
        match: list[Json] = []
        at: datetime | None = None
        token: dict[str, str] = {}
        while True:
            page: Json = await self.ask_thread(
                self._client.list_training_jobs,
                NameContains=stem,
                **since,
                MaxResults=PAGE,
                SortBy="CreationTime",
                SortOrder="Ascending",
                **token,
            )
            match += page["TrainingJobSummaries"]
            date = page["ResponseMetadata"]["HTTPHeaders"].get("date")
            at = at or (parsedate_to_datetime(date) if date else None)
            if not page.get("NextToken"):
                return match, at
            token = {"NextToken": page["NextToken"]}

    async def describe(self, name: str) -> Json:
        job: Json = await self.ask_thread(self._client.describe_training_job, TrainingJobName=name)
        return job

    async def stop(self, name: str) -> None:
        """Already ended, being stopped or unknown is success."""
        with contextlib.suppress(Rejected):
            await self.ask_thread(self._client.stop_training_job, TrainingJobName=name)
