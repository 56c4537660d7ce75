"""KV connectors: hand-over between engines (Mooncake, NIXL) and the shared store."""

from mooncake_simulator.engine.connectors.base import Connectors, EngineHandle, KvConnector

__all__ = ["Connectors", "EngineHandle", "KvConnector"]
