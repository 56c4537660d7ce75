"""How long a trace of an hour takes."""

from __future__ import annotations

from collections.abc import Iterator

from rows import Row
from setups import Traces, admitted, placed, timed

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_simulator.cluster.simulation import simulate

WITH_ADMISSION = "seconds for 12 031 requests"


def speed(traces: Traces) -> Iterator[Row]:
    """12 031 requests on 16 instances, processor seconds of one core: the least of three."""
    trace = traces.trace("conversation")
    for name, spec, most in (
        (f"{WITH_ADMISSION}, placement alone", placed("kv-centric", 16, 16), 3.0),
        (WITH_ADMISSION, admitted(AdmissionMode.PREDICTIVE, 16, 16), 10.0),
    ):
        took_s = sorted(timed(lambda spec=spec: simulate(spec, trace)) for _ in range(3))
        yield Row(
            name, "goal", f"< {most:g}", took_s[0], took_s[0] < most, (took_s[0], took_s[-1]),
            f"conversation 1×, 16P16D, {spec.admission.value}",
        )  # fmt: skip
