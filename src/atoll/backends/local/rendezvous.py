"""The port and, if needed, the etcd of a local training, held by its supervisor.

A new supervisor of the same training gets the same port and the same data of etcd. Only the
standard library is used here, as everywhere in the supervisor.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.backends.launch import Meeting, meeting_environment
from atoll.backends.local.ports import PortLease, lease_port
from atoll.backends.local.rendezvous_file import read_rendezvous, write_rendezvous
from atoll.core.errors import BackendError
from atoll.core.mesh import key_path, split_endpoint
from atoll.mesh.http import http_status

if TYPE_CHECKING:
    from atoll.backends.local.etcd_server import EtcdServer

ADDRESS = "127.0.0.1"
HEAL_EVERY_S = 1.0
CHECK_EVERY_S = 5.0  # at keys that others may have deleted


class Rendezvous:
    """The rendezvous that `wanted`, a part of the gang document, describes."""

    def __init__(self, directory: Path, wanted: dict[str, Any]) -> None:
        self._directory = directory
        self._wanted = wanted
        self._leases: list[PortLease] = []  # for MASTER_PORT, etcd's clients, etcd's peers
        self._etcd: EtcdServer | None = None
        self._endpoint: str = wanted.get("endpoint", "")  # of a configured etcd
        self._again_at = self._check = 0.0
        self._foreign_writes = 0

    def open(self) -> dict[str, str]:
        """Starts what is needed; returns the environment for ranks. May be repeated, and has to be
        after an OSError."""
        try:
            self._lease()
            self._start_etcd()
            self._put_keys()
        except (BackendError, OSError) as error:
            self._note(error=f"no rendezvous: {error}")
            raise OSError(str(error)) from error
        self._note()
        meeting = Meeting(ADDRESS, self._leases[0].port, etcd=self._endpoint, mesh=self._endpoint)
        env = meeting_environment(self._wanted["backend"], meeting)
        unset = self._wanted.get("unset", ())
        return {name: value for name, value in env.items() if name not in unset}

    def heal(self) -> float | None:
        """Restarts an etcd that died, with its keys and address, and puts keys back that somebody
        else has deleted. Returns after how many seconds to call again."""
        if self._etcd is None:
            return None
        if self._is_etcd_up:
            return self._keep_keys()
        left = self._again_at - time.monotonic()
        if left <= 0:
            self._again_at = time.monotonic() + HEAL_EVERY_S
            with contextlib.suppress(OSError):
                self.open()
                return None
            left = HEAL_EVERY_S
        return left

    def _keep_keys(self) -> float:
        left = self._check - time.monotonic()
        if left > 0:
            return left
        self._check = time.monotonic() + CHECK_EVERY_S
        with contextlib.suppress(OSError):
            address = split_endpoint(self._endpoint)
            assert address is not None
            for key in self._wanted["keys"]:
                if http_status(address, key_path(key), 2.0)[0] == 404:
                    self._put(self._endpoint, key)
                    self._foreign_writes += 1
                    self._note()
        return CHECK_EVERY_S

    @property
    def _is_etcd_up(self) -> bool:
        return self._etcd is not None and self._etcd.process.poll() is None

    def _start_etcd(self) -> None:
        if not self._wanted["etcd"] or self._is_etcd_up:
            return
        # Few trainings need one, and all would wait for the import.
        from atoll.backends.local.etcd_server import start_etcd

        leases = self._leases[1], self._leases[2]
        data = self._directory / "etcd"
        try:
            self._etcd = start_etcd(data, ADDRESS, binary=self._wanted["etcd"], leases=leases)
        except BackendError:
            del self._leases[1:]  # they were released
            raise
        self._endpoint = self._etcd.endpoint

    def _put_keys(self) -> None:
        if self._endpoint:
            for key in self._wanted["keys"]:
                self._put(self._endpoint, key)

    def _lease(self) -> None:
        """Leases the ports of the previous supervisor, whose addresses stay valid, or new ones."""
        before = [*read_rendezvous(self._directory).get("ports", ()), 0, 0, 0]
        count = 3 if self._wanted["etcd"] else 1
        while len(self._leases) < count:
            self._leases.append(lease_port(ADDRESS, before[len(self._leases)]))

    def _put(self, endpoint: str, key: str) -> None:
        address = split_endpoint(endpoint)
        assert address is not None
        code, why = http_status(address, key_path(key), 2.0, "PUT", "value=1")
        if code not in (200, 201):
            raise OSError(f"etcd did not accept {key}: {why}")

    def _note(self, error: str = "") -> None:
        document = {
            "ports": [lease.port for lease in self._leases],
            "etcd": self._endpoint,
            "error": error,
            "foreignWrites": self._foreign_writes,
        }
        with contextlib.suppress(OSError):  # a full disk: the rendezvous works without the file
            write_rendezvous(self._directory, document)
