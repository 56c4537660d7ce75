"""A Pod's volumes: what is in them (pure), and how they become folders (I/O)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mooncakectl.local.errors import PodUnsupportedError
from mooncakectl.local.world import Manifest, World

_SECRET_MODE = 0o600
_CONFIG_MODE = 0o644


@dataclass(frozen=True, slots=True)
class VolumeFile:
    """One file of a volume, by its path inside it."""

    path: str
    content: bytes
    mode: int


@dataclass(frozen=True, slots=True)
class Volume:
    """A folder to make for a Pod, or one of the host to use as it is."""

    name: str
    files: tuple[VolumeFile, ...] = ()
    host_path: str | None = None


def volumes_of(pod: Manifest, world: World) -> tuple[Volume, ...]:
    """What each volume of a Pod holds.

    Raises:
        PodUnsupportedError: a volume is of a kind that needs a cluster, or refers to what is not there.
    """
    name = pod["metadata"]["name"]
    declared = pod["spec"].get("volumes") or ()
    return tuple(
        _volume(volume, world, where=f"Pod {name}: spec.volumes[{volume['name']}]") for volume in declared
    )


def _volume(declared: Mapping[str, Any], world: World, *, where: str) -> Volume:
    name = declared["name"]
    if "emptyDir" in declared:
        return Volume(name)
    if host := declared.get("hostPath"):
        return Volume(name, host_path=host["path"])
    if projected := declared.get("projected"):
        files: list[VolumeFile] = []
        for source in projected.get("sources") or ():
            files.extend(_source_files(source, world, where=where))
        return Volume(name, tuple(files))
    return Volume(name, tuple(_source_files(declared, world, where=where)))


def _source_files(source: Mapping[str, Any], world: World, *, where: str) -> list[VolumeFile]:
    if reference := source.get("configMap"):
        return _files("ConfigMap", reference, reference["name"], world.config_maps, _CONFIG_MODE, where=where)
    if reference := source.get("secret"):
        name = reference.get("secretName") or reference.get("name")
        return _files("Secret", reference, name, world.secrets, _SECRET_MODE, where=where)
    kinds = ", ".join(sorted(set(source) - {"name"}))
    raise PodUnsupportedError(
        where, f"{kinds} needs a cluster; on this machine write hostPath, emptyDir, configMap or secret"
    )


def _files(
    kind: str,
    reference: Mapping[str, Any],
    name: str,
    known: Mapping[str, Mapping[str, bytes]],
    mode: int,
    *,
    where: str,
) -> list[VolumeFile]:
    if name not in known:
        if reference.get("optional"):
            return []
        remedy = "add it to the manifest file or give it with --secrets DIR" if kind == "Secret" else "add it"
        raise PodUnsupportedError(where, f"there is no {kind} {name!r}: {remedy}")
    contents = known[name]
    items = reference.get("items") or [{"key": key, "path": key} for key in contents]
    files = []
    for item in items:
        path = PurePosixPath(item["path"])
        if path.is_absolute() or ".." in path.parts:
            raise PodUnsupportedError(where, f"path {item['path']!r} leaves the volume")
        if item["key"] in contents:
            files.append(VolumeFile(str(path), contents[item["key"]], mode))
        elif not reference.get("optional"):
            raise PodUnsupportedError(where, f"{kind} {name!r} has no key {item['key']!r}")
    return files


def write_volume(volume: Volume, folder: Path) -> None:
    """Make a volume's folder with its files; one that is there already is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    for file in volume.files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # The mode is given at creation: a Secret must not be readable for a moment either.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file.mode)
        with os.fdopen(descriptor, "wb") as out:
            out.write(file.content)
