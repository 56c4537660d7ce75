"""The store client of simulated stores: class, methods and answers of Mooncake's Python binding.

A sidecar is told which module to take its client from, this one or `mooncake.store`, and cannot tell the
two apart: calls block the calling thread, several threads may call, and nothing is raised where a master
does not answer.
`tests/engines` holds both to the same exchange.
"""

from __future__ import annotations

import http.client
import logging
import os
import time
from collections.abc import Sequence
from enum import Enum
from typing import Any

import msgspec

from mooncake_simulator.store import calls

LOG = logging.getLogger(__name__)

RPC_FAIL = -900
RPC_TIMEOUT = -901
_RECONNECT_S = 4.3
"""How long a call tries to reach a master whose port is closed before it gives up."""
_PAUSE_S = 0.1


class ReplicaStatus(Enum):
    """What may be done with a replica; numbers as Mooncake's."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


class ReplicaDescriptor:
    """One place in which an object lies."""

    __slots__ = ("_on_ssd", "status")

    def __init__(self, on_ssd: bool) -> None:
        self.status = ReplicaStatus.COMPLETE
        self._on_ssd = on_ssd

    def is_memory_replica(self) -> bool:
        """In the DRAM of a node."""
        return not self._on_ssd

    def is_local_disk_replica(self) -> bool:
        """On the SSD of a node."""
        return self._on_ssd

    def is_disk_replica(self) -> bool:
        """In a shared file system, of which this store has none."""
        return False


class MooncakeDistributedStore:
    """A client that looks keys up and moves no bytes of its own."""

    def __init__(self) -> None:
        self._address = ""
        self._timeout_s = int(os.environ.get("MC_RPC_TIMEOUT_MS", "30000")) / 1000
        self._idle: list[http.client.HTTPConnection] = []

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
        engine: object = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
    ) -> int:
        """Reach the master; 0 when it answers, -1 when it does not.

        Without a master this takes 4.3 s for each of MC_STORE_CLIENT_SETUP_RETRIES (20) attempts. Only
        `master_server_addr` (`host:port`) has a meaning here.
        """
        self._address = master_server_addr
        for _ in range(int(os.environ.get("MC_STORE_CLIENT_SETUP_RETRIES", "20"))):
            if isinstance(self._call("exists", calls.Keys(keys=[])), list):
                return 0
        self._address = ""
        LOG.error("no master answers at %s", master_server_addr)
        return -1

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """Where a key lies; empty where it is unknown or the master does not answer.

        A lookup keeps the key for a lease. The second one of a key that lies on SSD alone brings it to DRAM.
        """
        (place,) = self._places("lookup_one", [key])
        return place

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Where keys lie, in one call; unknown ones are left out, all where the master does not answer."""
        places = self._places("lookup", keys) if keys else []
        return {key: place for key, place in zip(keys, places, strict=True) if place}

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """1 for each key that can be read, else 0; -900 or -901 for all where the master does not answer."""
        if not keys:
            return []
        answer = self._call("exists", calls.Keys(keys=list(keys)))
        return [answer] * len(keys) if isinstance(answer, int) else [int(there) for there in answer]

    def close(self) -> int:
        """Leave the store; 0, also when it is done twice."""
        self._address = ""
        while self._idle:
            self._idle.pop().close()
        return 0

    def _places(self, call: str, keys: Sequence[str]) -> list[list[ReplicaDescriptor]]:
        answer = self._call(call, calls.Keys(keys=list(keys)))
        if isinstance(answer, int):
            return [[] for _ in keys]
        return [[] if place is None else [ReplicaDescriptor(on_ssd=place[1])] for place in answer]

    def _call(self, name: str, value: calls.Keys) -> Any:
        """What the master answers, a list, or the number of what went wrong."""
        if not self._address:
            # The real binding ends its process with a segmentation fault.
            raise RuntimeError("this store was not set up, its setup failed, or it was closed")
        give_up_at_s = time.monotonic() + _RECONNECT_S
        while True:
            try:
                return msgspec.msgpack.decode(self._exchange(f"/rpc/{name}", calls.encode(value)))
            except TimeoutError:
                LOG.error("%s: no answer from %s in %g s", name, self._address, self._timeout_s)
                return RPC_TIMEOUT
            except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
                if time.monotonic() >= give_up_at_s:
                    LOG.error("%s: %s: %s", name, self._address, error or type(error).__name__)
                    return RPC_FAIL
            time.sleep(_PAUSE_S)

    def _exchange(self, path: str, body: bytes) -> bytes:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = http.client.HTTPConnection(self._address, timeout=self._timeout_s)
        try:
            connection.request("POST", path, body, {"content-type": "application/msgpack"})
            response = connection.getresponse()
            answer = response.read()
        except BaseException:
            connection.close()
            raise
        if response.status != 200:
            connection.close()
            raise http.client.HTTPException(f"{response.status} {answer[:200].decode(errors='replace')}")
        self._idle.append(connection)
        return answer
