"""From a training, a rank and an attempt to the sandbox that is asked for. Pure."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from atoll.backends.base import RECORDS, labels_of, prefix_of
from atoll.backends.modal.gpus import gpu_of
from atoll.backends.modal.options import ModalOptions, cores_of, mebibytes_of
from atoll.core.status import Training

# The wrapper, which says by the id of its container where it runs: all have one host name.
WRAPPER = (
    "import os, sys; from atoll.agent.wrapper import main; "
    "sys.exit(main([*sys.argv[1:], '--host', os.environ.get('MODAL_TASK_ID', '')]))"
)
# Between the end that was planned for a rank, with its grace, and the one that Modal makes.
LIFETIME_MARGIN_S = 60


class SandboxRequest(NamedTuple):
    """One sandbox, in plain data; `image` aside, which may be an object of the client."""

    name: str
    tags: dict[str, str]
    command: list[str]
    image: Any
    timeout_s: int
    gpu: str | None = None
    cpu: float | None = None
    memory: int | None = None


def sandbox_name(uid: str, rank: int, attempt: int) -> str:
    """No two sandboxes that run have one name in an app: a start that is repeated is refused."""
    return f"{uid[:32]}-r{rank}-a{attempt}"


def render_sandbox(
    training: Training,
    rank: int,
    attempt: int,
    options: ModalOptions,
) -> SandboxRequest:
    """The sandbox finds what it runs under the prefix of its records, and leaves its end there."""
    spec, records = training.spec, prefix_of(training, options, RECORDS)
    return SandboxRequest(
        name=sandbox_name(training.uid, rank, attempt),
        tags=labels_of(training.uid, (rank, attempt)),
        command=[options.python, "-c", WRAPPER, records, str(rank), str(attempt)],
        image=spec.image or options.image,
        timeout_s=options.lifetime_s,
        gpu=gpu_of(spec.resources, options.gpu),
        cpu=cores_of(spec, options),
        memory=mebibytes_of(spec, options),
    )


def planned_lifetime_s(options: ModalOptions, grace_s: float) -> float:
    """How long a rank runs before it is asked to make room for its successor."""
    return max(options.lifetime_s - LIFETIME_MARGIN_S - math.ceil(grace_s), options.lifetime_s / 2)
