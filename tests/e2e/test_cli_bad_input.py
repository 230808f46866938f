"""Bad input: each gets one line on stderr that says what is wrong and what would be right."""

from __future__ import annotations

import os
import sys
from subprocess import CompletedProcess
from typing import Any

import pytest

from atoll.cli.main import main

LONG = "a" * 201

# Words, what the line must say. All of these exit with 2, and nothing was created.
BAD = [
    (("run",), "nothing to run: atoll run -n 4 -- python train.py"),
    (("run", "-n", "4", "--"), "nothing to run"),
    (("run", "--bogus", "--", "true"), "No such option '--bogus'"),
    (("frobnicate",), "No such command 'frobnicate'"),
    (("run", "-n", "0", "--", "true"), "0 is not valid: expected a whole number from 1 to 10000"),
    (("run", "-n", "-1", "--", "true"), "-1 is not valid: expected a whole number from 1 to 10000"),
    (("run", "-n", "9999999999", "--", "true"), "9999999999 is not valid: expected a whole"),
    (
        ("run", "-n", "many", "--", "true"),
        "'many' is not valid: expected a whole number from 1 to 10000",
    ),
    (("run", "-n", "2", "--min", "3", "--", "true"), "--min <= -n <= --max, got 3, 2, 2"),
    (("run", "-n", "2", "--max", "1", "--", "true"), "--min <= -n <= --max, got 2, 2, 1"),
    (("run", "--name", "a/b", "--", "true"), "--name: 'a/b' is not valid"),
    (("run", "--name", "..", "--", "true"), "--name: '..' is not valid"),
    (("run", "--name", "a/b", "--", "true"), "expected 1 to 200 printable characters"),
    (("run", "--name", LONG, "--", "true"), "expected 1 to 200 printable characters"),
    (("run", "--name", "", "--", "true"), "--name: '' is not valid"),
    (
        ("run", "--max-restarts", "-1", "--", "true"),
        "-1 is not valid: expected a whole number of at least 0",
    ),
    (("run", "--deadline", "-5", "--", "true"), "'-5' is not a duration: expected 30s, 5m"),
    (
        ("run", "--ttl", "999999999", "--", "true"),
        "--ttl: 999999999 is not valid",
    ),
    (("run", "--deadline", "0", "--", "true"), "expected a number from 0.001 to 315360000"),
    (("run", "--stall-restart", "--", "true"), "error: --stall-restart: expected --stall-timeout"),
    (
        ("run", "--config", "no.toml", "--", "true"),
        "--config: 'no.toml' is not valid: expected a f",
    ),
    (("sweep", "--set", "lr=1"), "nothing to run: atoll sweep --set lr=0.1,0.3 train.py"),
    (("sweep", "--set", "lr=1", "--seed", "3", "true"), "--seed: expected --samples with it"),
    (("metrics", "x", "loss", "--svg", "x.png"), "--svg: 'x.png' is not valid: expected a file"),
    (("run", "--rendezvous", "carrier-pigeon", "--", "true"), "expected 'etcd-v2' or 'c10d'"),
    (("run", "--uri", "ftp://x", "--", "true"), "--uri: 'ftp://x' is not valid"),
    (("run", "--bench", "always", "--", "true"), "expected 'off' or 'on-start'"),
    (("run", "--cpu", "lots", "--", "true"), "expected a quantity such as '2', '500m', '4Gi'"),
    (
        ("run", "--gpus", "-1", "--", "true"),
        "-1 is not valid: expected a whole number from 0 to 1024",
    ),
    (("run", "-C", "/none", "--", "true"), "--workdir: '/none' is not valid: expected a directory"),
    (("sweep", "--set", "a=1", "-C", "/none", "true"), "expected a directory: there is none"),
    (("run", "-e", "1X=2", "--", "true"), "--env: '1X' is not valid"),
    (("run", "--pip", " ", "--", "true"), "--pip[0]: ' ' is not valid: expected a package"),
    (("limits", "--cpu", "many"), "--cpu: 'many' is not valid: expected a quantity"),
    (("run", "--memory", "16", "--", "true"), "--memory: '16' is not valid: expected at least 1Mi"),
    (("limits", "--memory", "4"), "--memory: '4' is not valid: expected at least 1Mi: a number"),
    (("limits", "--memory", "0"), "--memory: '0' is not valid: expected more than 0"),
    (
        ("run", "-e", "NOT_SET_HERE", "--", "true"),
        "expected K=V, or the name or pattern of variables that are set here",
    ),
    (("run", "-e", "RANK=3", "--", "true"), "atoll sets this one for every rank"),
    (("run", "trian.py"), "command: 'trian.py' is not valid: expected a file: there is none at"),
    (
        ("run", "--uri", "s3://bucket/run", "--", "true"),
        "--uri: 's3://bucket/run' is not valid: expected AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS",
    ),
    (("run", "--uri", "gs://bucket/run", "--", "true"), "expected GOOGLE_APPLICATION_CREDENTIALS"),
    (("run", "--uri", "az://bucket/run", "--", "true"), "expected AZURE_STORAGE_ACCOUNT_NAME and"),
    (("list",), "No such command 'list'. Did you mean 'atoll ps'?"),
    (("delete", "x"), "Did you mean 'atoll rm'?"),
    (("--verison",), "No such option '--verison'. Did you mean '--version'?: see"),
    (("stop", "x"), "'atoll cancel NAME' stops a training"),
    (("status",), "Missing argument 'NAME'"),
    (("status", "no/such"), "name: 'no/such' is not valid"),
    (("logs", "x", "--rank", "-1"), "-1 is not valid: expected a whole number of at least 0"),
    (("logs", "x", "--tail", "few"), "'few' is not valid: expected a whole number"),
    (("scale", "x"), "Missing argument 'TARGET'"),
    (("scale", "x", "more"), "'more' is not valid: expected a whole number"),
    (("wait", "x", "--for", "ever"), "'ever' is not one of 'min', 'target', 'complete'"),
    (("wait", "x", "--timeout", "5 min"), "'5 min' is not a duration: expected 30s, 5m, 2h"),
    (("cancel",), "Missing argument 'NAMES...'"),
    (("rm",), "give names, or --finished"),
    (("rm", "x", "--finished"), "give names, or --finished"),
    (("ps", "--phase", "sleeping"), "'sleeping' is not one of"),
    (("serve", "--port", "70000"), "70000 is not valid: expected a whole number from 0 to 65535"),
    (("serve", "--slots", "0"), "0 is not valid: expected a whole number of at least 1"),
    (("token", "create", "--namespace", "No"), "--namespace: 'No' is not valid"),
    (("estimate", "--parameters", "big", "--step-s", "1", "--link-gbps", "1"), "expected a count"),
    (("completion", "tcsh"), "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
    (("completion",), "Choose from: bash, zsh, fish: see"),
    (("events", "x", "--since", "soon"), "--since: 'soon' is not valid: expected 10m"),
    (("run", "-e", "NOT_SET_HERE", "--", "true"), "--env: 'NOT_SET_HERE' is not valid"),
    (("k8s", "operator", "--options", "{bad"), "--options: '{bad' is not valid: expected JSON"),
    (("k8s", "operator", "--options", '{"imag": 1}'), "--options: imag: 'imag' is not valid"),
    (("top", "--interval", "0"), "expected 0.05s to 3600s"),
]


@pytest.mark.parametrize(("words", "told"), BAD, ids=[" ".join(words)[:60] for words, _ in BAD])
def test_bad_usage_is_one_line_and_2(
    words: tuple[str, ...], told: str, monkeypatch: Any, capfd: Any, tmp_path: Any
) -> None:
    """In this process, for speed; that no state directory appears shows that nothing was asked."""
    monkeypatch.setattr(sys, "argv", ["atoll", *words])
    monkeypatch.setenv("ATOLL_STATE_DIR", str(tmp_path / "state"))
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capfd.readouterr()
    _check(CompletedProcess(words, ended.value.code, out, err), 2, told)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("status", "nobody"), "training 'nobody' not found: 'atoll ps' lists what exists"),
        (("token", "revoke", "abc"), "token 'abc' not found: 'atoll token list' lists what exists"),
        (
            ("serve", "--json", "--host", "192.0.2.1", "--port", "0"),
            "cannot listen on 192.0.2.1:0: Cannot assign requested address; choose another --host",
        ),
        (("scale", "nobody", "2"), "training 'nobody' not found"),
        (("cancel", "nobody"), "training 'nobody' not found"),
        (("logs", "nobody"), "training 'nobody' not found"),
        (("token", "revoke", "feedfacefeed"), "token 'feedfacefeed' not found"),
        (("serve", "--state-dir", "/proc/nowhere"), "cannot keep state in /proc/nowhere"),
    ],
)
def test_what_is_not_there_is_one_line_and_1(atoll: Any, words: tuple[str, ...], told: str) -> None:
    _check(atoll(*words), 1, told)


