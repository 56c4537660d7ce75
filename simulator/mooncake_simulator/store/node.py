"""A store node: lends memory to the master, carries bytes at the speed of its NIC and SSD."""

from __future__ import annotations

import asyncio
import logging
import uuid

from mooncake_core.profiles import Profile
from mooncake_simulator.engine.clock import ModelClock
from mooncake_simulator.engine.http_client import CallError, HttpClient
from mooncake_simulator.engine.http_server import Exchange, HttpServer, Request
from mooncake_simulator.engine.links import SharedLink
from mooncake_simulator.store import calls

LOG = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
PROMOTIONS_EVERY_S = 1.0
"""Model seconds between two times that a node asks what to bring from its SSD."""
_LEAST_PAUSE_S = 0.2
"""Wall seconds: asking more often would cost more than it tells, however fast model time runs."""
PROMOTED_TOGETHER = 16
"""Objects that one call to the master tells of: with one call each, calls would take longer than the SSD."""


class Node:
    """One segment and its links. Mounts again whenever the master does not know it (any more)."""

    def __init__(
        self,
        master_address: str,
        *,
        capacity_bytes: int,
        ssd_capacity_bytes: int,
        profile: Profile,
        time_scale: float,
    ) -> None:
        clock = ModelClock(time_scale)
        self.name = ""
        self.client_id = str(uuid.uuid4())
        self.mounted = False
        self._capacity_bytes = capacity_bytes
        self._ssd_capacity_bytes = ssd_capacity_bytes
        self._master = HttpClient(f"http://{master_address}", timeout_s=3)
        self._nic = SharedLink(profile.network_bytes_per_s, clock.now_s, time_scale)
        self._ssd = SharedLink(profile.ssd_bytes_per_s, clock.now_s, time_scale)
        self._data = HttpServer(self._serve_data)
        self._http = HttpServer(self._serve_http)
        self._promotions_every_s = max(_LEAST_PAUSE_S, PROMOTIONS_EVERY_S / time_scale)
        self._tasks: list[asyncio.Task[None]] = []
        self._carried_bytes = 0

    async def start(self, host: str, port: int, http_port: int, advertised_host: str) -> tuple[int, int]:
        """Listen and begin to mount; returns the ports.

        Raises:
            OSError: an address is in use.
        """
        ports = (await self._data.start(host, port), await self._http.start(host, http_port))
        self.name = f"{advertised_host}:{ports[0]}"
        self._tasks.append(asyncio.get_running_loop().create_task(self._keep_mounted()))
        if self._ssd_capacity_bytes:
            # Beside the heartbeat, which must not wait for an SSD: a node that is silent too long is lost.
            self._tasks.append(asyncio.get_running_loop().create_task(self._keep_promoting()))
        return ports

    async def stop(self) -> None:
        """Unmount, if the master can be reached, and stop listening."""
        for task in self._tasks:
            task.cancel()
        if self.mounted:
            try:
                await self._master.call("/rpc/unmount", calls.Unmount(name=self.name))
            except (CallError, OSError, TimeoutError) as error:
                LOG.warning("not unmounted: %s", error)
        self._master.close()
        await self._data.stop()
        await self._http.stop()

    async def _keep_mounted(self) -> None:
        while True:
            try:
                if self.mounted:
                    beat = calls.Heartbeat(client_id=self.client_id)
                    self.mounted = bool(await self._master.call("/rpc/heartbeat", beat))
                if not self.mounted:
                    await self._mount()
            except (CallError, OSError, TimeoutError) as error:
                LOG.warning("master: %s", error or type(error).__name__)
            await asyncio.sleep(HEARTBEAT_S)

    async def _keep_promoting(self) -> None:
        while True:
            await asyncio.sleep(self._promotions_every_s)
            try:
                if self.mounted:
                    await self._promote()
            except (CallError, OSError, TimeoutError) as error:
                LOG.warning("promotions given up: %s", error or type(error).__name__)

    async def _promote(self) -> None:
        wanted = await self._master.call("/rpc/promotions", calls.Heartbeat(client_id=self.client_id))
        assert isinstance(wanted, list)
        for first in range(0, len(wanted), PROMOTED_TOGETHER):
            some = wanted[first : first + PROMOTED_TOGETHER]
            await self._ssd.carry(sum(size for _, size in some))
            told = calls.Promoted(client_id=self.client_id, keys=[key for key, _ in some])
            await self._master.call("/rpc/promoted", told)

    async def _mount(self) -> None:
        mount = calls.Mount(
            name=self.name,
            client_id=self.client_id,
            capacity_bytes=self._capacity_bytes,
            ssd_capacity_bytes=self._ssd_capacity_bytes,
        )
        await self._master.call("/rpc/mount", mount)
        self.mounted = True
        LOG.info("segment %s mounted", self.name)

    async def _serve_data(self, request: Request, exchange: Exchange) -> None:
        if (request.method, request.path) != ("POST", "/transfer"):
            exchange.respond(b"", 404)
            return
        try:
            transfer = calls.decode(request.body, calls.Transfer)
        except calls.CallFormatError as error:
            exchange.json({"error": str(error)}, 400)
            return
        ways = [self._nic.carry(transfer.size_bytes)]
        if transfer.ssd:
            ways.append(self._ssd.carry(transfer.size_bytes))
        await asyncio.gather(*ways)
        self._carried_bytes += transfer.size_bytes
        exchange.respond(calls.encode(True), 200, "application/msgpack")

    async def _serve_http(self, request: Request, exchange: Exchange) -> None:
        if (request.method, request.path) == ("GET", "/health"):
            exchange.json({"status": "ok" if self.mounted else "unmounted"}, 200 if self.mounted else 503)
        elif (request.method, request.path) == ("GET", "/metrics"):
            text = (
                "# TYPE mooncake_transfer_read_bytes counter\n"
                f"mooncake_transfer_read_bytes {self._carried_bytes}\n"
                "# TYPE mooncake_client_flows gauge\n"
                f"mooncake_client_flows {self._nic.flows}\n"
            )
            exchange.respond(text.encode(), 200, "text/plain; version=0.0.4")
        else:
            exchange.respond(b"", 404)
