"""What outlasts a pass: what all clusters share, and what is remembered of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mooncake_operator.control.asking import Inquiry
from mooncake_operator.control.causes import Causes
from mooncake_operator.control.recent import Recent
from mooncake_operator.control.schedulers import Schedulers
from mooncake_operator.control.status import StatusWriter
from mooncake_operator.kube.applier import Applier
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.events import EventRecorder
from mooncake_operator.planning import Images
from mooncake_operator.planning.actions import Finding


@dataclass(frozen=True, slots=True)
class Tools:
    """What passes over all clusters work with."""

    client: Client
    schedulers: Schedulers
    events: EventRecorder
    status: StatusWriter
    images: Images
    measure_s: float
    """How long a measurement stands in a status at least."""


@dataclass(slots=True)
class Memory:
    """What is kept of a cluster between passes; losing it costs a few requests, nothing else."""

    applier: Applier
    inquiry: Inquiry
    causes: Causes
    recent: Recent
    refusals: Mapping[str, Sequence[Finding]] = field(default_factory=dict)
    """What of the last plan could not be carried out; see `Execution`."""
