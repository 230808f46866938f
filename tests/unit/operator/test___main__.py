"""What the operator's command says when it cannot start."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from atoll.core.errors import ValidationError
from atoll.operator.__main__ import read_round_stores


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--options", "{"], "--options: '{' is not valid"),
        (["run", "--options", '{"nope": 1}'], "there is no such field"),
        (["run", "--options", '{"namespace": "a"}'], "expected as --namespace"),
        (["run"], "no usable Kubernetes configuration: Configuration file /nope not found"),
        (["token", "--namespace", "a"], "no usable Kubernetes configuration"),
        (["manifests", "--image", "x", "--options", '{"nope": 1}'], "there is no such field"),
    ],
)
def test_one_line_and_no_traceback(words: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "atoll.operator", *words],
        env={**os.environ, "KUBECONFIG": "/nope"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_stores_of_rounds_are_named_with_their_namespaces() -> None:
    (store,) = read_round_stores(["s3://bucket/runs=team-a,team-b"])
    assert (store.uri, store.namespaces) == ("s3://bucket/runs", ["team-a", "team-b"])
    for text in ("s3://bucket/runs", "file:///x=team-a", "=team-a", "s3://bucket=", "s3://b=Bad_"):
        with pytest.raises(ValidationError, match="--round-store"):
            read_round_stores([text])
