"""The desired world of one cluster, as far as this machine can run it: Pods and what they mount."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from mooncake_core.api import ManifestError, from_base64, load_secrets
from mooncakectl.local.errors import LocalRuntimeError

Manifest = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class World:
    """Pods, and the contents of ConfigMaps and Secrets by name."""

    pods: tuple[Manifest, ...]
    config_maps: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    secrets: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)

    @classmethod
    def of(cls, manifests: Iterable[Manifest], *, secrets_dir: Path | None = None) -> Self:
        """Sort manifests by kind; what only Kubernetes can act on (Service, NetworkPolicy, …) is left out.

        Args:
            manifests: rendered objects, and the Secrets and ConfigMaps of the user's file.
            secrets_dir: further Secrets, see `read_secrets`; they win over those in the manifests.

        Raises:
            LocalRuntimeError: a Secret's data is not base64, or the folder cannot be read.
        """
        pods: list[Manifest] = []
        config_maps: dict[str, Mapping[str, bytes]] = {}
        secrets: dict[str, Mapping[str, bytes]] = {}
        for manifest in manifests:
            name = manifest.get("metadata", {}).get("name", "")
            match manifest.get("kind"):
                case "Pod":
                    pods.append(manifest)
                case "ConfigMap":
                    config_maps[name] = config_map_contents(manifest)
                case "Secret":
                    secrets[name] = secret_contents(manifest)
        if secrets_dir is not None:
            secrets.update(read_secrets(secrets_dir))
        return cls(tuple(pods), config_maps, secrets)


def config_map_contents(manifest: Manifest) -> dict[str, bytes]:
    """Keys and contents of a ConfigMap."""
    contents = {key: str(text).encode() for key, text in (manifest.get("data") or {}).items()}
    return contents | _decoded(manifest, "binaryData")


def secret_contents(manifest: Manifest) -> dict[str, bytes]:
    """Keys and contents of a Secret; `stringData` wins over `data`, as on the API server."""
    plain = {key: str(text).encode() for key, text in (manifest.get("stringData") or {}).items()}
    return _decoded(manifest, "data") | plain


def _decoded(manifest: Manifest, section: str) -> dict[str, bytes]:
    name = manifest.get("metadata", {}).get("name", "")
    contents = {}
    for key, text in (manifest.get(section) or {}).items():
        try:
            contents[key] = from_base64(text)
        except ValueError as error:
            raise LocalRuntimeError(
                f"{manifest.get('kind')} {name}: {section}.{key} is not base64; stringData takes plain text"
            ) from error
    return contents


def read_secrets(folder: Path) -> dict[str, dict[str, bytes]]:
    """Read Secrets from a folder: `<name>/<key>` are contents, of `*.yaml` the Secrets are taken.

    Raises:
        LocalRuntimeError: the folder or one of its files cannot be read.
    """
    secrets: dict[str, dict[str, bytes]] = {}
    try:
        for entry in sorted(folder.iterdir()):
            if entry.is_dir():
                # A mounted Secret keeps its data behind dot-links; a copied one brings them along.
                keys = [path for path in sorted(entry.iterdir()) if path.is_file() and path.name[0] != "."]
                secrets[entry.name] = {path.name: path.read_bytes() for path in keys}
            elif entry.suffix in (".yaml", ".yml", ".json"):
                for manifest in load_secrets(entry):
                    secrets[manifest["metadata"]["name"]] = secret_contents(manifest)
    except OSError as error:
        raise LocalRuntimeError(f"--secrets {folder}: {error.filename}: {error.strerror}") from error
    except ManifestError as error:
        raise LocalRuntimeError(f"--secrets {folder}: {error}") from error
    return secrets
