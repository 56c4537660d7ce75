"""MooncakeConnector: bootstrap server, transfer ids, and its bad manners.

Protocol and rules: vLLM 0.32 `kv_connector/v1/mooncake/`, and engines.md §4 of the project's research (seen
on real engines). Bad manners kept on purpose, since a router must live with them: a prefill that ends by
anything but length drops its KV and the decode engine waits out its timeout; a request that has a
transfer_id but no remote_engine_id hangs and kills the engine when its client leaves; a dead prefill engine
is noticed only after the abort timeout.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any
from urllib.parse import urlsplit

import msgspec

from mooncake_simulator.engine.connectors.base import EngineHandle, KvConnector
from mooncake_simulator.engine.connectors.receiving import PeerLostError, PullError, let_go, pull
from mooncake_simulator.engine.connectors.sending import Staging
from mooncake_simulator.engine.connectors.side_channel import Channel, ChannelServer
from mooncake_simulator.engine.http_client import CallError, HttpClient
from mooncake_simulator.engine.http_server import Exchange, HttpServer, Request
from mooncake_simulator.engine.openai_requests import ApiError, decode_body
from mooncake_simulator.engine.options import ConnectorOptions
from mooncake_simulator.engine.sequence import Sequence

LOG = logging.getLogger(__name__)

_REMOTE_FIELDS = ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")
_BOOTSTRAP_TIMEOUT_S = 0.4


class _BootstrapEntry(msgspec.Struct):
    engine_id: str
    worker_addr: dict[str, dict[str, str]]


class _RegistrationError(Exception):
    """A worker that contradicts one that is registered."""


class MooncakeConnector(KvConnector):
    """Hand-over by transfer id; the prefill engine pushes when the decode engine has announced itself."""

    def __init__(self, engine: EngineHandle, options: ConnectorOptions) -> None:
        super().__init__(engine)
        self.engine_id = uuid.uuid4().hex
        """New with every process: a router asks `/query` again after a restart."""
        self._options = options
        self._staging = Staging(
            engine, self.engine_id, engine.options.abort_timeout_s, waits_for_unknown=True
        )
        self._channels = ChannelServer(self._staging.serve)
        self._bootstrap = HttpServer(self._serve_bootstrap)
        self._workers: dict[str, dict[str, Any]] = {}
        self._peers: dict[str, tuple[str, int]] = {}
        self._hung: set[str] = set()

    async def start(self) -> None:
        if not self._options.produces:
            return
        host = self.engine.options.host_ip
        port = await self._channels.start(host, 0)
        await self._bootstrap.start(self.engine.options.host, self.engine.options.bootstrap_port)
        self._register(0, self.engine_id, 0, 0, f"tcp://{host}:{port}")

    async def stop(self) -> None:
        await self._channels.stop()
        await self._bootstrap.stop()

    def matched_tokens(self, sequence: Sequence, local_tokens: int) -> int | None:
        params = sequence.transfer
        if not self._options.consumes or not params or not params.get("do_remote_prefill"):
            return 0
        return max(0, sequence.prompt_tokens - local_tokens)

    def load(self, sequence: Sequence) -> None:
        params = sequence.transfer or {}
        # Only one transfer a request: after a preemption it computes for itself.
        params["do_remote_prefill"] = False
        if _missing(params):
            LOG.warning("%s: Got invalid KVTransferParams: %s", sequence.id, params)
            self._hung.add(sequence.id)
            return
        self.engine.spawn(self._receive(sequence, params))

    def keeps_blocks(self, sequence: Sequence, finish_reason: str) -> bool:
        params = sequence.transfer
        if not self._options.produces or not params or not params.get("do_remote_decode"):
            return False
        transfer = params.get("transfer_id")
        if not transfer or finish_reason != "length":
            return False
        self._staging.stage(str(transfer), sequence.id, sequence.prompt_tokens)
        return True

    def finished(self, sequence: Sequence, finish_reason: str) -> None:
        if sequence.id in self._hung:
            self.engine.die("KeyError: 'remote_engine_id'")
        params = sequence.transfer or {}
        if self._options.consumes and params.get("do_remote_prefill") and not _missing(params):
            # It ended before its KV was asked for: the prefill engine is told, so that it frees the blocks.
            params["do_remote_prefill"] = False
            self.engine.spawn(self._let_go(params))

    async def _receive(self, sequence: Sequence, params: dict[str, Any]) -> None:
        started = asyncio.get_running_loop().time()
        tokens = sequence.prompt_tokens - sequence.local_tokens
        policy = self._options.load_failure_policy
        try:
            host, port = await self._find_peer(
                str(params["remote_engine_id"]), str(params["remote_bootstrap_addr"])
            )
            channel = await self._connect(host, port)
        except (CallError, PullError, OSError, TimeoutError, ValueError) as error:
            self.engine.load_failed(sequence, str(error) or type(error).__name__, policy)
            return
        try:
            if channel is None:
                raise PeerLostError(f"{host}:{port} does not answer any more")
            await pull(
                self.engine, channel, str(params["remote_engine_id"]), str(params["transfer_id"]), tokens
            )
        except PullError as error:
            self.engine.load_failed(sequence, str(error), policy)
        except PeerLostError as error:
            # Seen on vLLM: the loss of a peer that was known is not noticed, only waited out.
            options = self.engine.options
            patience_s = options.abort_timeout_s + options.dead_peer_grace_s
            await asyncio.sleep(max(0.0, started + patience_s - asyncio.get_running_loop().time()))
            self._peers.pop(str(params["remote_engine_id"]), None)
            self.engine.load_failed(sequence, str(error), policy)
        else:
            sequence.received = True
            self.engine.metrics.cached_by_source["p2p"].inc(tokens)
            self.engine.loaded(sequence, tokens)
        finally:
            if channel is not None:
                channel.close()

    async def _let_go(self, params: dict[str, Any]) -> None:
        engine_id, transfer = str(params["remote_engine_id"]), str(params["transfer_id"])
        try:
            host, port = await self._find_peer(engine_id, str(params["remote_bootstrap_addr"]))
            await let_go(host, port, engine_id, transfer)
        except (CallError, PullError, PeerLostError, OSError, TimeoutError, ValueError) as error:
            LOG.warning("%s: the prefill engine was not told: %s", transfer, error)

    async def _connect(self, host: str, port: int) -> Channel | None:
        try:
            return await Channel.connect(host, port)
        except OSError:
            return None

    async def _find_peer(self, engine_id: str, bootstrap: str) -> tuple[str, int]:
        known = self._peers.get(engine_id)
        if known is not None:
            return known
        client = HttpClient(
            bootstrap if "://" in bootstrap else f"http://{bootstrap}", timeout_s=_BOOTSTRAP_TIMEOUT_S
        )
        try:
            answer = await client.get_json("/query")
        finally:
            client.close()
        try:
            entries = msgspec.convert(answer, dict[str, _BootstrapEntry])
        except msgspec.ValidationError as error:
            raise ValueError(f"{bootstrap}/query: {error}") from error
        for entry in entries.values():
            if entry.engine_id == engine_id:
                address = urlsplit(entry.worker_addr.get("0", {}).get("0", ""))
                if address.hostname is None or address.port is None:
                    raise ValueError(f"{bootstrap}/query: no address of rank 0 in {entry.worker_addr}")
                self._peers[engine_id] = (address.hostname, address.port)
                return self._peers[engine_id]
        raise PullError(f"engine {engine_id} is not registered at {bootstrap}")

    def _register(self, dp_rank: int, engine_id: str, tp_rank: int, pp_rank: int, address: str) -> None:
        entry = self._workers.setdefault(str(dp_rank), {"engine_id": engine_id, "worker_addr": {}})
        if entry["engine_id"] != engine_id:
            raise _RegistrationError(
                f"Engine ID mismatch for dp_rank={dp_rank}: expected {entry['engine_id']}, got {engine_id}"
            )
        ranks = entry["worker_addr"].setdefault(str(tp_rank), {})
        known = ranks.setdefault(str(pp_rank), address)
        if known != address:
            raise _RegistrationError(
                f"Worker with dp_rank={dp_rank}, tp_rank={tp_rank}, pp_rank={pp_rank} is already registered "
                f"at {known}, but still want to register at {address}"
            )

    async def _serve_bootstrap(self, request: Request, exchange: Exchange) -> None:
        if (request.method, request.path) == ("GET", "/query"):
            exchange.json(self._workers)
        elif (request.method, request.path) == ("POST", "/register"):
            try:
                body = decode_body(request.body)
                self._register(
                    int(body["dp_rank"]),
                    str(body["engine_id"]),
                    int(body["tp_rank"]),
                    int(body["pp_rank"]),
                    str(body["addr"]),
                )
            except _RegistrationError as error:
                exchange.json({"detail": str(error)}, 400)
            except (ApiError, KeyError, ValueError) as error:
                exchange.json({"detail": f"invalid registration: {error}"}, 422)
            else:
                exchange.json({"status": "ok"})
        else:
            exchange.json({"detail": "Not Found"}, 404)


def _missing(params: dict[str, Any]) -> bool:
    return any(params.get(name) is None for name in _REMOTE_FIELDS)
