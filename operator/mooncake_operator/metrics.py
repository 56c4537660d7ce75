"""What the operator says of itself on `/metrics`; names follow controller-runtime's."""

from __future__ import annotations

import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

_PASS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_WAIT_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300)


class Metrics:
    """All metrics of one operator, in a registry of its own."""

    def __init__(self) -> None:
        """Make them."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self._passes()
        self._queue()
        self._kubernetes()

    def _passes(self) -> None:
        made = self.registry
        self.reconciles = Counter("mooncake_reconcile", "Passes by how they ended", ["result"], registry=made)
        self.reconcile_errors = Counter("mooncake_reconcile_errors", "Passes that failed", registry=made)
        self.reconcile_s = Histogram(
            "mooncake_reconcile_duration_seconds", "How long passes took", buckets=_PASS_S, registry=made
        )
        self.drift_corrected = Counter(
            "mooncake_drift_corrected",
            "Objects put back after a foreign change",
            ["kind"],
            registry=made,
        )
        self.leader = Gauge("mooncake_leader", "1 while this operator holds the Lease", registry=made)

    def _queue(self) -> None:
        made = self.registry
        self.queue_depth = Gauge("mooncake_workqueue_depth", "Keys due and not worked on", registry=made)
        self.queue_active = Gauge("mooncake_workqueue_active", "Keys being worked on", registry=made)
        self.queue_oldest_s = Gauge(
            "mooncake_workqueue_oldest_key_seconds", "For how long the oldest due key waits", registry=made
        )
        self.queue_adds = Counter("mooncake_workqueue_adds", "Wishes for keys", registry=made)
        self.queue_retries = Counter("mooncake_workqueue_retries", "Keys that failed", registry=made)
        self.queue_latency_s = Histogram(
            "mooncake_workqueue_latency_seconds", "How long keys were due", buckets=_WAIT_S, registry=made
        )

    def _kubernetes(self) -> None:
        made = self.registry
        self.watch_last_event_s = Gauge(
            "mooncake_watch_last_event_timestamp_seconds", "When it last told of one", ["kind"], registry=made
        )
        self.watch_restarts = Counter("mooncake_watch_restarts", "Watching began anew", registry=made)
        self.resync_failures = Gauge("mooncake_resync_failures", "Failed resyncs in a row", registry=made)
        self.requests = Counter(
            "mooncake_kube_requests",
            "Requests to the API server",
            ["verb", "resource", "code"],
            registry=made,
        )
        self.events = Counter(
            "mooncake_kube_events", "Events for users, by what became of them", ["result"], registry=made
        )
        self.request_s = Histogram(
            "mooncake_kube_request_duration_seconds", "How long requests took", ["verb"], registry=made
        )

    def observe_pass(self, result: str, seconds: float) -> None:
        """Count a pass."""
        self.reconciles.labels(result).inc()
        self.reconcile_s.observe(seconds)
        if result == "error":
            self.reconcile_errors.inc()

    def observe_request(self, verb: str, plural: str, status: int, seconds: float) -> None:
        """Count a request; status 0 = no answer."""
        self.requests.labels(verb, plural, str(status or "none")).inc()
        self.request_s.labels(verb).observe(seconds)

    def observe_event(self, result: str) -> None:
        """Count an Event: `posted`, `dropped` (too many of one object) or `failed`."""
        self.events.labels(result).inc()

    def serve(self, address: str, port: int) -> tuple[WSGIServer, threading.Thread]:
        """Answer on a port of its own, in a thread.

        Raises:
            OSError: the port is taken.
        """
        return start_http_server(port, addr=address, registry=self.registry)
