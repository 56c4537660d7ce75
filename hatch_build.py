"""Compiles the hot path with mypyc, from the very source that also runs interpreted (ADR 0015).

As hatchling's build hook it puts the compiled modules into the wheel; it is off unless
``HATCH_BUILD_HOOK_ENABLE_CUSTOM`` is set. ``python hatch_build.py FOLDER`` puts them, beside a copy of the
packages, into a folder for PYTHONPATH: never beside the sources, where they would hide every later edit.

Which modules are compiled stands in pyproject.toml (``tool.mooncake.compiled``).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a program, where hatchling is not needed
    BuildHookInterface = object  # type: ignore[assignment, misc]

ROOT = Path(__file__).resolve().parent


def compile_into(folder: Path) -> list[Path]:
    """Compile the modules; returns the libraries, each where its module is to be imported from.

    Args:
        folder: gets the libraries, laid out as packages.

    Raises:
        SystemExit: mypyc refuses the source; it has said why.
        setuptools.errors.CompileError: there is no C compiler, or no headers of Python.
    """
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    before = Path.cwd()
    # mypy's settings name folders relative to the root.
    os.chdir(ROOT)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            extensions = mypycify(
                ["--config-file", "pyproject.toml", *project["tool"]["mooncake"]["compiled"]],
                opt_level=os.environ.get("MOONCAKE_COMPILE_LEVEL", "3"),
                debug_level="0",
                multi_file=True,
                target_dir=scratch,
                group_name="mooncake",
            )
            command: Any = build_ext(Distribution({"name": "mooncake", "ext_modules": extensions}))
            command.build_lib = str(folder)
            command.build_temp = str(Path(scratch) / "objects")
            command.ensure_finalized()
            command.run()
    finally:
        os.chdir(before)
    return sorted(folder.rglob("*.so"))


class CompiledHook(BuildHookInterface):  # type: ignore[type-arg, misc]
    """Puts the compiled modules into a wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects the wheel's files."""
        if version == "editable":
            return
        self._folder = Path(tempfile.mkdtemp(prefix="mooncake-compiled-"))
        for library in compile_into(self._folder):
            build_data["force_include"][str(library)] = str(library.relative_to(self._folder))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by hatchling when the wheel is written."""
        if version != "editable":
            shutil.rmtree(self._folder)


def main(folder: Path) -> None:
    """Write the packages with their compiled modules into a folder."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    with tempfile.TemporaryDirectory() as fresh:
        compile_into(Path(fresh))
        shutil.rmtree(folder, ignore_errors=True)
        for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
            source = ROOT / package
            shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(fresh, folder, dirs_exist_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
