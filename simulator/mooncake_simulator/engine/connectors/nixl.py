"""NixlConnector: the prefill engine's answer says where its blocks are, the decode engine reads them.

Protocol: vLLM 0.32 `kv_connector/v1/nixl/`, engines.md §5. Blocks are kept for a lease that the decode
engine's heartbeats extend while its request waits there.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

from prometheus_client import Counter, Histogram

from mooncake_simulator.engine.connectors.base import EngineHandle, KvConnector
from mooncake_simulator.engine.connectors.receiving import PeerLostError, PullError, let_go, pull
from mooncake_simulator.engine.connectors.sending import Staging
from mooncake_simulator.engine.connectors.side_channel import Channel, ChannelServer, Touch
from mooncake_simulator.engine.options import ConnectorOptions
from mooncake_simulator.engine.sequence import Sequence, State

LOG = logging.getLogger(__name__)

_HEARTBEAT_S = 5.0
_REMOTE_FIELDS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class NixlMetrics:
    """`vllm:nixl_*`."""

    def __init__(self, engine: EngineHandle) -> None:
        registry = engine.metrics.registry
        labels = {"model_name": engine.options.served_model_names[0], "engine": "0"}
        names = tuple(labels)
        self.seconds = Histogram(
            "vllm:nixl_xfer_time_seconds", "Transfer duration.", names, registry=registry
        ).labels(**labels)
        self.bytes = Histogram(
            "vllm:nixl_bytes_transferred",
            "Bytes of a transfer.",
            names,
            registry=registry,
            buckets=[2.0 ** (10 + power) for power in range(0, 25, 2)],
        ).labels(**labels)
        self.failed = Counter(
            "vllm:nixl_num_failed_transfers", "Failed transfers.", names, registry=registry
        ).labels(**labels)
        self.expired = Counter(
            "vllm:nixl_num_kv_expired_reqs", "Requests whose KV nobody read.", names, registry=registry
        ).labels(**labels)


class NixlConnector(KvConnector):
    """Hand-over by pull. Which side it is on is said by each request."""

    def __init__(self, engine: EngineHandle, options: ConnectorOptions) -> None:
        super().__init__(engine)
        self.engine_id = str(uuid.uuid4())
        self._options = options
        self._metrics = NixlMetrics(engine)
        lease_s = float(options.extra.get("kv_lease_duration", 30))
        self._staging = Staging(
            engine, self.engine_id, lease_s, waits_for_unknown=False, on_expiry=self._metrics.expired.inc
        )
        self._channels = ChannelServer(self._staging.serve)

    async def start(self) -> None:
        options = self.engine.options
        await self._channels.start(options.nixl_host, options.nixl_port)

    async def stop(self) -> None:
        await self._channels.stop()

    def submitted(self, sequence: Sequence) -> None:
        params = sequence.transfer
        if params and params.get("do_remote_prefill") and not _missing(params):
            self.engine.spawn(self._keep_alive(sequence, params))

    def matched_tokens(self, sequence: Sequence, local_tokens: int) -> int | None:
        params = sequence.transfer
        if not params or not params.get("do_remote_prefill"):
            return 0
        if _missing(params):
            LOG.warning("%s: Got invalid KVTransferParams: %s", sequence.id, params)
            params["do_remote_prefill"] = False
            return 0
        return max(0, sequence.prompt_tokens - local_tokens)

    def load(self, sequence: Sequence) -> None:
        params = sequence.transfer or {}
        params["do_remote_prefill"] = False
        self.engine.spawn(self._receive(sequence, params))

    def keeps_blocks(self, sequence: Sequence, finish_reason: str) -> bool:
        params = sequence.transfer
        if not params or not params.get("do_remote_decode") or finish_reason not in ("length", "stop"):
            return False
        self._staging.stage(sequence.id, sequence.id, sequence.prompt_tokens)
        options = self.engine.options
        blocks = -(-sequence.prompt_tokens // options.block_size)
        sequence.transfer_answer = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [sequence.blocks[:blocks]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": sequence.id,
            "remote_host": options.nixl_host,
            "remote_port": options.nixl_port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": sequence.prompt_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": max(0, sequence.cached_tokens),
        }
        return True

    def finished(self, sequence: Sequence, finish_reason: str) -> None:
        params = sequence.transfer or {}
        if params.get("do_remote_prefill") and not _missing(params):
            params["do_remote_prefill"] = False
            self.engine.spawn(self._let_go(params))

    async def _let_go(self, params: dict[str, Any]) -> None:
        host, request_id = str(params["remote_host"]), str(params["remote_request_id"])
        try:
            await let_go(host, int(params["remote_port"]), str(params["remote_engine_id"]), request_id)
        except (PullError, PeerLostError, OSError, ValueError) as error:
            LOG.warning("%s: the prefill engine was not told: %s", request_id, error)

    async def _keep_alive(self, sequence: Sequence, params: dict[str, Any]) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            if sequence.state is not State.WAITING:
                return
            try:
                channel = await Channel.connect(str(params["remote_host"]), int(params["remote_port"]))
                await channel.send(Touch(str(params["remote_request_id"])))
                channel.close()
            except (OSError, ValueError) as error:
                LOG.warning("%s: heartbeat: %s", sequence.id, error)

    async def _receive(self, sequence: Sequence, params: dict[str, Any]) -> None:
        clock = self.engine.clock
        started_s = clock.now_s()
        tokens = sequence.prompt_tokens - sequence.local_tokens
        channel = None
        try:
            channel = await Channel.connect(str(params["remote_host"]), int(params["remote_port"]))
            engine_id, request_id = str(params["remote_engine_id"]), str(params["remote_request_id"])
            await pull(self.engine, channel, engine_id, request_id, tokens)
        except (PullError, PeerLostError, OSError, ValueError) as error:
            self._metrics.failed.inc()
            self.engine.load_failed(sequence, str(error), self._options.load_failure_policy)
        else:
            self._metrics.seconds.observe(clock.now_s() - started_s)
            self._metrics.bytes.observe(tokens * self.engine.options.profile.kv_bytes_per_token)
            self.engine.metrics.cached_by_source["p2p"].inc(tokens)
            sequence.received = True
            self.engine.loaded(sequence, tokens)
        finally:
            if channel is not None:
                channel.close()


def _missing(params: dict[str, Any]) -> bool:
    return any(params.get(name) is None for name in _REMOTE_FIELDS)
