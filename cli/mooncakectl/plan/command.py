"""`mooncakectl plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mooncakectl import completion
from mooncakectl.console import (
    CommandError,
    check_writable,
    err,
    print_json,
    print_text,
    report_error,
    say,
    shown_progress,
    write_file,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_core.api.cluster import MooncakeCluster
    from mooncake_simulator.workloads import Request
    from mooncakectl.plan.search import Prices, Size
    from mooncakectl.plan.tries import Trial
    from mooncakectl.simulate.declared import Declared

_DEAREST: Final = 1e9
"""What an instance may cost an hour, in whatever currency."""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("plan")(command)


def command(
    file: Annotated[Path, typer.Option("--file", "-f", help="The manifest of a MooncakeCluster.")],
    trace: Annotated[Path, typer.Option(help="Trace file: JSON lines as released with the Mooncake paper.")],
    profile: Annotated[
        str,
        typer.Option(
            help="Hardware and model, e.g. llama3-70b-8xh200; default: what the manifest simulates, for real "
            "engines LLaMA3-70B on 8 x A800.",
            autocompletion=completion.one_of(completion.profiles),
        ),
    ] = "",
    speed: Annotated[float, typer.Option(help="Trace seconds a second: 2 plans for twice the load.")] = 1.0,
    max_prefill: Annotated[int, typer.Option(min=1, max=512, help="Prefill instances at most.")] = 32,
    max_decode: Annotated[int, typer.Option(min=1, max=512, help="Decode instances at most.")] = 32,
    gpu_price: Annotated[
        float | None, typer.Option(help="What a GPU costs an hour; without it, GPUs are counted.")
    ] = None,
    prefill_price: Annotated[
        float | None, typer.Option(help="What a prefill instance costs an hour, instead of its GPUs.")
    ] = None,
    decode_price: Annotated[float | None, typer.Option(help="The same of a decode instance.")] = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=100, help="Runs of each size; the SLO must be kept in all of them.")
    ] = 1,
    jitter_ms: Annotated[
        float, typer.Option(min=0, help="Spread arrivals evenly over so many trace milliseconds.")
    ] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many requests.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the manifest there instead of on stdout.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Find the cheapest pools that keep the manifest's SLO for a trace, and print them as a manifest.

    Sizes are simulated with the code that places and admits live. The SLO is kept when its percentile of all
    requests stays inside its targets; who is refused does not. The KV cache pool stays as it is.
    """
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    from mooncake_core.api.manifests import ManifestError, manifest_text
    from mooncake_simulator.cluster.manifest import spec_of
    from mooncake_simulator.workloads import TraceError, read_trace
    from mooncakectl.plan.demand import beyond_any_size, least_size
    from mooncakectl.plan.manifest import with_sizes
    from mooncakectl.plan.search import NoSizeError, Size, cheapest
    from mooncakectl.plan.slo import objectives_of
    from mooncakectl.plan.table import tries_table
    from mooncakectl.plan.tries import Trial
    from mooncakectl.simulate.conditions import one_profile
    from mooncakectl.simulate.declared import declared_in, remarks
    from mooncakectl.trace_times import check_jitter, check_span, check_speed

    try:
        check_speed(speed)
        text = manifest_text(file)
        declared = declared_in(file, text)
        _check_pools(declared)
        cluster = declared.cluster
        spec, objectives = spec_of(cluster, one_profile(profile)), objectives_of(cluster.spec.slo)
        prices, unit = _prices(cluster, spec.profile.gpus, gpu_price, prefill_price, decode_price)
        requests = read_trace(trace, limit=limit)
        if not requests:
            raise TraceError(f"{trace}: no requests to plan for")
        check_jitter(jitter_ms)
        check_span(trace, requests, speed, jitter_ms)
        if output is not None:
            check_writable("--output", output, trace)
        with_sizes(text, Size(1, 1))
        if why := beyond_any_size(spec, requests, objectives):
            raise ValueError(why)
        most = Size(max_prefill, max_decode)
        least = least_size(spec, requests, objectives, speed, jitter_ms)
        if not most.covers(least):
            raise ValueError(_hopeless(least, most))
    except (ManifestError, TraceError, CommandError, ValueError) as error:
        report_error(str(error))
        raise typer.Exit(1) from None

    for remark in remarks(cluster, spec.profile, named=bool(profile)):
        say(remark)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with shown_progress(*columns) as progress:
        task = progress.add_task("simulating", total=None)
        trial = Trial(
            spec, requests, objectives, prices, speed=speed, seeds=range(seeds), jitter_ms=jitter_ms,
            on_size=lambda size: progress.update(task, description=_shown(size, trial)),
            on_arrival=lambda: progress.advance(task),
        )  # fmt: skip

        def allowed(size: Size) -> bool:
            return _is_manifest(with_sizes(text, size))

        try:
            chosen = cheapest(trial, prices, least=least, most=most, allowed=allowed)
        except NoSizeError:
            chosen = None
    runs = f"{seeds} seeds" if seeds > 1 else "1 seed"
    set_up = (f"{speed:g}×", spec.profile.name, spec.policy, spec.admission.value)
    title = " · ".join((trace.name, *set_up, runs))
    if not as_json or chosen is None:
        kept = [each.size for each in trial.tries if not each.missed]
        forbidden = [size for size in kept if not allowed(size)]
        err.print(tries_table(trial.tries, chosen, title, unit, forbidden))
    if chosen is None:
        report_error(_none_does(trial, most))
        raise typer.Exit(1)
    manifest = with_sizes(text, chosen)
    price, million_tokens = prices.of(chosen), _million_tokens_an_hour(requests, speed)
    for_a_million = None if million_tokens is None else price / million_tokens
    if as_json:
        found = {"trace": trace.name, "profile": spec.profile.name, "cost_per_million_tokens": for_a_million}
        print_json(found | _document(trial, chosen, prices, unit, manifest))
    else:
        say(_told(chosen, price, unit, for_a_million))
        if output is None:
            print_text(manifest)
    if output is not None:
        write_file(output, manifest.encode())
        say(f"{output}: written")


