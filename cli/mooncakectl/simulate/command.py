"""`mooncakectl simulate`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from mooncakectl import completion
from mooncakectl.console import (
    CommandError,
    check_writable,
    out,
    print_json,
    report_error,
    say,
    shown_progress,
    write_file,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_core.config.scheduler import AdmissionMode

_MOST_DIGITS: Final = 6
"""Of a number of instances."""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("simulate")(command)


def command(
    file: Annotated[Path, typer.Option("--file", "-f", help="The manifest of a MooncakeCluster.")],
    trace: Annotated[Path, typer.Option(help="Trace file: JSON lines as released with the Mooncake paper.")],
    policy: Annotated[
        str,
        typer.Option(
            help="Policies to compare, with commas, or all.",
            autocompletion=completion.of_list(completion.policies),
        ),
    ] = "",
    admission: Annotated[
        str,
        typer.Option(
            help="Admission modes to compare: none,early,predictive.",
            autocompletion=completion.of_list(completion.admission_modes),
        ),
    ] = "",
    profile: Annotated[
        str,
        typer.Option(
            help="Hardware and model to compare, with commas, e.g. llama3-70b-8xh200; default: what the "
            "manifest simulates, for real engines LLaMA3-70B on 8 x A800.",
            autocompletion=completion.of_list(completion.profiles),
        ),
    ] = "",
    speed: Annotated[str, typer.Option(help="Trace seconds a second, with commas.")] = "1",
    sweep: Annotated[
        str, typer.Option(help="prefill=5..11: the same instances in all, so many of them for prefill.")
    ] = "",
    tiers: Annotated[
        str,
        typer.Option(
            help="Rules for the store's DRAM to compare, with commas: lru (as the store does), lfu, "
            "length-aware, predicted, steered.",
            autocompletion=completion.of_list(completion.tier_rules),
        ),
    ] = "",
    copy_hot_blocks: Annotated[
        bool, typer.Option("--copy-hot-blocks", help="Copy what many read to other nodes of the store.")
    ] = False,
    die: Annotated[
        list[str] | None,
        typer.Option(
            help="d-0@120s..180s: an instance dies and is back; p-0@60s: it never is. May be repeated."
        ),
    ] = None,
    load_age_s: Annotated[
        float, typer.Option(min=0, help="Place and admit by loads as they were so many seconds ago.")
    ] = 0,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Runs of each set-up; medians are told.")] = 1,
    jitter_ms: Annotated[
        float, typer.Option(min=0, help="Spread arrivals evenly over so many trace milliseconds.")
    ] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many requests.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    report: Annotated[
        Path | None, typer.Option(help="Also write plots and tables: one HTML file that needs no network.")
    ] = None,
) -> None:
    """Run a trace through a manifest's cluster in seconds, with the very code that places and admits live."""
    from mooncake_core.api.manifests import ManifestError
    from mooncake_scheduler.policies import UnknownPolicyError, names
    from mooncake_simulator.cluster.manifest import spec_of
    from mooncake_simulator.workloads import TraceError, read_trace
    from mooncakectl.simulate.conditions import failures, profiles, rules
    from mooncakectl.simulate.declared import declared_in, remarks
    from mooncakectl.simulate.report.page import html
    from mooncakectl.simulate.runs import answer, questions
    from mooncakectl.simulate.table import answers_table
    from mooncakectl.trace_times import check_jitter, check_span

    try:
        if not load_age_s < float("inf"):
            raise ValueError(f"--load-age-s {load_age_s:g}: write a number of seconds, e.g. 5")
        cluster = declared_in(file).cluster
        bases = [spec_of(cluster, each) for each in profiles(profile) or (None,)]
        asked = questions(
            bases,
            policies=_policies(policy, names()),
            admissions=_admissions(admission),
            speeds=_speeds(speed),
            prefill=_sweep(sweep),
            tiers=rules(tiers),
            die=failures(die or ()),
            load_age_s=load_age_s,
            copies=copy_hot_blocks,
        )
        requests = read_trace(trace, limit=limit)
        if not requests:
            raise TraceError(f"{trace}: no requests to simulate")
        check_jitter(jitter_ms)
        check_span(trace, requests, min(each.speed for each in asked), jitter_ms)
        if report is not None:
            check_writable("--report", report, trace, file)
    except (ManifestError, UnknownPolicyError, TraceError, CommandError, ValueError) as error:
        report_error(str(error))
        raise typer.Exit(1) from None
    told = [remark for base in bases for remark in remarks(cluster, base.profile, named=bool(profile))]
    for remark in dict.fromkeys(told):
        say(remark)
    answers = []
    with shown_progress() as progress:
        task = progress.add_task("simulating", total=len(asked) * seeds * len(requests))
        for question in asked:
            spec = question.spec
            shown = f"{spec.prefill}+{spec.decode} {spec.policy} {spec.admission.value} ×{question.speed:g}"
            progress.update(task, description=shown)
            answers.append(
                answer(
                    question,
                    requests,
                    range(seeds),
                    jitter_ms=jitter_ms,
                    on_arrival=lambda: progress.advance(task),
                )
            )
    if as_json:
        print_json({"trace": trace.name, "seeds": seeds, "runs": [each.document() for each in answers]})
    else:
        out.print(answers_table(answers, trace.name, seeds))
    if report is not None:
        write_file(report, html(answers, trace.name, seeds, typed()).encode())
        say(f"{report}: written")


def typed() -> str:
    """The command line, so that somebody else can type it again; folders are of no use to them."""
    return shlex.join(["mooncakectl", *map(_without_folder, sys.argv[1:])])


def _without_folder(word: str) -> str:
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return option + equals + (Path(value).name if "/" in value else value)


def _policies(text: str, known: Sequence[str]) -> list[str]:
    from mooncake_scheduler.policies import UnknownPolicyError
    from mooncakectl.simulate.conditions import parts

    chosen = parts(text)
    for each in chosen:
        if each not in known and each != "all":
            raise UnknownPolicyError(each)
    return list(known) if "all" in chosen else chosen


def _admissions(text: str) -> list[AdmissionMode]:
    from mooncake_core.config.scheduler import AdmissionMode
    from mooncakectl.simulate.conditions import parts

    modes = [mode.value for mode in AdmissionMode]
    chosen = parts(text)
    for each in chosen:
        if each not in modes:
            raise ValueError(f"--admission {each}: write one of {', '.join(modes)}, or several with commas")
    return [AdmissionMode(each) for each in chosen]


def _speeds(text: str) -> list[float]:
    try:
        speeds = [float(each) for each in text.split(",")]
    except ValueError:
        speeds = []
    if not speeds or not all(0 < each < float("inf") for each in speeds):
        raise ValueError(f"--speed {text}: write numbers above 0 with commas, e.g. 1,1.5,2")
    return speeds


def _sweep(text: str) -> Sequence[int]:
    if not text:
        return ()
    name, _, span = text.partition("=")
    first, dots, last = span.partition("..")
    if name != "prefill" or not dots or not _is_count(first) or not _is_count(last):
        raise ValueError(f"--sweep {text}: write prefill=FIRST..LAST, e.g. prefill=5..11")
    if int(first) > int(last):
        raise ValueError(f"--sweep {text}: the first number is above the last: write prefill={last}..{first}")
    return range(int(first), int(last) + 1)


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) <= _MOST_DIGITS
