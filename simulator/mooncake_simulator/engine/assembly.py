"""Puts an engine together from its options."""

from __future__ import annotations

from mooncake_simulator.engine.connectors import Connectors
from mooncake_simulator.engine.connectors.base import KvConnector
from mooncake_simulator.engine.connectors.mooncake import MooncakeConnector
from mooncake_simulator.engine.connectors.nixl import NixlConnector
from mooncake_simulator.engine.connectors.store import MooncakeStoreConnector
from mooncake_simulator.engine.core import Engine
from mooncake_simulator.engine.options import ConnectorOptions, EngineOptions


def build(options: EngineOptions) -> Engine:
    """An engine with its connectors, not started yet.

    Raises:
        OptionsError: a connector's configuration cannot be used.
    """
    engine = Engine(options)
    engine.use(Connectors([_connector(engine, one) for one in options.connectors]))
    return engine


def _connector(engine: Engine, options: ConnectorOptions) -> KvConnector:
    if options.name == "MooncakeStoreConnector":
        return MooncakeStoreConnector(engine, options)
    if options.name == "NixlConnector":
        return NixlConnector(engine, options)
    return MooncakeConnector(engine, options)
