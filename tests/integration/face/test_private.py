"""A private control plane belongs to the process that made it, and ends once."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import atoll
from atoll.core.errors import Permanent

from .conftest import PATIENCE_S


def test_a_forked_child_shares_it_and_does_not_end_it() -> None:
    code = textwrap.dedent("""
        import atoll, os

        def in_child(work):
            child = os.fork()
            if not child:
                try:
                    work()
                finally:
                    os._exit(0)
            os.waitpid(child, 0)

        with atoll.Client.local() as client:
            t = client.deploy_distributed("p", command=["sleep", "600"], wait="min")
            in_child(lambda: print("child", t.phase, [o.name for o in client.list()], flush=True))
            in_child(client.close)
            print("owner", t.phase, t.world.ready, flush=True)
    """)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.splitlines() == ["child ready ['p']", "owner ready 1"], done.stderr


def test_once_it_has_ended_nothing_is_started_in_its_place() -> None:
    with atoll.Client.local() as client:
        t = client.deploy_distributed("p", command=["sleep", "600"])
    for use in (lambda: t.phase, client.list, lambda: t.wait_until_min_world(0)):
        with pytest.raises(Permanent, match="closed"):
            use()
    client.close()
