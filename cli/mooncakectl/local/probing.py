"""Carries out one probe."""

from __future__ import annotations

import asyncio
import contextlib

import httpx

from mooncakectl.local.containers import ContainerSpec
from mooncakectl.local.machine import Machine
from mooncakectl.local.probes import Action, ExecCommand, HttpGet, TcpSocket


class Prober:
    """Asks containers how they are, the way the kubelet does: no proxy, no certificate checks."""

    def __init__(self, machine: Machine) -> None:
        """Exec probes start their commands on `machine`."""
        self._machine = machine
        # A connection a probe, as the kubelet's: a kept one would say nothing about accepting new ones.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.AsyncClient(verify=False, trust_env=False, limits=limits)

    async def check(self, spec: ContainerSpec, action: Action, timeout_s: float) -> str | None:
        """Carry out the action once; None when healthy, else what was wrong."""
        try:
            async with asyncio.timeout(timeout_s):
                match action:
                    case HttpGet():
                        return await self._http_get(action)
                    case TcpSocket():
                        await _connect(action)
                        return None
                    case ExecCommand():
                        code = await self._machine.run(spec, action.argv, timeout_s)
                        return None if code == 0 else f"command ended with {code}"
        except TimeoutError:
            return f"no answer within {timeout_s:g} s"
        except OSError as error:
            return error.strerror or str(error)

    async def _http_get(self, action: HttpGet) -> str | None:
        try:
            answer = await self._http.get(action.url, headers=dict(action.headers), timeout=None)
        except httpx.HTTPError as error:
            return str(error) or type(error).__name__
        return None if 200 <= answer.status_code < 400 else f"HTTP status {answer.status_code}"

    async def close(self) -> None:
        """Close the HTTP client."""
        await self._http.aclose()


async def _connect(action: TcpSocket) -> None:
    _, writer = await asyncio.open_connection(action.host, action.port)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
