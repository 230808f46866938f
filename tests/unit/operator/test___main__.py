"""What the operator's command says when it cannot start."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


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
