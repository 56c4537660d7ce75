"""The master process: the directory behind an RPC port and an admin port."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mooncake_simulator.engine.http_server import Exchange, HttpServer, Request
from mooncake_simulator.store import calls
from mooncake_simulator.store.admin import Admin
from mooncake_simulator.store.directory import Directory
from mooncake_simulator.store.drain import DrainJobs
from mooncake_simulator.store.metrics import MasterMetrics
from mooncake_simulator.store.objects import Location, PutRefusal, Segment, Tier

LOG = logging.getLogger(__name__)

_REAP_S = 0.5

Place = tuple[str, bool, int] | None


class Master:
    """Answers engines and nodes on one port, people and scrapers on the other."""

    def __init__(self, directory: Directory, now_s: Callable[[], float] = time.monotonic) -> None:
        self.directory = directory
        self.metrics = MasterMetrics()
        self._now_s = now_s
        self._jobs = DrainJobs(directory)
        self._rpc = HttpServer(self._serve_rpc)
        self._admin = HttpServer(Admin(directory, self.metrics, self._jobs))
        self._reaper: asyncio.Task[None] | None = None
        self._calls: Mapping[str, Callable[[bytes], Any]] = {
            "mount": self._mount,
            "unmount": self._unmount,
            "heartbeat": self._heartbeat,
            "put_start": self._put_start,
            "put_end": self._put_end,
            "put_revoke": self._put_revoke,
            "exists": self._exists,
            "get": self._get,
            "lookup": self._lookup,
            "lookup_one": self._lookup_one,
            "promotions": self._promotions,
            "promoted": self._promoted,
            "remove": self._remove,
            "remove_all": self._remove_all,
        }

    async def start(self, host: str, rpc_port: int, metrics_port: int) -> tuple[int, int]:
        """Listen; returns the ports.

        Raises:
            OSError: an address is in use.
        """
        ports = (await self._rpc.start(host, rpc_port), await self._admin.start(host, metrics_port))
        self._reaper = asyncio.get_running_loop().create_task(self._reap())
        return ports

    async def stop(self) -> None:
        """Stop listening."""
        if self._reaper is not None:
            self._reaper.cancel()
        await self._jobs.stop()
        await self._rpc.stop()
        await self._admin.stop()

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(_REAP_S)
            for name in self.directory.expire(self._now_s()):
                LOG.warning("segment %s is lost with all it held: its node is silent", name)

    async def _serve_rpc(self, request: Request, exchange: Exchange) -> None:
        call = self._calls.get(request.path.removeprefix("/rpc/"))
        if request.method != "POST" or call is None:
            exchange.json({"error": f"{request.method} {request.path}: no such call"}, 404)
            return
        try:
            answer = call(request.body)
        except calls.CallFormatError as error:
            exchange.json({"error": str(error)}, 400)
            return
        exchange.respond(calls.encode(answer), 200, "application/msgpack")

    def _mount(self, body: bytes) -> bool:
        mount = calls.decode(body, calls.Mount)
        known = mount.name in self.directory.segments
        self.metrics.called("remount_segment" if known else "mount_segment")
        self.directory.mount(
            Segment(mount.name, mount.client_id, mount.capacity_bytes, mount.ssd_capacity_bytes),
            self._now_s(),
        )
        LOG.info("segment %s: %d bytes", mount.name, mount.capacity_bytes)
        return True

    def _unmount(self, body: bytes) -> int:
        self.metrics.called("unmount_segment")
        return self.directory.unmount(calls.decode(body, calls.Unmount).name)

    def _heartbeat(self, body: bytes) -> bool:
        self.metrics.called("ping")
        return self.directory.heartbeat(calls.decode(body, calls.Heartbeat).client_id, self._now_s())

    def _put_start(self, body: bytes) -> list[str | None]:
        """Answers the segment for each object, None where it is not taken."""
        put = calls.decode(body, calls.PutStart)
        placed = self.directory.put_start(put.objects, self._now_s(), put.preferred)
        refused = [one for one in placed if isinstance(one, PutRefusal)]
        self.metrics.called("batch_put_start", items=len(placed), failed_items=len(refused))
        return [None if isinstance(one, PutRefusal) else one.segment for one in placed]

    def _put_end(self, body: bytes) -> list[bool]:
        done = self.directory.put_end(calls.decode(body, calls.Keys).keys, self._now_s())
        self.metrics.called("batch_put_end", items=len(done), failed_items=done.count(False))
        return done

    def _put_revoke(self, body: bytes) -> bool:
        keys = calls.decode(body, calls.Keys).keys
        self.metrics.called("batch_put_revoke", items=len(keys))
        self.directory.put_revoke(keys)
        return True

    def _exists(self, body: bytes) -> list[bool]:
        keys = calls.decode(body, calls.Keys).keys
        self.metrics.called("batch_exist_key", items=len(keys))
        return self.directory.exists(keys, self._now_s())

    def _get(self, body: bytes) -> list[Place]:
        """Answers (segment, on SSD, bytes) for each key, None where it is not there."""
        found = self.directory.get(calls.decode(body, calls.Keys).keys, self._now_s())
        self.metrics.called("batch_get_replica_list", items=len(found), failed_items=found.count(None))
        return _places(found)

    def _lookup(self, body: bytes) -> list[Place]:
        """Answers as `get`; no bytes are read for it."""
        found = self.directory.lookup(calls.decode(body, calls.Keys).keys, self._now_s())
        self.metrics.called("batch_get_replica_list", items=len(found), failed_items=found.count(None))
        return _places(found)

    def _lookup_one(self, body: bytes) -> list[Place]:
        found = self.directory.lookup(calls.decode(body, calls.Keys).keys[:1], self._now_s())
        self.metrics.called("get_replica_list", failed_items=found.count(None))
        return _places(found)

    def _promotions(self, body: bytes) -> list[tuple[str, int]]:
        """Answers (key, bytes) of what the asking node is to carry."""
        taken = self.directory.take_promotions(calls.decode(body, calls.Heartbeat).client_id)
        return [(stored.key, stored.size_bytes) for stored in taken]

    def _promoted(self, body: bytes) -> list[bool]:
        done = calls.decode(body, calls.Promoted)
        return self.directory.end_promotions(done.client_id, done.keys, self._now_s())

    def _remove(self, body: bytes) -> list[bool]:
        self.metrics.called("remove")
        return [self.directory.remove(key) for key in calls.decode(body, calls.Keys).keys]

    def _remove_all(self, body: bytes) -> int:
        self.metrics.called("remove_all")
        return self.directory.remove_all()


def _places(found: Sequence[Location | None]) -> list[Place]:
    return [None if one is None else (one.segment, one.tier is Tier.SSD, one.size_bytes) for one in found]
