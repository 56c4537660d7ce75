"""The chart as helm renders it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).resolve().parents[3] / "helm" / "mooncake"
NAMESPACE = "mooncake-system"
OPERATOR_ACCOUNT = f"system:serviceaccount:{NAMESPACE}:mooncake-operator"


class RefusedError(Exception):
    """helm refused; the message is its own."""


def find_helm() -> str:
    """helm's path; where there is none, the test is skipped."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mooncake" / "k8s"
    built = [str(path) for path in sorted(cache.glob("helm-v*/helm"), reverse=True)]
    found = next(filter(None, [*built, shutil.which("helm")]), None)
    if found is None:
        pytest.skip("no helm: `make e2e-programs` builds it, or install Helm")
    return found


def helm(*arguments: str) -> str:
    """Run helm, without the user's own configuration.

    Raises:
        RefusedError: it failed.
    """
    with tempfile.TemporaryDirectory() as home:
        folders = {f"HELM_{kind}_HOME": home for kind in ("CACHE", "CONFIG", "DATA")}
        command = [find_helm(), *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | folders)
    if ran.returncode:
        raise RefusedError(ran.stderr.strip() + ran.stdout.strip())
    return ran.stdout


def render(values: Mapping[str, Any] | None = None, release: str = "mooncake") -> list[dict[str, Any]]:
    """The objects of an installation, hooks included, definitions left out.

    Raises:
        RefusedError: helm does not take the values.
    """
    return [obj for obj in render_all(values, release) if obj["kind"] != "CustomResourceDefinition"]


def render_all(values: Mapping[str, Any] | None = None, release: str = "mooncake") -> list[dict[str, Any]]:
    """All objects of an installation.

    Raises:
        RefusedError: helm does not take the values.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(values or {}, file)
        file.flush()
        text = helm(
            *("template", release, str(CHART), f"--namespace={NAMESPACE}"),
            *("--kube-version=1.36.3", f"--values={file.name}"),
        )
    return [obj for obj in yaml.safe_load_all(text) if obj is not None]


def is_hook(obj: Mapping[str, Any]) -> bool:
    """Whether an object is there only while it is being uninstalled."""
    return "helm.sh/hook" in (obj["metadata"].get("annotations") or {})
