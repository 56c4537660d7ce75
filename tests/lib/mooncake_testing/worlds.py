"""Small worlds for the Conductor, with round numbers that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncake_core.ledger import InstanceLoad
from mooncake_core.registry import Instance, Role
from mooncake_scheduler.conductor.cost import CostModel, CostModels
from mooncake_scheduler.conductor.model import Ask, InstanceView, Slo, World

ROUND_COSTS = CostModel(
    b_s_per_token=1e-3,
    t0_s=0.020,
    t1_s_per_request=0.001,
    t2_s_per_token=1e-6,
    kv_bytes_per_token=1_000,
    network_bytes_per_s=1e7,
    dram_bytes_per_s=1e8,
    ssd_bytes_per_s=1e6,
)
"""1 ms a prompt token; 0.1 ms a token over the network, 0.01 from DRAM, 1 from SSD."""


class Script:
    """A chance that is written down: its numbers over and over."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = numbers or (0.0,)
        self.drawn = 0

    def random(self) -> float:
        self.drawn += 1
        return self._numbers[(self.drawn - 1) % len(self._numbers)]


def instance(name: str, role: Role, **more: Any) -> Instance:
    """An instance of the model's only revision, which can hand over and fetch from a store."""
    settings: dict[str, Any] = {
        "model": "m",
        "revision": "r1",
        "connector": "MooncakeConnector",
        "fetch": "store",
    }
    return Instance(id=name, role=role, url=f"http://{name}", **{**settings, **more})


def prefill(
    name: str, hbm: int = 0, fetchable: int | None = None, queued_s: float = 0.0, **more: Any
) -> InstanceView:
    """A prefill instance; `more` goes to the view or, where that has no such field, to the instance."""
    view, rest = _split(more)
    return InstanceView(
        instance(name, rest.pop("role", Role.PREFILL), **rest),
        InstanceLoad(queued_s=queued_s, queued=1 if queued_s else 0),
        hbm_tokens=hbm,
        fetchable_tokens=hbm if fetchable is None else fetchable,
        **view,
    )


def decode(
    name: str, batch: int = 0, kv_tokens: int = 0, load: InstanceLoad | None = None, **more: Any
) -> InstanceView:
    """A decode instance; `more` as for `prefill`."""
    view, rest = _split(more)
    return InstanceView(
        instance(name, rest.pop("role", Role.DECODE), **rest),
        load or InstanceLoad(batch=batch, kv_tokens=kv_tokens),
        **view,
    )


def world(
    prefills: Sequence[InstanceView],
    decodes: Sequence[InstanceView] | None = None,
    *,
    now_s: float = 0.0,
    costs: CostModel = ROUND_COSTS,
    ttft_s: float | None = None,
    tbt_s: float | None = None,
    explain: bool = True,
) -> World:
    """A world in which all instances have one cost model; one idle decode instance unless some are given."""
    return World(
        now_s=now_s,
        prefill=prefills,
        decode=[decode("d0")] if decodes is None else decodes,
        cost=CostModels(default=costs),
        slo=Slo(ttft_s, tbt_s),
        explain=explain,
    )


def ask(prompt_tokens: int = 1_000, output_tokens: int = 100, **more: Any) -> Ask:
    """A request."""
    return Ask("q", prompt_tokens, output_tokens, **more)


def _split(more: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    names = {"fetch_ssd_tokens", "inbound_flows", "source_flows", "hbm_tokens", "fetchable_tokens"}
    return {k: v for k, v in more.items() if k in names}, {k: v for k, v in more.items() if k not in names}
