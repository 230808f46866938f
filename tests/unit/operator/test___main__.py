"""What the operator's command says when it cannot start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.core.errors import ValidationError
from atoll.operator.run import read_config


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--options", "{"], "--options: '{' is not valid"),
        (["run", "--options", '{"nope": 1}'], "there is no such field"),
        (["run", "--options", '{"namespace": "a"}'], "expected as --namespace"),
        (["run"], "no usable Kubernetes configuration: Configuration file /nope not found"),
        (["run", "--config", "/nope"], "--config: '/nope' is not valid: cannot read this file"),
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


def test_the_configuration_has_webhooks_and_stores_of_rounds_alone(tmp_path: Path) -> None:
    path = tmp_path / "atoll.toml"
    hook = "[[webhooks]]\nurl = 'https://x/'\nsecret_file = 'key'\n"
    path.write_text(f"{hook}[[rounds.stores]]\nuri = 's3://b/runs'\nnamespaces = ['team-a']\n")
    config = read_config(path)
    assert [webhook.url for webhook in config.webhooks] == ["https://x/"]
    assert [store.uri for store in config.round_stores] == ["s3://b/runs"]
    assert read_config(None).webhooks == []
    for table in ("[executors.eu]\nkind = 'kubernetes'", "[defaults]\nmax_restarts = 1"):
        path.write_text(table)
        with pytest.raises(ValidationError, match="an operator reads nothing else"):
            read_config(path)
    with pytest.raises(ValidationError, match="--config: .*No such file"):
        read_config(tmp_path / "none")
