"""From a training, a rank and an attempt to the sandbox that is asked for. Pure."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from atoll.backends.modal.gpus import gpu_of
from atoll.backends.modal.options import ModalOptions, cores_of, mebibytes_of
from atoll.core.status import Training

UID, RANK, ATTEMPT = "atoll-uid", "atoll-rank", "atoll-attempt"
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


def tags_of(uid: str) -> dict[str, str]:
    """What all sandboxes of a training have, and no other."""
    return {UID: uid}


def prefix_of(training: Training, options: ModalOptions, part: str) -> str:
    """Where in the store something of the training is."""
    store = options.store_of(training.spec).rstrip("/")
    return f"{store}/atoll-ranks/{training.uid}/{part}".rstrip("/")


def render_sandbox(
    training: Training,
    rank: int,
    attempt: int,
    records: str,
    options: ModalOptions,
) -> SandboxRequest:
    """`records` is where the sandbox finds what it runs, and leaves how that ended."""
    spec = training.spec
    return SandboxRequest(
        name=sandbox_name(training.uid, rank, attempt),
        tags={**tags_of(training.uid), RANK: str(rank), ATTEMPT: str(attempt)},
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
