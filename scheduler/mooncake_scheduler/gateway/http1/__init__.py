"""HTTP/1.1 at byte level: a server protocol and pooled client connections on httptools (ADR 0013)."""

from mooncake_scheduler.gateway.http1.client import Call, Fault, FaultKind, Receiver
from mooncake_scheduler.gateway.http1.exchange import Exchange
from mooncake_scheduler.gateway.http1.reading import ServerLimits
from mooncake_scheduler.gateway.http1.server import HttpServer
from mooncake_scheduler.gateway.http1.upstream import Upstream

__all__ = ["Call", "Exchange", "Fault", "FaultKind", "HttpServer", "Receiver", "ServerLimits", "Upstream"]
