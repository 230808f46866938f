"""What may run beside the ranks of a training: its etcd, the agents of its mesh, its link bench.

Their command lines, rendered in one place for every backend. Pure. A backend decides where they
run. Slow imports are avoided: the supervisor of local ranks loads this file.
"""

from __future__ import annotations

from collections.abc import Iterable


def etcd_arguments(
    data_dir: object, *, listen: str, advertise: str, peer: str, origin: str, hosts: Iterable[str]
) -> list[str]:
    """An etcd with the v2 API. Its keys are written again if they are lost.

    `hosts` are the names under which requests may address it, and `origin` is the only web page
    that may: no page in somebody's browser may read or write it, by its own name or by another's.
    """
    return [
        f"--data-dir={data_dir}",
        "--enable-v2=true",
        f"--listen-client-urls={listen}",
        f"--advertise-client-urls={advertise}",
        f"--listen-peer-urls={peer}",
        f"--cors={origin}",
        f"--host-whitelist={','.join(hosts)}",
        # Its data matters only while the training runs, and a power cut ends that as well.
        "--unsafe-no-fsync",
    ]


def bench_command(python: str, *arguments: str, limit_s: float) -> list[str]:
    """The link bench: `loopback` measures a host with itself, `pair` one with another."""
    return [python, "-m", "atoll.bench.netbench", *arguments, f"--limit={limit_s:g}"]


def agent_command(python: str, host: str, address: str, *, etcd: str, folder: str) -> list[str]:
    """The agent of one rank: it reports in `folder` of the etcd which other agents it reaches."""
    arguments = (f"--host={host}", f"--address={address}", f"--etcd={etcd}", f"--folder={folder}")
    return [python, "-m", "atoll.mesh.fabric", *arguments]
