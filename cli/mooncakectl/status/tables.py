"""A cluster's state as tables for a terminal; pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mooncakectl.local.runtime import PodStatus
from mooncakectl.status.snapshot import InstanceRow, LatencyRow, Snapshot
from mooncakectl.status.stores import StoreRow

_STATE_STYLES = {"ready": "green", "draining": "yellow", "unreachable": "red"}
_UNKNOWN = "–"


def snapshot_tables(snapshot: Snapshot, pods: Sequence[PodStatus] = ()) -> RenderableType:
    """Everything: instances, Pods that are none (or not ready yet), and the cluster's figures."""
    parts: list[RenderableType] = [_instances(snapshot.instances)]
    known = {row.id for row in snapshot.instances}
    others = [pod for pod in pods if not pod.ready or (pod.name not in known and pod.restarts)]
    if others:
        parts += [Text(), _pods(others)]
    parts += [Text(), _figures(snapshot)]
    parts += [Text(problem, style="yellow") for problem in snapshot.problems]
    return Group(*parts)


def _instances(rows: Sequence[InstanceRow]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    # Where all does not fit, names are folded: numbers that are cut are wrong ones.
    table.add_column("INSTANCE", overflow="fold")
    for heading in ("ROLE", "STATE"):
        table.add_column(heading, no_wrap=True)
    for heading in ("REQS", "QUEUE", "BATCH", "KV", "HITS"):
        table.add_column(heading, justify="right", no_wrap=True)
    if any(row.conditions for row in rows):
        table.add_column("CONDITIONS", style="yellow")
    for row in rows:
        table.add_row(
            row.id,
            row.role,
            Text(row.state, style=_STATE_STYLES.get(row.state, "")),
            str(row.requests),
            _number(row.queued_s, "{:.2f} s"),
            _number(row.batch, "{:.0f}"),
            _percent(row.kv_share),
            _percent(row.token_hit_rate),
            *([", ".join(row.conditions)] if row.conditions else []),
        )
    if not rows:
        table.add_row(Text("none yet", style="dim"))
    return table


def _pods(pods: Sequence[PodStatus]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("POD", "READY", "RESTARTS", "WHY"):
        table.add_column(heading)
    for pod in pods:
        ready = Text("yes", style="green") if pod.ready else Text("no", style="yellow")
        table.add_row(pod.name, ready, str(pod.restarts), pod.message)
    return table


def _figures(snapshot: Snapshot) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("TTFT", _latency(snapshot.ttft, scale=1, unit="s"))
    table.add_row("TBT", _latency(snapshot.tbt, scale=1000, unit="ms"))
    table.add_row("hit rate", f"{_percent(snapshot.token_hit_rate)} of prompt tokens")
    for store in snapshot.stores:
        table.add_row(f"store {store.id}", _fill(store))
    refused = ", ".join(f"{reason} {count}" for reason, count in sorted(snapshot.refused.items()) if count)
    total = f"{sum(snapshot.refused.values())}" + (f" ({refused})" if refused else "")
    ended = f"{snapshot.completed} completed, {snapshot.failed} failed"
    table.add_row("requests", f"{snapshot.admitted} admitted, {total} refused; {ended}")
    return table


def _fill(store: StoreRow) -> str:
    if store.dram_bytes is None:
        return "its master cannot be asked from here"
    parts = [_part(store.dram_bytes, store.dram_capacity_bytes, "memory")]
    if store.ssd_capacity_bytes:
        parts.append(_part(store.ssd_bytes, store.ssd_capacity_bytes, "SSD"))
    blocks = "" if store.blocks is None else f"; {store.blocks:,} blocks"
    return ", ".join(parts) + blocks


def _part(used_bytes: float | None, capacity_bytes: float | None, what: str) -> str:
    share = used_bytes / capacity_bytes if used_bytes is not None and capacity_bytes else None
    return f"{_percent(share)} of {_size(capacity_bytes)} {what}"


def _size(size_bytes: float | None) -> str:
    if size_bytes is None:
        return _UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size_bytes < 1024 or unit == "TiB":
            break
        size_bytes /= 1024
    return f"{size_bytes:,.4g} {unit}"


def _latency(row: LatencyRow, *, scale: float, unit: str) -> Text:
    def figure(seconds: float | None) -> str:
        return _number(None if seconds is None else seconds * scale, "{:,.2f} " + unit)

    text = Text(f"P50 {figure(row.p50_s)}  P90 {figure(row.p90_s)}")
    if row.target_s is not None:
        text.append(f"  SLO P{row.percentile} {figure(row.target_s)}", style="dim")
        if (held := row.is_held) is not None:
            text.append("  met" if held else "  missed", style="green" if held else "red")
    return text


def _number(value: float | None, form: str) -> str:
    return _UNKNOWN if value is None else form.format(value)


def _percent(share: float | None) -> str:
    return _number(None if share is None else share * 100, "{:.1f} %")
