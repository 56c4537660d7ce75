"""Nodes whose kubelet is played: for tests of scale and of failures that no real node has on demand.

The Nodes are real objects with real heartbeats, and the real scheduler binds Pods to them; only their
containers are not run.
"""

from e2e.played_kubelet.behaviour import (
    Behaviour,
    Exits,
    ImageMissing,
    NeverReady,
    NodePressure,
    Script,
    obedient,
)
from e2e.played_kubelet.kubelet import PlayedNodes
from e2e.played_kubelet.nodes import NodeShape

__all__ = [
    "Behaviour",
    "Exits",
    "ImageMissing",
    "NeverReady",
    "NodePressure",
    "NodeShape",
    "PlayedNodes",
    "Script",
    "obedient",
]
