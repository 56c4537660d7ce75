"""The commands, put together; each lives in a module that is imported when it runs."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Annotated

import typer

_COMMANDS = (
    "mooncakectl.commands.up",
    "mooncakectl.commands.demo",
    "mooncakectl.commands.validate",
    "mooncakectl.commands.status",
    "mooncakectl.commands.explain",
    "mooncakectl.commands.drain",
    "mooncakectl.commands.rollout",
    "mooncakectl.replay.command",
    "mooncakectl.simulate.command",
    "mooncakectl.plan.command",
    "mooncakectl.workload.command",
)


def build_app() -> typer.Typer:
    """The command line with all its commands."""
    app = typer.Typer(
        name="mooncakectl",
        help="Run, watch and question Mooncake clusters.",
        epilog="Exit codes: 0 done, 1 what stderr says, 2 wrong use, 130 interrupted.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    for module in _COMMANDS:
        importlib.import_module(module).register(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mooncakectl {importlib.metadata.version('mooncake-k8s')}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run, watch and question Mooncake clusters."""
