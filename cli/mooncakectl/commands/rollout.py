"""`mooncakectl rollout`, and its `plan`: the steps in which a new revision replaces the old one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncakectl.commands import rollout_control
from mooncakectl.console import CommandError, out, print_json, shown_progress

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from mooncake_operator.planning.desired import DesiredCluster
    from mooncake_operator.planning.preview import Step


def register(app: typer.Typer) -> None:
    """Add the command."""
    rollout = typer.Typer(help="Look into rollouts, hold them, go back.", no_args_is_help=True)
    rollout.callback()(_rollout)
    rollout.command("plan")(plan)
    rollout_control.register(rollout)
    app.add_typer(rollout, name="rollout")


def _rollout() -> None:
    """Look into rollouts, hold them, go back."""


def plan(
    prefill: Annotated[int, typer.Option(min=1, max=1000, help="Prefill instances.")],
    decode: Annotated[int, typer.Option(min=1, max=1000, help="Decode instances.")],
    max_surge: Annotated[int, typer.Option(min=0, help="Instances above replicas, each pool.")] = 1,
    max_unavailable: Annotated[
        int, typer.Option(min=0, help="Instances that may be missing where no surge has room.")
    ] = 1,
    max_skew: Annotated[
        int, typer.Option(min=0, max=100, help="Percent that one pool may be ahead of the other.")
    ] = 25,
    partition: Annotated[int, typer.Option(min=0, help="Instances of each pool that stay old.")] = 0,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of one instance.")] = 1,
    gpu_budget: Annotated[
        int | None, typer.Option(min=1, help="GPUs of all pools together; else without bound.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the steps as JSON.")] = False,
) -> None:
    """Print a rollout step by step, in a world where every Pod starts and every drain ends."""
    if max_surge + max_unavailable == 0:
        raise CommandError(
            "--max-surge and --max-unavailable are both 0: nothing could move; write --max-surge 1"
        )
    needed = (prefill + decode) * gpus
    if gpu_budget is not None and gpu_budget < needed:
        raise CommandError(
            f"--gpu-budget {gpu_budget} does not hold the pools' {needed} GPUs; write --gpu-budget {needed}"
        )
    from mooncake_operator.planning.preview import rollout_of, steps

    cluster, before = rollout_of(
        prefill=prefill,
        decode=decode,
        max_surge=max_surge,
        max_unavailable=max_unavailable,
        max_skew=max_skew / 100,
        partition=partition,
        gpus=gpus,
        gpu_budget=gpu_budget,
    )
    rounds = _shown(steps(cluster, before))
    if as_json:
        print_json({"finished": _is_finished(cluster, rounds), "steps": [_document(step) for step in rounds]})
    else:
        out.print(_table(rounds))
    if not _is_finished(cluster, rounds):
        why = "; ".join(rounds[-1].waits_for) or "no move is allowed"
        raise CommandError(f"the rollout stops before its end: {why}")


def _shown(steps: Iterable[Step]) -> list[Step]:
    """All steps; how many there are so far is shown meanwhile, for thousands of instances take minutes."""
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.completed:.0f} steps"), TimeElapsedColumn()
    with shown_progress(*columns) as progress:
        task = progress.add_task("", total=None)
        rounds = []
        for step in steps:
            rounds.append(step)
            progress.advance(task)
    return rounds


def _is_finished(cluster: DesiredCluster, rounds: list[Step]) -> bool:
    last = rounds[-1].counts
    return all(last[pool.name]["new"] >= pool.updated_target for pool in cluster.pools)


def _document(step: Step) -> dict[str, Any]:
    return {
        "step": step.number,
        "pools": {name: dict(counts) for name, counts in step.counts.items()},
        "gpus": step.gpus,
        "actions": [_words(action) for action in step.actions],
        "waits_for": list(step.waits_for),
    }


def _words(action: Any) -> str:
    """An action as a short sentence."""
    from mooncake_operator.planning import actions

    match action:
        case actions.CreatePod():
            return f"create {action.pod}"
        case actions.DeletePod():
            return f"delete {action.pod}"
        case actions.SetGate(status=True):
            return f"route to {action.pod}"
        case actions.SetGate():
            return f"stop routing to {action.pod}"
        case actions.MarkDrain():
            return f"drain {action.instance}"
        case actions.Unmark():
            return f"keep {action.instance}"
        case actions.RecordRevision():
            return f"record the new revision of {action.pool}"
        case _:
            return type(action).__name__


def _table(rounds: list[Step]) -> Table:
    from rich.table import Table

    table = Table(title="old + new routable instances; GPUs that Pods hold")
    for column in ("step", *rounds[0].counts, "GPUs"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("then")
    for step in rounds:
        counts = [f"{pool['old']} + {pool['new']}" for pool in step.counts.values()]
        then = ", ".join(_words(action) for action in step.actions)
        table.add_row(str(step.number), *counts, str(step.gpus), then or "–")
    return table
