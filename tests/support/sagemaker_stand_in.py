"""A stand-in for Amazon SageMaker: its wire for the unmodified boto3, jobs as processes.

Requests are checked against botocore's model with its patterns, lengths and enums. A job has its
own `/opt/ml`, by a mount namespace; its lines go to CloudWatch Logs of moto. What AWS itself would
do is imitated: capacity, spot, lost instances, a list that lags behind.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import boto3
import botocore.session
from botocore.validate import ParamValidator

Json = dict[str, Any]

ROLE = "arn:aws:iam::123456789012:role/trainer"
ARN = "arn:aws:sagemaker:us-east-1:123456789012:training-job/"
GROUP = "/aws/sagemaker/TrainingJobs"
MOUNT = 'mount -t tmpfs none /opt && mkdir /opt/ml && mount --bind "$0" /opt/ml && exec "$@"'
PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "COVERAGE_PROCESS_START")
_MODEL = botocore.session.get_session().get_service_model("sagemaker")


def why_no_mounts() -> str:
    """Why jobs cannot have a `/opt/ml` of their own here; empty if they can."""
    if not Path("/opt").is_dir():
        return "there is no /opt to mount on"
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs none /opt"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unshare is not installed"
    return done.stderr.strip() if done.returncode else ""


class WireError(Exception):
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class StandInJob:
    """One training job. Its processes are the group of `process`."""

    def __init__(self, server: SageMakerStandIn, request: Json) -> None:
        self.server = server
        self.request = request
        self.name: str = request["TrainingJobName"]
        self.created = time.time()
        self.status, self.moves = "InProgress", [("Starting", self.created)]
        self.reason = ""
        self.started_at: float | None = None
        self.ended_at: float | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.runs = 0
        self.folder = Path(tempfile.mkdtemp(prefix="atoll-sm-"))
        self._stop = self._interrupt = False
        self._lost = ""
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    @property
    def secondary(self) -> str:
        return self.moves[-1][0]

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def rank(self) -> int:
        return int(self.request["AlgorithmSpecification"]["ContainerArguments"][-2])

    def ask_to_stop(self) -> None:
        self._stop = True

    def interrupt(self) -> None:
        """Spot: its instance is taken back, and the job starts again on another one."""
        self._interrupt = True

    def lose(self, reason: str) -> None:
        """Its instance is gone with everything on it."""
        self._lost = reason

    def run_again(self) -> str:
        """Its container is started a second time beside the first. What that one printed."""
        out, _ = self._start().communicate(timeout=30)
        return out.decode(errors="replace")

    def wait(self) -> None:
        self._thread.join()

    def _move(self, secondary: str) -> None:
        self.moves.append((secondary, time.time()))

    def _live(self) -> None:
        try:
            self._run()
        finally:
            self.ended_at = time.time()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self) -> None:
        if self.server.capacity_errors > 0:
            self.server.capacity_errors -= 1
            text = "CapacityError: Unable to provision requested ML compute capacity."
            return self._end("Failed", "Failed", text)
        image = self.request["AlgorithmSpecification"]["TrainingImage"]
        if image in self.server.bad_images:
            text = f"ClientError: Cannot find repository: {image}. Please check your image path."
            return self._end("Failed", "Failed", text)
        time.sleep(self.server.start_s)
        while True:
            if self._stop:
                return self._end("Stopped", "Stopped")
            code = self._container()
            if not self._interrupt:
                break
            self._interrupt = False
            self._move("Interrupted")
            time.sleep(self.server.again_s)
            self._move("Starting")
        if self._lost:
            return self._end("Failed", "Failed", self._lost)
        if self.status == "Stopping":
            over = self.moves[-1][0] == "MaxRuntimeExceeded"
            return self._end("Stopped", "MaxRuntimeExceeded" if over else "Stopped")
        self._move("Uploading")
        self.server.may_upload.wait(60)
        if code == 0:
            return self._end("Completed", "Completed")
        words = ""
        with contextlib.suppress(OSError):
            words = (self.folder / "output/failure").read_text()
        return self._end("Failed", "Failed", f"AlgorithmError: {words}, exit code: {code}"[:1024])

    def _end(self, status: str, secondary: str, reason: str = "") -> None:
        self._move(secondary)
        self.reason, self.status = reason, status

    def _container(self) -> int:
        """Runs it to its end, or until it is stopped."""
        self.runs += 1
        self._move("Training")
        self.started_at = self.started_at or time.time()
        self.process = self._start()
        shipping = threading.Thread(target=self._ship, args=(self.process,), daemon=True)
        shipping.start()
        limit = self.request["StoppingCondition"]["MaxRuntimeInSeconds"]
        kill_at: float | None = None
        while self.process.poll() is None:
            if self._lost:
                self._signal(signal.SIGKILL)
            is_over = time.time() > self.started_at + min(limit, self.server.most_runtime_s)
            if kill_at is None and (self._stop or self._interrupt or is_over):
                kill_at = time.time() + self.server.stop_s
                if not self._interrupt:
                    self.status = "Stopping"
                    self._move("MaxRuntimeExceeded" if is_over and not self._stop else "Stopping")
                self._signal(signal.SIGTERM, is_first_only=True)
            if kill_at is not None and time.time() > kill_at:
                self._signal(signal.SIGKILL)
            time.sleep(0.02)
        self._signal(signal.SIGKILL)  # what a container leaves goes with it
        shipping.join(timeout=5)
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def _start(self) -> subprocess.Popen[bytes]:
        spec = self.request["AlgorithmSpecification"]
        for part in ("input/config", "input/data", "output", "model", "checkpoints"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        config = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "lo"}
        (self.folder / "input/config/resourceconfig.json").write_text(json.dumps(config))
        command = [*spec["ContainerEntrypoint"], *spec.get("ContainerArguments", [])]
        env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        env |= {"HOME": "/tmp", "TRAINING_JOB_NAME": self.name, **self.server.role_environment}
        return subprocess.Popen(
            ["unshare", "-m", "sh", "-c", MOUNT, str(self.folder), *command],
            env=env | self.request.get("Environment", {}),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _signal(self, number: int, *, is_first_only: bool = False) -> None:
        """To the container's process 1, or to everything that it holds, whatever its session."""
        assert self.process is not None
        pids = [self.process.pid] if is_first_only else self.pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def pids(self) -> list[int]:
        """All processes of the container: those that see its `/opt/ml`."""
        assert self.process is not None
        mark = f"TRAINING_JOB_NAME={self.name}".encode()
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError):
                if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
        return found

    def _ship(self, process: subprocess.Popen[bytes]) -> None:
        """Its lines to CloudWatch, as they come."""
        stream = f"{self.name}/algo-1-{int(time.time() * 1000)}"
        assert process.stdout is not None
        with process.stdout as lines:
            self._ship_lines(stream, lines)

    def _ship_lines(self, stream: str, lines: IO[bytes]) -> None:
        is_made = False
        for line in lines:
            if not is_made:
                self.server.logs.create_log_stream(logGroupName=GROUP, logStreamName=stream)
                is_made = True
            text = line.decode(errors="replace").rstrip("\n") or " "
            event = {"timestamp": int(time.time() * 1000), "message": text}
            self.server.logs.put_log_events(
                logGroupName=GROUP, logStreamName=stream, logEvents=[event]
            )

    def summary(self) -> Json:
        made: Json = {
            "TrainingJobName": self.name,
            "TrainingJobArn": ARN + self.name,
            "CreationTime": self.created,
            "LastModifiedTime": max(self.moves[-1][1], self.ended_at or 0.0),
            "TrainingJobStatus": self.status,
            "SecondaryStatus": self.secondary,
        }
        return made | ({"TrainingEndTime": self.ended_at} if self.ended_at else {})

    def description(self) -> Json:
        moves = [{"Status": status, "StartTime": at} for status, at in self.moves]
        made = {
            **self.summary(),
            "AlgorithmSpecification": self.request["AlgorithmSpecification"],
            "ResourceConfig": self.request["ResourceConfig"],
            "StoppingCondition": self.request["StoppingCondition"],
            "ModelArtifacts": {"S3ModelArtifacts": "s3://none"},
            "SecondaryStatusTransitions": moves,
        }
        if self.started_at:
            made["TrainingStartTime"] = self.started_at
        return made | ({"FailureReason": self.reason} if self.reason else {})


