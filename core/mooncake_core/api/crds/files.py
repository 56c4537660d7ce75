"""The definitions as files, and how the files differ from what the models say now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mooncake_core.api.crds.definitions import definitions

_HEADER = "# Generated from core/mooncake_core/api by `make crds`; edit the models, not this file.\n"


def rendered() -> dict[str, str]:
    """File name → content."""
    # Only this command needs YAML: schedulers and sidecars use the models without the package.
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes the same object twice instead of an anchor, which nobody likes to read."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    return {
        name: _HEADER + yaml.dump(document, Dumper=Dumper, sort_keys=False, width=110, allow_unicode=True)
        for name, document in definitions().items()
    }


def write(folder: Path) -> list[Path]:
    """Write all files; those of kinds that are no more are removed. Returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = rendered()
    for stale in set(folder.glob("*.yaml")) - {folder / name for name in contents}:
        stale.unlink()
    for name, text in contents.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in contents]


def differences(folder: Path) -> list[str]:
    """What is missing, different or too much in a folder; empty = up to date."""
    contents = rendered()
    found = [
        f"{folder / name}: {'differs from the models' if (folder / name).exists() else 'is missing'}"
        for name, text in contents.items()
        if not (folder / name).exists() or (folder / name).read_text(encoding="utf-8") != text
    ]
    extra = sorted(path for path in folder.glob("*.yaml") if path.name not in contents)
    return found + [f"{path}: no model has this kind" for path in extra]