def _check_pools(declared: Declared) -> None:
    """A plan is one number for each side, written into the cluster."""
    apart = [each for each in declared.apart if not each.startswith("MooncakeKVCachePool")]
    if apart:
        raise ValueError(
            f"{', '.join(apart)}: a plan sizes pools that are written into their cluster: write one into "
            "spec.prefillPools and one into spec.decodePools"
        )
    spec = declared.cluster.spec
    for field, pools in (("prefillPools", spec.prefill_pools), ("decodePools", spec.decode_pools)):
        if len(pools) != 1:
            raise ValueError(f"spec.{field}: {len(pools)} pools: a plan sizes one of each kind: write one")


def _prices(
    cluster: MooncakeCluster,
    gpus_a_pod: int,
    gpu: float | None,
    prefill: float | None,
    decode: float | None,
) -> tuple[Prices, str]:
    """Prices of the instances, and the unit in which they are told."""
    from mooncakectl.plan.search import Prices

    for name, price in (("gpu", gpu), ("prefill", prefill), ("decode", decode)):
        if price is not None and not 0 < price <= _DEAREST:
            raise ValueError(f"--{name}-price {price:g}: write a number above 0, up to {_DEAREST:,.0f}")
    if (prefill is None) != (decode is None) and gpu is None:
        raise ValueError("--prefill-price and --decode-price: write both, or --gpu-price for the other")
    spec = cluster.spec
    each = []
    for price, pools in ((prefill, spec.prefill_pools), (decode, spec.decode_pools)):
        asked = pools[0].resources.gpu
        gpus = (gpus_a_pod if asked is None else asked.count) * pools[0].instance.size
        each.append(price if price is not None else gpus * (1.0 if gpu is None else gpu))
    return Prices(*each), "GPUs" if gpu is None and prefill is None else "cost/h"


def _is_manifest(text: str) -> bool:
    """Whether the manifest's own rules (GPU budget, ratio of the pools) allow it."""
    from mooncake_core.api.manifests import ManifestError, parse_manifests

    try:
        parse_manifests(text)
    except ManifestError:
        return False
    return True


def _shown(size: Size, trial: Trial) -> str:
    return f"{size.prefill}+{size.decode}, {len(trial.tries)} sizes tried"


def _hopeless(least: Size, most: Size) -> str:
    return (
        f"no size up to {most.prefill} prefill and {most.decode} decode instances can do this trace's work "
        f"in its time: at least {least.prefill}+{least.decode} are needed: allow more with --max-prefill "
        "and --max-decode, or less --speed"
    )


def _none_does(trial: Trial, most: Size) -> str:
    largest = next(each for each in trial.tries if each.size == most)
    if all(each.missed for each in trial.tries):
        fewer = ", ".join(str(each.size.prefill) for each in trial.tries if each.size != most)
        return (
            f"{most.prefill} prefill and {most.decode} decode instances, the most that may be, do not keep "
            f"the SLO: {largest.missed}"
            + (f" (nor with {fewer} prefill instances, which hand decode less)" if fewer else "")
            + ": allow more with --max-prefill and --max-decode, less --speed, or a weaker spec.slo"
        )
    return (
        "sizes keep the SLO, but none of them may be written: spec.coordination (gpuBudget, ratio) forbids "
        "them: change it"
    )


def _million_tokens_an_hour(requests: Sequence[Request], speed: float) -> float | None:
    """Tokens of prompts and answers that the trace brings in an hour, in millions; None = all at once."""
    from mooncakectl.plan.demand import arrivals_s

    span_s = arrivals_s(requests, speed)
    tokens = sum(request.input_length + request.output_length for request in requests)
    return tokens / 1e6 / span_s * 3600 if span_s else None


def _told(chosen: Size, price: float, unit: str, for_a_million: float | None) -> str:
    an_hour = f"{price:,.6g} GPUs" if unit == "GPUs" else f"{price:,.6g} an hour"
    told = f"{chosen.prefill}+{chosen.decode}: {an_hour}"
    if for_a_million is None:
        return told
    return f"{told}, {for_a_million:.3g}{' GPU-hours' if unit == 'GPUs' else ''} for a million tokens"


def _document(trial: Trial, chosen: Size, prices: Prices, unit: str, manifest: str) -> dict[str, Any]:
    return {
        "prefill": chosen.prefill,
        "decode": chosen.decode,
        "cost_per_hour": prices.of(chosen),
        "cost_unit": unit,
        "tried": [each.document() for each in trial.tries],
        "manifest": manifest,
    }