def test_what_the_training_refuses_is_one_line_and_1(atoll: Any) -> None:
    assert atoll("run", "-d", "--name", "refusing", "-n", "2", "--", "sleep", "60").returncode == 0
    _check(
        atoll("run", "-d", "--name", "refusing", "--", "true"),
        1,
        "a training named 'refusing' exists",
    )
    _check(atoll("scale", "refusing", "5"), 1, "target 5 is outside [2, 2]: --min and --max are")
    _check(atoll("scale", "refusing", "-1"), 1, "target -1 is outside [2, 2]")
    assert atoll("cancel", "refusing").returncode == 0
    assert atoll("wait", "refusing").returncode == 1
    _check(atoll("scale", "refusing", "2"), 1, "the training was cancelled: it cannot scale to 2")
    assert atoll("rm", "-f", "refusing").returncode == 0


def test_a_control_plane_that_is_not_there_is_one_line(atoll: Any) -> None:
    done = atoll("ps", ATOLL_URL="http://127.0.0.1:9", ATOLL_TOKEN="x")
    _check(done, 1, "cannot reach 127.0.0.1:9")
    assert "ATOLL_URL" in done.stderr
    _check(atoll("ps", ATOLL_URL="nonsense"), 2, "ATOLL_URL: 'nonsense' is not valid")


def test_a_wrong_token_is_refused_with_what_to_do(atoll: Any) -> None:
    _check(atoll("ps", ATOLL_TOKEN="atoll_wrong"), 1, "'atoll token create'")


def test_a_port_in_use_and_a_directory_in_use_are_named(atoll: Any, tmp_path: Any) -> None:
    assert atoll("ps").returncode == 0
    _check(atoll("serve", "--port", "0"), 1, "only one control plane per state directory", lines=2)
    url = (atoll.state / "endpoint.json").read_text()
    port = url.split("127.0.0.1:")[1].split('"')[0]
    done = atoll("serve", "--port", port, "--state-dir", str(tmp_path / "other"))
    _check(done, 1, f"cannot listen on 127.0.0.1:{port}", lines=2)


def test_no_words_at_all_print_the_help(atoll: Any) -> None:
    done = atoll()
    assert done.returncode == 2
    assert "Commands:" in done.stdout + done.stderr


def _check(done: Any, code: int, told: str, *, lines: int = 1) -> None:
    assert done.returncode == code, done.stdout + done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == lines, done.stderr
    assert done.stdout == ""