class SageMakerStandIn:
    """`url` is for AWS_ENDPOINT_URL_SAGEMAKER. `logs_url`: a moto that has the logs."""

    def __init__(self, logs_url: str, role_environment: dict[str, str]) -> None:
        self.jobs: dict[str, StandInJob] = {}
        self.calls: Counter[str] = Counter()
        self.role_environment = role_environment  # credentials of the role, and where its S3 is
        self.bad_images: set[str] = set()
        self.capacity_errors = 0
        self.start_s = self.again_s = 0.0
        self.may_upload = threading.Event()  # output, once a job ended
        self.may_upload.set()
        self.stop_s = 120.0
        self.most_runtime_s = 1e9  # as if requests said so, which takes whole seconds
        self.is_away = False
        self.lost_answers = 0  # so many starts are taken, and their answers are lost
        self.is_spoiling = False  # every second page of a list is an error
        self.list_lag_s = 0.0  # a job is in no list before
        self.page = 100
        self.logs = boto3.client(
            "logs",
            endpoint_url=logs_url,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        with contextlib.suppress(self.logs.exceptions.ResourceAlreadyExistsException):
            self.logs.create_log_group(logGroupName=GROUP)
        self._lock = threading.Lock()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.environment = {
            "AWS_ENDPOINT_URL_SAGEMAKER": self.url,
            "AWS_ENDPOINT_URL_CLOUDWATCH_LOGS": logs_url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def close(self) -> None:
        for job in self.jobs.values():
            job.lose("the stand-in ends")
        for job in self.jobs.values():
            job.wait()
        self._server.shutdown()
        self._server.server_close()

    def running(self, uid: str) -> list[StandInJob]:
        mark = {"Key": "atoll-uid", "Value": uid}
        return [j for j in self.jobs.values() if mark in j.request["Tags"] and j.is_running]

    # The operations

    def CreateTrainingJob(self, request: Json) -> Json:
        name = request["TrainingJobName"]
        with self._lock:
            if name in self.jobs:
                text = "Training job names must be unique within an AWS account and region"
                raise WireError("ResourceInUse", f"{text}, {name} exists")
            self.jobs[name] = StandInJob(self, request)
        if self.lost_answers > 0:
            self.lost_answers -= 1
            raise WireError("ServiceUnavailable", "come again")
        return {"TrainingJobArn": ARN + name}

    def DescribeTrainingJob(self, request: Json) -> Json:
        return self._job(request).description()

    def StopTrainingJob(self, request: Json) -> Json:
        job = self._job(request)
        if job.status != "InProgress":
            text = f"The request was rejected because the training job is in status {job.status}."
            raise WireError("ValidationException", text)
        job.ask_to_stop()
        return {}

    def ListTrainingJobs(self, request: Json) -> Json:
        if self.is_spoiling and self.calls["ListTrainingJobs"] % 2:
            raise WireError("ServiceUnavailable", "the page was lost")
        until = time.time() - self.list_lag_s
        found = [
            job.summary()
            for job in self.jobs.values()
            if request.get("NameContains", "") in job.name
            and request.get("CreationTimeAfter", 0) <= job.created <= until
            and request.get("LastModifiedTimeAfter", 0) <= job.summary()["LastModifiedTime"]
        ]
        start = int(request.get("NextToken", 0))
        end = start + min(request.get("MaxResults", 10), self.page)
        more = {"NextToken": str(end)} if end < len(found) else {}
        return {"TrainingJobSummaries": found[start:end], **more}

    def _job(self, request: Json) -> StandInJob:
        name = request["TrainingJobName"]
        if name not in self.jobs:
            raise WireError("ValidationException", "Requested resource not found.")
        return self.jobs[name]

    def answer(self, operation: str, request: Json) -> Json:
        self.calls[operation] += 1
        if self.is_away:
            raise WireError("ServiceUnavailable", "come again")
        method = getattr(self, operation, None)
        if method is None:
            raise WireError("UnknownOperationException", operation)
        shape = _MODEL.operation_model(operation).input_shape
        report = ParamValidator().validate(request, shape)
        flaw = report.generate_report() if report.has_errors() else next(_flaws(shape, request), "")
        if flaw:
            raise WireError("ValidationException", flaw)
        answer: Json = method(request)
        return answer


def _flaws(shape: Any, value: Any, path: str = "") -> Iterator[str]:
    """What of the model botocore leaves to the service."""
    size = value if shape.type_name in ("integer", "long") else None
    if shape.type_name == "structure":
        for name, member in value.items():
            yield from _flaws(shape.members[name], member, f"{path}.{name}")
        return
    if shape.type_name == "map":
        for key, member in value.items():
            yield from _flaws(shape.key, key, path)
            yield from _flaws(shape.value, member, f"{path}.{key}")
    if shape.type_name == "list":
        for at, member in enumerate(value):
            yield from _flaws(shape.member, member, f"{path}[{at}]")
    if shape.type_name in ("string", "map", "list"):
        size = len(value)
    if size is not None and not shape.metadata.get("min", 0) <= size <= shape.metadata.get(
        "max", 1e18
    ):
        yield f"{path}: {value!r} failed to satisfy a constraint on its size"
    if shape.type_name == "string":
        if shape.enum and value not in shape.enum:
            yield f"{path}: {value!r} is not in the enum"
        pattern = re.sub(r"\\p\{\w+\}", r"\\w\\s", shape.metadata.get("pattern", ".*"))
        if not re.fullmatch(pattern, value, re.DOTALL):
            yield f"{path}: {value!r} failed to satisfy {pattern}"


def _handler(server: SageMakerStandIn) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            operation = self.headers["X-Amz-Target"].partition(".")[2]
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                answer, code = server.answer(operation, request), 200
            except WireError as error:
                answer = {"__type": error.kind, "message": str(error)}
                code = 503 if error.kind == "ServiceUnavailable" else 400
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler
