"""`mooncakectl validate`: what is wrong with a manifest, and what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mooncakectl.console import out, print_json, report_error


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("validate")(validate)


def validate(
    files: Annotated[
        list[Path], typer.Option("--file", "-f", help="A manifest, or a folder of them; may be repeated.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check manifests as the operator would: all problems, with the field's path and what to write."""
    from mooncake_core.api import ManifestError, load_manifests

    objects: list[dict[str, Any]] = []
    problems: list[str] = []
    for file in files:
        try:
            loaded = load_manifests(file)
        except ManifestError as error:
            problems += error.problems
            continue
        objects += [{"file": str(file), "kind": kind, "name": name} for kind, name in map(_identity, loaded)]
    if as_json:
        print_json({"valid": not problems, "objects": objects, "problems": problems})
    elif problems:
        for problem in problems:
            report_error(problem)
    else:
        for item in objects:
            out.print(
                f"{item['file']}: {item['kind']}/{item['name']} is valid", highlight=False, soft_wrap=True
            )
    if problems:
        raise typer.Exit(1)


def _identity(item: Any) -> tuple[str, str]:
    if isinstance(item, dict):
        return item["kind"], item["metadata"]["name"]
    return item.kind, item.metadata.name
