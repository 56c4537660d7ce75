"""`mooncakectl rollout history|undo|pause|resume|status`: as `kubectl rollout`, for all pools at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from mooncakectl.console import CommandError, out, print_json, print_text, say

if TYPE_CHECKING:
    from mooncakectl.rollout.history import Record
    from mooncakectl.rollout.target import Target

T = TypeVar("T")

TARGET = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="cluster/NAME, or prefillpool/, decodepool/, kvcachepool/NAME."),
]
NAMESPACE = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Else the kubeconfig's, or default.")
]
KUBECONFIG = Annotated[Path | None, typer.Option(help="Else $KUBECONFIG, or ~/.kube/config.")]
CONTEXT = Annotated[str | None, typer.Option(help="A context of the kubeconfig; else the current one.")]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
_POLL_S = 1.0


def register(rollout: typer.Typer) -> None:
    """Add the commands to `rollout`."""
    for command in (history, undo, pause, resume, status):
        rollout.command(command.__name__)(command)


def history(
    target: TARGET,
    revision: Annotated[int, typer.Option(min=0, help="Print the spec of this one.")] = 0,
    namespace: NAMESPACE = None,
    kubeconfig: KUBECONFIG = None,
    context: CONTEXT = None,
    as_json: AS_JSON = False,
) -> None:
    """List what a cluster, or a pool written on its own, asked for over time."""
    from mooncakectl.rollout.history import chosen, records

    found = _with(target, kubeconfig, context, namespace, records)
    if revision:
        record = chosen(found, revision)
        if as_json:
            print_json(record.document(with_spec=True))
        else:
            print_text(_yaml(record.spec))
    elif as_json:
        print_json({"revisions": [record.document() for record in found]})
    else:
        _print_history(found)


def undo(
    target: TARGET,
    to_revision: Annotated[
        int, typer.Option("--to-revision", min=0, help="Else the one before the present.")
    ] = 0,
    namespace: NAMESPACE = None,
    kubeconfig: KUBECONFIG = None,
    context: CONTEXT = None,
    as_json: AS_JSON = False,
) -> None:
    """Ask for an earlier revision's spec again; numbers of instances and how they are replaced stay."""
    from mooncakectl.rollout.history import go_back

    async def back(found: Target) -> tuple[Record, list[str], str, bool]:
        record, changes = await go_back(found, to_revision)
        return record, changes, found.written_as, _is_paused(found.live["spec"])

    record, changes, name, paused = _with(target, kubeconfig, context, namespace, back)
    if as_json:
        print_json({"revision": record.number, "changes": changes})
    elif not changes:
        out.print(f"{name} already asks for what revision {record.number} did", highlight=False)
    else:
        text = f"{name} goes back to revision {record.number}: {', '.join(changes)}"
        out.print(text, highlight=False, soft_wrap=True)
    if paused:
        say(f"its pools are paused: mooncakectl rollout resume {name} lets them go on")


def pause(
    target: TARGET,
    namespace: NAMESPACE = None,
    kubeconfig: KUBECONFIG = None,
    context: CONTEXT = None,
    as_json: AS_JSON = False,
) -> None:
    """Replace no more instances from now on; scale and repair go on."""
    _set_paused(target, kubeconfig, context, namespace, paused=True, as_json=as_json)


def resume(
    target: TARGET,
    namespace: NAMESPACE = None,
    kubeconfig: KUBECONFIG = None,
    context: CONTEXT = None,
    as_json: AS_JSON = False,
) -> None:
    """Go on replacing instances."""
    _set_paused(target, kubeconfig, context, namespace, paused=False, as_json=as_json)


def status(
    target: TARGET,
    watch: Annotated[bool, typer.Option(help="Wait for the end of the rollout.")] = True,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds to wait; 0 = for as long as it takes.")
    ] = 0,
    namespace: NAMESPACE = None,
    kubeconfig: KUBECONFIG = None,
    context: CONTEXT = None,
    as_json: AS_JSON = False,
) -> None:
    """Tell how far a rollout is; ends with an error when its progress deadline is over."""

    async def follow(found: Target) -> Any:
        from mooncakectl.rollout.progress import progress_of

        until_s = time.monotonic() + timeout_s if timeout_s else float("inf")
        told: set[str] = set()
        while True:
            pools = await progress_of(found)
            for line in (f"{p.pool}: {p.message}" for p in pools if not as_json):
                if line not in told:
                    out.print(line, highlight=False, soft_wrap=True)
                    told.add(line)
            over = all(p.done for p in pools) or any(p.failed for p in pools)
            if over or not watch or time.monotonic() >= until_s:
                return pools
            await asyncio.sleep(_POLL_S)

    pools = _with(target, kubeconfig, context, namespace, follow)
    if as_json:
        print_json({"done": all(p.done for p in pools), "pools": [p.document() for p in pools]})
    failed = [p.pool for p in pools if p.failed]
    if failed:
        raise CommandError(f"{', '.join(failed)}: no progress within coordination.rollout's deadline")
    waiting = [p.pool for p in pools if not p.done]
    if watch and waiting:
        raise CommandError(f"not over within {timeout_s:g} s: {', '.join(waiting)}")


def _with(
    target: str,
    kubeconfig: Path | None,
    context: str | None,
    namespace: str | None,
    use: Callable[[Target], Awaitable[T]],
) -> T:
    from mooncakectl.rollout.target import Place, reached

    async def run() -> T:
        async with reached(target, Place(kubeconfig, context, namespace)) as found:
            return await use(found)

    return asyncio.run(run())


def _set_paused(
    target: str,
    kubeconfig: Path | None,
    context: str | None,
    namespace: str | None,
    *,
    paused: bool,
    as_json: bool,
) -> None:
    from mooncakectl.rollout.pausing import set_paused

    changed = _with(target, kubeconfig, context, namespace, lambda found: set_paused(found, paused))
    state = "paused" if paused else "resumed"
    if as_json:
        print_json({state: changed})
    elif changed:
        out.print(f"{state}: {', '.join(changed)}", highlight=False, soft_wrap=True)
    else:
        out.print(f"nothing to do: already {state}", highlight=False)


def _is_paused(spec: Any) -> bool:
    entries = [spec, *(spec.get("prefillPools") or ()), *(spec.get("decodePools") or ())]
    return any((entry.get("update") or {}).get("paused") for entry in entries)


def _print_history(found: list[Record]) -> None:
    rows = [("REVISION", "CREATED", "CHANGE-CAUSE", "CHANGES")]
    for record in found:
        number = f"{record.number} (present)" if record.present else str(record.number)
        rows.append((number, record.created, record.cause or "-", ", ".join(record.changes) or "-"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        # As kubectl prints it: never wrapped, so that other programs may read it.
        line = "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        out.print(line, highlight=False, soft_wrap=True)


def _yaml(document: Any) -> str:
    import yaml

    text: str = yaml.safe_dump(document, sort_keys=False)
    return text
