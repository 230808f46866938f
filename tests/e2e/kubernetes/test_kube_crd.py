"""The API server refuses what Python refuses, and takes what Python takes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from atoll.core.errors import ValidationError
from atoll.core.model import decode
from atoll.core.spec import TrainingSpec
from tests.e2e.kubernetes.conftest import Space

Json = dict[str, Any]
WORLD = {"min": 1, "target": 2, "max": 4}
GOOD: Json = {"worldSize": WORLD, "command": ["true"], "image": "x"}

SPECS: dict[str, Json] = {
    "good": {},
    "everything": {
        "args": ["a"],
        "env": {"A_b1": "x"},
        "ncclEnv": {"NCCL_DEBUG": "INFO"},
        "workingDir": "/w",
        "resources": {"cpu": "500m", "memory": "1.5Gi", "gpuCount": 1, "gpuModels": ["H100"]},
        "providerFilter": {"include": ["a"], "exclude": ["b"]},
        "topologySpread": "pack",
        "bench": {"mode": "on-start", "placement": "strict"},
        "rendezvous": {"backend": "static", "uri": "s3://b/x"},
        "maxRestarts": 3,
        "startGraceS": 0,
        "deadlineS": 1.5,
        "ttlSeconds": 0,
        "cancel": True,
    },
    "source": {"command": None, "source": {"kind": "script", "content": "cHJpbnQoMSk="}},
    "bench off with any placement": {"bench": {"placement": "whatever"}},
    "min above target": {"worldSize": {"min": 3, "target": 2, "max": 4}},
    "target above max": {"worldSize": {"min": 1, "target": 5, "max": 4}},
    "min 0": {"worldSize": {"min": 0, "target": 2, "max": 4}},
    "no world": {"worldSize": None},
    "neither command nor source": {"command": None},
    "both command and source": {"source": {"kind": "script", "content": "eA=="}},
    "empty command": {"command": []},
    "empty source": {"command": None, "source": {"kind": "script", "content": ""}},
    "a path as file name": {
        "command": None,
        "source": {"kind": "script", "content": "eA==", "filename": "../x"},
    },
    "bad cpu": {"resources": {"cpu": "many"}},
    "negative gpus": {"resources": {"gpuCount": -1}},
    "bad spread": {"topologySpread": "wide"},
    "bad placement": {"bench": {"mode": "on-start", "placement": "whatever"}},
    "no provider": {"providerFilter": {"include": []}},
    "provider in and out": {"providerFilter": {"include": ["a"], "exclude": ["a"]}},
    "bad rendezvous": {"rendezvous": {"backend": "zookeeper"}},
    "bad uri": {"rendezvous": {"uri": "ftp://x"}},
    "reserved variable": {"env": {"RANK": "1"}},
    "reserved prefix": {"env": {"ATOLL_X": "1"}},
    "bad variable": {"env": {"1A": "1"}},
    "relative folder": {"workingDir": "w"},
    "negative restarts": {"maxRestarts": -1},
    "grace above an hour": {"stopGraceS": 3601},
    "deadline 0": {"deadlineS": 0},
    "ttl below 0": {"ttlSeconds": -1},
    "bad executor": {"executor": "No Such"},
    "unknown field": {"worldsize": 3},
}


def merged(change: Json) -> Json:
    return {k: v for k, v in (GOOD | change).items() if v is not None}


def python_takes(spec: Json) -> bool:
    try:
        decode(msgspec.json.encode({**spec, "name": "tiny"}), TrainingSpec)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("what", SPECS)
def test_the_api_server_and_python_agree(space: Space, what: str) -> None:
    spec = merged(SPECS[what])
    body = {
        "apiVersion": "atoll.dev/v1",
        "kind": "Training",
        "metadata": {"name": "tiny"},
        "spec": spec,
    }
    done = space.kubectl(
        *("create", "--dry-run=server", "--validate=strict", "-f", "-"),
        stdin=body,
        is_checked=False,
    )
    assert (done.returncode == 0) == python_takes(spec), done.stderr


NAMES = {"tiny": True, "t": True, "7b": True, "a.b": False, "x" * 63: True, "x" * 64: False}


@pytest.mark.parametrize("name", NAMES)
def test_names_are_labels(space: Space, name: str) -> None:
    body = {
        "apiVersion": "atoll.dev/v1",
        "kind": "Training",
        "metadata": {"name": name},
        "spec": GOOD,
    }
    done = space.kubectl("create", "--dry-run=server", "-f", "-", stdin=body, is_checked=False)
    assert (done.returncode == 0) == NAMES[name], done.stderr


# A change to a stored training, and whether it may be made.
CHANGES: dict[str, tuple[Json, bool]] = {
    "target": ({"worldSize": {"target": 3}}, True),
    "cancel": ({"cancel": True}, True),
    "min": ({"worldSize": {"min": 2}}, False),
    "max": ({"worldSize": {"max": 9}}, False),
    "command": ({"command": ["false"]}, False),
    "image": ({"image": "y"}, False),
    "image away": ({"image": None}, False),
    "env": ({"env": {"A": "1"}}, False),
    "max restarts": ({"maxRestarts": 3}, False),
}


@pytest.mark.parametrize("what", CHANGES)
def test_only_target_and_cancel_change_after_the_start(space: Space, what: str) -> None:
    change, is_allowed = CHANGES[what]
    space.submit("tiny", command=["true"], image="x", worldSize=WORLD)
    patch = json.dumps({"spec": change})
    done = space.kubectl("patch", "training", "tiny", "--type=merge", "-p", patch, is_checked=False)
    assert (done.returncode == 0) == is_allowed, done.stderr


def test_cancel_is_not_taken_back(space: Space) -> None:
    space.submit("tiny", command=["true"], image="x", cancel=True)
    patch = '{"spec":{"cancel":false}}'
    done = space.kubectl("patch", "training", "tiny", "--type=merge", "-p", patch, is_checked=False)
    assert "cannot be taken back" in done.stderr
