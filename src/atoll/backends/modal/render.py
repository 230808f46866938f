"""From a training, a rank and an attempt to the sandbox that is asked for. Pure."""

from __future__ import annotations

import math
from typing import Any

from atoll.backends.base import RECORDS, labels_of, prefix_of
from atoll.backends.modal.options import MIB, ModalOptions
from atoll.backends.records import AttemptKey
from atoll.core.status import Training
from atoll.core.text import parse_quantity

# The wrapper, which says by the id of its container where it runs: all have one host name.
WRAPPER = (
    "import os, sys; from atoll.agent.wrapper import main; "
    "sys.exit(main([*sys.argv[1:], '--host', os.environ.get('MODAL_TASK_ID', '')]))"
)
# Between the end that was planned for a rank, with its grace, and the one that Modal makes.
LIFETIME_MARGIN_S = 60


def sandbox_name(uid: str, key: AttemptKey) -> str:
    """No two sandboxes that run have one name in an app: a start that is repeated is refused."""
    return f"{uid[:32]}-r{key[0]}-a{key[1]}"


def render_sandbox(training: Training, key: AttemptKey, options: ModalOptions) -> dict[str, Any]:
    """The arguments of `Sandbox.create` for one attempt; the image may be an object of the client.

    It finds what it runs under the prefix of its records, and leaves its end there.
    """
    spec, records = training.spec, prefix_of(training, options, RECORDS)
    cpu, memory = spec.resources.cpu, spec.resources.memory
    return {
        "name": sandbox_name(training.uid, key),
        "tags": labels_of(training.uid, key),
        "command": [options.python, "-c", WRAPPER, records, *map(str, key)],
        "image": spec.image or options.image,
        "timeout": options.lifetime_s,
        "gpu": options.hardware_of(spec),
        "cpu": options.cpu if cpu is None else parse_quantity(cpu),
        "memory": options.memory if memory is None else round(parse_quantity(memory) / MIB),
    }


def planned_lifetime_s(options: ModalOptions, grace_s: float) -> float:
    """How long a rank runs before it is asked to make room for its successor."""
    return max(options.lifetime_s - LIFETIME_MARGIN_S - math.ceil(grace_s), options.lifetime_s / 2)
