"""More than decode can serve: refusing must not serve less, and must not swing."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from rows import Row, found, quotient
from setups import Traces, admitted

from mooncake_core.config.scheduler import AdmissionMode

NONE, EARLY, PREDICTIVE = AdmissionMode.NONE, AdmissionMode.EARLY, AdmissionMode.PREDICTIVE


def overload(traces: Traces) -> Iterator[Row]:
    """Decode-bound set-ups; all four at once, for a count of rejections alone can be gamed."""
    for prefill, decode, speed, outputs in ((8, 2, 2.5, 1), (8, 2, 3.0, 1), (8, 8, 2.0, 5)):
        runs = {
            mode: traces.runs("conversation", admitted(mode, prefill, decode), speed, outputs=outputs)
            for mode in AdmissionMode
        }
        at = f"{prefill}P{decode}D {speed:g}×" + (f", outputs × {outputs}" if outputs > 1 else "")
        setup = f"conversation {at}, raw ticks, no shared store, 30 s / 100 ms"
        for kind, of in (("requests", "goodput"), ("tokens", "token_goodput")):
            best = max(median([getattr(run, of) for run in runs[mode]]) for mode in (NONE, EARLY))
            yield found([getattr(run, of) for run in runs[PREDICTIVE]]).row(
                f"goodput in {kind}, {at}", "goal", f"≥ {best:.3f}", lambda share, best=best: share >= best,
                setup,
            )  # fmt: skip
        for what, of, base, most in (
            ("rejections / baseline's", "refused", NONE, 0.8),
            ("prefills thrown away / baseline's", "wasted_prefills", NONE, 0.5),
            ("swing of the prefill load / early's", "prefill_swing", EARLY, 0.5),
        ):
            ours = quotient(
                [getattr(run, of) for run in runs[PREDICTIVE]], [getattr(run, of) for run in runs[base]]
            )
            yield ours.row(
                f"{what}, {at}", "goal", f"≤ {most:.2f}", lambda ratio, most=most: ratio <= most, setup
            )


def as_drafted(traces: Traces) -> Iterator[Row]:
    """The papers' own overload set-up: on the traces that are published, decode does not bind in it."""
    runs = {mode: traces.runs("conversation", admitted(mode, 8, 8), 2.0) for mode in AdmissionMode}
    told = {NONE: "4183 of 23 000", EARLY: "−9.8 %", PREDICTIVE: "−14.2 %"}
    for mode, paper in told.items():
        refused = found([float(run.refused) for run in runs[mode]])
        setup = "conversation 2×, raw ticks, 8P8D, no shared store, 30 s / 100 ms"
        yield refused.row(
            f"refused of 12 031, {mode.value}, 8P8D 2×", "report", f"paper: {paper}", lambda _: True, setup
        )
