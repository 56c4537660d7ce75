"""The rows, in groups; a group is a function that makes its rows, one after the other."""

from rows import Group

from groups.believed import hit_rates, prefill_seconds
from groups.claims import claims
from groups.coupled import coupled
from groups.load import high_load, low_load
from groups.overload import as_drafted, overload
from groups.peers import peers, peers_alone
from groups.pipeline import pipeline, pipeline_shapes
from groups.placement import placement
from groups.ratio import ratio_sweep
from groups.same import same
from groups.speed import speed
from groups.tiers import promotion

GROUPS: dict[str, Group] = {
    group.__name__.replace("_", "-"): group
    for group in (
        hit_rates, prefill_seconds, placement, ratio_sweep, coupled, claims, low_load, high_load, peers,
        peers_alone, pipeline, pipeline_shapes, overload, as_drafted, promotion, same, speed,
    )
}  # fmt: skip

TOLD = {"peers-alone", "pipeline-shapes"}
"""Groups without a row that is judged, and with many runs: run where they are asked for."""
