"""A decision of the Conductor as a person reads it; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_UNKNOWN = "–"
# Predicted before, measured after; the same names in a decision and its placement.
_PREFILL_SECONDS = ("queue_s", "transfer_s", "prefill_s", "ttft_s", "delay_s")
_COMPARED = (("prefill", "prefill_s"), ("TTFT", "ttft_s"), ("TBT", "tbt_s"))


def decision_view(decision: Mapping[str, Any]) -> RenderableType:
    """Who was considered, what was predicted, what was measured; parts that are not known are left out."""
    placement = decision.get("placement") or {}
    parts: list[RenderableType] = [_headline(decision, placement)]
    if considered := placement.get("considered"):
        parts += _titled(
            "considered for prefill, in model seconds",
            _prefill_candidates(considered, _id(placement.get("prefill"))),
        )
    if considered := placement.get("considered_decode"):
        parts += _titled(
            "considered for decode, at the moment the request would arrive there",
            _decode_candidates(considered, _id(placement.get("decode"))),
        )
    if placement:
        parts += _titled(
            "predicted against measured, in model seconds", _predicted_against_measured(decision, placement)
        )
    return Group(*parts)


def _headline(decision: Mapping[str, Any], placement: Mapping[str, Any]) -> Text:
    ask = decision.get("ask") or {}
    text = Text(str(decision.get("request_id", "")), style="bold")
    text.append(f"  {decision.get('path', '')}  tenant {decision.get('tenant', 'default')}", style="dim")
    if tokens := ask.get("prompt_tokens"):
        text.append(f"\n{tokens:,} prompt tokens")
        reused, fetched = placement.get("prefix_tokens") or 0, placement.get("fetch_tokens") or 0
        text.append(f", {reused:,} of them expected from the cache ({fetched:,} fetched from the store)")
        if (cached := decision.get("cached_tokens")) is not None:
            text.append(f", {cached:,} found there")
    if refused := decision.get("refused"):
        text.append(f"\nrefused: {refused}", style="red")
    elif placement:
        prefill = _id(placement.get("prefill")) or "the decode instance itself"
        text.append(f"\nprefill on {prefill}, decode on {_id(placement.get('decode'))}", style="green")
    if (held_s := decision.get("held_s")) is not None:
        text.append(f"\nwaited {_seconds(held_s)} s for its turn at the prefill instance")
        if moves := decision.get("moves"):
            text.append(f", moved {moves}× from another")
    if outcome := decision.get("outcome"):
        attempts = decision.get("attempts") or 1
        text.append(f"\noutcome: {outcome}" + (f" after {attempts} attempts" if attempts > 1 else ""))
    return text


def _prefill_candidates(considered: Iterable[Mapping[str, Any]], chosen: str) -> Table:
    table = _candidates("PREFIX", "FETCH", "QUEUE", "TRANSFER", "PREFILL", "= TTFT", "DELAYS")
    for one in considered:
        seconds = [_seconds(one.get(name)) for name in _PREFILL_SECONDS]
        tokens = [_tokens(one.get(name)) for name in ("prefix_tokens", "fetch_tokens")]
        table.add_row(*_marked(one, chosen), *tokens, *seconds)
    return table


def _decode_candidates(considered: Iterable[Mapping[str, Any]], chosen: str) -> Table:
    table = _candidates("BATCH", "KV TOKENS", "TBT")
    for one in considered:
        row = [_tokens(one.get("batch")), _tokens(one.get("kv_tokens")), _seconds(one.get("tbt_s"))]
        table.add_row(*_marked(one, chosen), *row)
    return table


def _predicted_against_measured(decision: Mapping[str, Any], placement: Mapping[str, Any]) -> Table:
    table = _table()
    for heading in ("", "PREDICTED", "MEASURED", "ERROR"):
        table.add_column(heading, justify="right" if heading else "left")
    for title, name in _COMPARED:
        predicted, measured = placement.get(name), decision.get(name)
        table.add_row(title, _seconds(predicted), _seconds(measured), _error(predicted, measured))
    return table


def _titled(title: str, table: Table) -> list[RenderableType]:
    # Not the table's own title, which would be folded to the table's width.
    return [Text(f"\n{title}", style="italic"), table]


def _table() -> Table:
    return Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")


def _candidates(*figures: str) -> Table:
    """A table of instances, the chosen one marked; where all does not fit, names are folded, not figures."""
    table = _table()
    table.add_column("")
    table.add_column("INSTANCE", overflow="fold")
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _marked(candidate: Mapping[str, Any], chosen: str) -> tuple[Text, Text]:
    name = str(candidate.get("instance", ""))
    mark, style = ("→", "green") if name == chosen else ("", "")
    return Text(mark, style), Text(name, style)


def _id(instance: Any) -> str:
    """An instance's id, whether it is given alone or with all that is known of it."""
    return str((instance.get("id", "") if isinstance(instance, Mapping) else instance) or "")


def _seconds(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:.3f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def _error(predicted: float | None, measured: float | None) -> str:
    """Measured less predicted, and what share of the prediction that is."""
    if predicted is None or measured is None:
        return _UNKNOWN
    error = measured - predicted
    text = ("−" if error < 0 else "+") + _seconds(abs(error))
    return f"{text} ({error / predicted:+.0%})".replace("-", "−") if predicted > 0 else text


def _tokens(value: int | None) -> str:
    return _UNKNOWN if value is None else f"{value:,}"
