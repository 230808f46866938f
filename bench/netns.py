"""Hosts of one network on one machine: network namespaces joined by bridges, for tests and benches.

Every host has two links: one for the control plane (etcd), and one for the fabric between hosts,
which can be cut, healed and shaped. All traffic stays inside the namespaces.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import Any

CONTROL, FABRIC = "10.201.0", "10.202.0"


class Network:
    """`hosts` namespaces and a hub; use it with `with`. Needs root and iproute2."""

    def __init__(self, hosts: int, tag: str = "") -> None:
        self._tag = f"at{os.getpid() % 100000}{tag}"
        self._made: list[str] = []
        self.hosts = [f"host-{at}" for at in range(1, hosts + 1)]
        self.hub_address = f"{CONTROL}.254"

    @staticmethod
    def why_not() -> str:
        """Why there can be no namespaces here; empty if there can."""
        probe = f"at{os.getpid() % 100000}probe"
        try:
            ip("netns", "add", probe)
        except FileNotFoundError:
            return "no `ip` command (Debian package iproute2)"
        except subprocess.CalledProcessError as error:
            return f"network namespaces are not allowed here: {error.stderr.strip()}"
        ip("netns", "del", probe)
        return ""

    def __enter__(self) -> Network:
        try:
            self._make("hub")
            for bridge, net in (("ctl", CONTROL), ("fab", FABRIC)):
                self._in("hub", "link", "add", bridge, "type", "bridge")
                self._in("hub", "addr", "add", f"{net}.254/24", "dev", bridge)
                self._in("hub", "link", "set", bridge, "up")
            for at, host in enumerate(self.hosts, 1):
                self._make(host)
                for bridge, net in (("ctl", CONTROL), ("fab", FABRIC)):
                    self._join(host, f"{bridge}{at}", bridge, f"{net}.{at}/24")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for space in reversed(self._made):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", space)
        self._made.clear()

    def _make(self, name: str) -> None:
        ip("netns", "add", self.space(name))
        self._made.append(self.space(name))
        self._in(name, "link", "set", "lo", "up")

    def _join(self, host: str, port: str, bridge: str, address: str) -> None:
        ip("link", "add", "tmp", "netns", self.space(host), "type", "veth",
           "peer", "name", port, "netns", self.space("hub"))  # fmt: skip
        self._in(host, "link", "set", "tmp", "name", bridge)
        self._in(host, "addr", "add", address, "dev", bridge)
        self._in(host, "link", "set", bridge, "up")
        self._in("hub", "link", "set", port, "master", bridge, "up")

    def space(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def address(self, host: str) -> str:
        return f"{FABRIC}.{self.hosts.index(host) + 1}"

    def cut_host(self, host: str) -> None:
        """Its fabric link is dead: packets to and from it vanish without a word."""
        self._in("hub", "link", "set", f"fab{self.hosts.index(host) + 1}", "down")

    def heal_host(self, host: str) -> None:
        self._in("hub", "link", "set", f"fab{self.hosts.index(host) + 1}", "up")

    def cut_pair(self, a: str, b: str) -> None:
        """These two, and only these two, cannot send to each other."""
        for one, other in ((a, b), (b, a)):
            self._in(one, "route", "add", "blackhole", f"{self.address(other)}/32")

    def heal_pair(self, a: str, b: str) -> None:
        for one, other in ((a, b), (b, a)):
            self._in(one, "route", "del", "blackhole", f"{self.address(other)}/32")

    def shape(self, host: str, *qdisc: str) -> None:
        """tc's words for what leaves the host, such as `tbf rate 200mbit burst 64k latency 50ms`"""
        subprocess.run(
            ["tc", "-n", self.space(host), "qdisc", "replace", "dev", "fab", "root", *qdisc],
            check=True, capture_output=True, text=True,
        )  # fmt: skip

    def popen(self, name: str, *command: str, **more: Any) -> subprocess.Popen[str]:
        """A program on that host, or on the hub."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.space(name), *command], text=True, **more
        )

    def _in(self, name: str, *words: str) -> None:
        ip("-n", self.space(name), *words)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
