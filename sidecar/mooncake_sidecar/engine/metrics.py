"""The sidecar's own metrics, read from it when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mooncake_sidecar.engine.sidecar import Sidecar


class SidecarMetrics(Collector):
    """Collects from one sidecar."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from self._gauges()
        yield from self._counters()

    def _gauges(self) -> Iterator[Metric]:
        sidecar = self._sidecar
        residency, pool, alarms = sidecar.residency, sidecar.pool, sidecar.alarms
        prefetcher = sidecar.prefetcher
        for name, text, value in (
            ("registered", "1 while the engine stands in the registry.", sidecar.instance is not None),
            ("epoch", "Epoch of the engine's cache.", residency.epoch),
            ("draining", "1 while the engine gets no new work.", sidecar.draining),
            ("blocks", "Blocks known of the engine, those in the pool included.", len(residency.mirror)),
            ("index_waiting_keys", "Keys of changes that the index has not got.", residency.waiting_keys),
            ("shared_state_away", "1 while Redis cannot be used.", sidecar.shared_state_away),
            (
                "pool_blocks",
                "Blocks believed to be in the pool that this sidecar asks the master about.",
                pool.blocks if pool else 0,
            ),
            (
                "store_master_away",
                "1 while the store's master does not answer.",
                bool(pool and pool.master_away),
            ),
            (
                "store_client_away",
                "1 while blocks on SSD are not brought to DRAM: the store's client cannot be used.",
                bool(prefetcher and prefetcher.client_away),
            ),
            (
                "engine_kv_leaked",
                "1 while KV memory is in use though no request runs or waits.",
                bool(alarms and alarms.kv_leaked),
            ),
            (
                "engine_publisher_silent",
                "1 while prompts are computed and no KV event was ever published.",
                bool(alarms and alarms.publisher_silent),
            ),
            (
                "engine_metrics_missing",
                "1 while the engine tells no metrics, so that its load is not reported.",
                bool(alarms and alarms.metrics_missing),
            ),
            (
                "engine_never_hits",
                "1 while prompts begin like others that are held and nothing is found in a cache.",
                bool(alarms and alarms.never_hit),
            ),
        ):
            yield GaugeMetricFamily(f"mooncake_sidecar_{name}", text, float(value))

    def _counters(self) -> Iterator[Metric]:
        sidecar = self._sidecar
        residency, stream, pool = sidecar.residency, sidecar.stream, sidecar.pool
        prefetcher = sidecar.prefetcher
        for name, text, value in (
            (
                "messages",
                "Event batches of this life of the engine.",
                stream.messages if stream else 0,
            ),
            ("replays", "Replays asked for in this life of the engine.", stream.gaps if stream else 0),
            ("undecodable_messages", "Event batches that could not be read.", residency.undecodable),
            ("orphan_blocks", "Blocks told of whose parent was unknown.", residency.mirror.orphans),
            ("opaque_blocks", "Blocks told of that tokens do not determine.", residency.mirror.opaque),
            (
                "findable_prompts",
                "Prompts whose beginning was held when they came; of those in the pool a sample.",
                sidecar.findable.seen,
            ),
            ("journal_errors", "Writes of the journal that failed.", residency.journal_errors),
            ("index_batches", "Batches written into the index.", sidecar.writer.batches),
            ("index_refills", "Times that everything was written anew.", sidecar.writer.refills),
            ("pool_blocks_gone", "Blocks that the store's master had no more.", pool.gone if pool else 0),
            (
                "pool_blocks_inherited",
                "Blocks taken over from instances that left, and from an earlier life of this process.",
                pool.succession.inherited if pool else 0,
            ),
            (
                "pool_blocks_promoted",
                "Blocks brought from SSD to DRAM before their turn.",
                prefetcher.brought if prefetcher else 0,
            ),
            (
                "pool_blocks_not_promoted",
                "Blocks that were to be brought and did not come in time: DRAM was full.",
                prefetcher.not_brought if prefetcher else 0,
            ),
            (
                "pool_blocks_kept",
                "Look-ups of blocks that are to stay in DRAM.",
                prefetcher.kept if prefetcher else 0,
            ),
            ("pool_blocks_nameless", "Blocks told of by a shortened hash.", residency.mirror.nameless),
        ):
            yield CounterMetricFamily(f"mooncake_sidecar_{name}", text, float(value))
        # Of the index as a whole, so under its name and not this program's.
        for name, text, value in (
            ("events", "Event batches that went into the index.", stream.messages if stream else 0),
            ("gaps", "Replays asked for: at the start, and for each gap.", stream.gaps if stream else 0),
        ):
            yield CounterMetricFamily(f"mooncake_index_{name}", text, float(value))
