"""Reading manifests: YAML of several documents in, checked objects out, every problem named at once."""

from __future__ import annotations

import base64
import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from mooncake_core.api.base import API_VERSION, ApiModel
from mooncake_core.api.cluster import MooncakeCluster
from mooncake_core.api.complaints import complaints
from mooncake_core.api.kvcache import MooncakeKVCachePool
from mooncake_core.api.pools import MooncakeDecodePool, MooncakePrefillPool

Pool: TypeAlias = MooncakePrefillPool | MooncakeDecodePool | MooncakeKVCachePool
Object: TypeAlias = MooncakeCluster | Pool
KubernetesObject: TypeAlias = dict[str, Any]

KINDS: Mapping[str, type[Object]] = {
    "MooncakeCluster": MooncakeCluster,
    "MooncakePrefillPool": MooncakePrefillPool,
    "MooncakeDecodePool": MooncakeDecodePool,
    "MooncakeKVCachePool": MooncakeKVCachePool,
}
_CORE_KINDS = ("Secret", "ConfigMap")
_NO_FILE = "manifest"
_LARGEST = 4_000_000
"""Characters of a file; etcd takes 1.5 MB an object, and reading YAML takes a second for 100 000."""


class ManifestError(Exception):
    """Manifests that cannot be used; one line a problem.

    `<file>: <kind>/<name>: <path>: <what is wrong>; <what to write>`.
    """

    def __init__(self, problems: list[str]) -> None:
        """Take the lines."""
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class _Document:
    file: str
    number: int
    content: Any

    @property
    def where(self) -> str:
        if not isinstance(self.content, dict):
            return f"{self.file}: document {self.number}"
        metadata = self.content.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        kind = self.content.get("kind")
        if not isinstance(kind, str) or not isinstance(name, str):
            return f"{self.file}: document {self.number}"
        return f"{self.file}: {kind}/{name}"


def load_manifests(source: str | Path) -> list[Object | KubernetesObject]:
    """Read and check all documents of a file, of a folder's `*.yaml` and `*.yml`, or of a YAML text.

    Args:
        source: a Path, the path of an existing file, or YAML text.

    Returns:
        The Mooncake objects as models; Secrets and ConfigMaps of core/v1 as the dictionaries they are.

    Raises:
        ManifestError: something cannot be read or is wrong; every problem found is listed.
    """
    problems: list[str] = []
    return _checked(_documents(source, problems), problems, _label(source))


def parse_manifests(text: str, *, file: str = _NO_FILE) -> list[Object | KubernetesObject]:
    """Check all documents of a YAML text that was read already; as `load_manifests`.

    Args:
        text: the YAML.
        file: where it comes from, for messages.

    Raises:
        ManifestError: as `load_manifests`.
    """
    problems: list[str] = []
    return _checked(_parsed(file, text, problems), problems, file)


def load_secrets(source: str | Path) -> list[KubernetesObject]:
    """Read and check the Secrets alone, wherever `load_manifests` would read; there need not be any.

    Raises:
        ManifestError: something cannot be read, or a Secret is wrong; every problem found is listed.
    """
    problems: list[str] = []
    documents = (
        document
        for document in _documents(source, problems)
        if isinstance(document.content, dict) and document.content.get("kind") == "Secret"
    )
    objects = _objects(documents, problems)
    if problems:
        raise ManifestError(problems)
    return [secret for secret in objects if isinstance(secret, dict)]


def _checked(
    documents: Iterable[_Document], problems: list[str], label: str
) -> list[Object | KubernetesObject]:
    objects = _objects(documents, problems)
    if not problems and not objects:
        problems.append(f"{label}: no documents; write at least a MooncakeCluster")
    if problems:
        raise ManifestError(problems)
    return objects


def _objects(documents: Iterable[_Document], problems: list[str]) -> list[Object | KubernetesObject]:
    """The objects of all documents; problems are those of reading, as far as they are known yet."""
    objects: list[Object | KubernetesObject] = []
    for document in documents:
        read = _object(document, problems)
        if read is not None:
            objects.append(read)
            problems += _clashes(document, objects)
    return objects


def parse_object(content: Mapping[str, Any], *, file: str = _NO_FILE) -> Object:
    """Check one Mooncake object that was read already.

    Raises:
        ManifestError: as `load_manifests`.
    """
    problems: list[str] = []
    read = _object(_Document(file, 1, dict(content)), problems)
    if problems or not isinstance(read, ApiModel):
        raise ManifestError(problems or [f"{file}: {content.get('kind')}: is not a Mooncake kind"])
    return read


def _documents(source: str | Path, problems: list[str]) -> Iterator[_Document]:
    if isinstance(source, str) and "\n" not in source and not Path(source).exists():
        if ":" not in source:
            problems.append(f"{source}: no such file")
            return
    elif isinstance(source, Path) or "\n" not in source:
        yield from _files(Path(source), problems)
        return
    yield from _parsed(_NO_FILE, str(source), problems)


def _files(path: Path, problems: list[str]) -> Iterator[_Document]:
    try:
        files = (
            sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".yml"))
            if path.is_dir()
            else [path]
        )
    except OSError as error:
        problems.append(f"{path}: {error.strerror}")
        return
    for file in files:
        try:
            text = manifest_text(file)
        except ManifestError as error:
            problems += error.problems
            continue
        yield from _parsed(str(file), text, problems)


def manifest_text(file: Path) -> str:
    """What is in a manifest file, for `parse_manifests`.

    Raises:
        ManifestError: it cannot be read, or is no manifest by its size alone.
    """
    try:
        with file.open(encoding="utf-8") as opened:
            text = opened.read(_LARGEST + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError([f"{file}: {getattr(error, 'strerror', None) or error}"]) from error
    if len(text) > _LARGEST:
        said = f"more than {_LARGEST:,} characters; a Kubernetes API server takes no object of that size"
        raise ManifestError([f"{file}: {said}"])
    return text


def _parsed(file: str, text: str, problems: list[str]) -> Iterator[_Document]:
    # The other users of the models (schedulers, sidecars) read no YAML and do not need the package.
    import yaml

    from mooncake_core.api.yaml_loader import ManifestLoader

    try:
        for number, content in enumerate(yaml.load_all(text, ManifestLoader), start=1):
            if content is not None:
                yield _Document(file, number, content)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problems.append(f"{file}{position}: not YAML: {error.problem or error.context}")
    except yaml.YAMLError as error:
        problems.append(f"{file}: not YAML: {error}".replace("\n", " "))
    except RecursionError:
        problems.append(f"{file}: nested too deeply; no manifest has that many levels")


def _object(document: _Document, problems: list[str]) -> Object | KubernetesObject | None:
    content = document.content
    if not isinstance(content, dict):
        problems.append(f"{document.where}: must be a mapping with apiVersion, kind, metadata and spec")
        return None
    kind, api_version = content.get("kind"), content.get("apiVersion")
    if kind in _CORE_KINDS:
        if api_version == "v1":
            return _core_object(document, problems)
        problems.append(f"{document.where}: apiVersion: must be v1 (got {api_version or 'nothing'})")
        return None
    model = KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        problems.append(f"{document.where}: kind: {_unknown_kind(kind)}")
        return None
    if api_version != API_VERSION:
        problems.append(
            f"{document.where}: apiVersion: must be {API_VERSION} (got {api_version or 'nothing'})"
        )
        return None
    try:
        return model.model_validate(content)
    except ValidationError as error:
        lines = complaints(model, error)
        problems += [f"{document.where}: {f'{at}: ' if at else ''}{message}" for at, message in lines]
        return None


def _core_object(document: _Document, problems: list[str]) -> KubernetesObject | None:
    content: KubernetesObject = document.content
    found = [*_core_metadata(content), *_core_data(content)]
    known = {"apiVersion", "kind", "metadata", "data", "stringData", "binaryData", "type", "immutable"}
    # Keys need not be words.
    found += [f"{field}: unknown field; remove it" for field in sorted(map(str, content.keys() - known))]
    problems += [f"{document.where}: {problem}" for problem in found]
    return None if found else content


def _core_metadata(content: KubernetesObject) -> Iterator[str]:
    metadata = content.get("metadata")
    if not isinstance(metadata, dict) or not metadata.get("name"):
        yield "metadata.name: is required; write the name of the object"
        return
    for field in ("name", "namespace"):
        # Null is absent, as on the API server.
        if not isinstance(metadata.get(field), str | None):
            yield f"metadata.{field}: must be text (got {metadata[field]}); write it in quotes"


def _core_data(content: KubernetesObject) -> Iterator[str]:
    """What the API server would refuse of a Secret or a ConfigMap."""
    in_base64 = ("data", "binaryData") if content["kind"] == "Secret" else ("binaryData",)
    for section in ("data", "stringData", "binaryData"):
        entries = content.get(section)
        if entries is None:
            continue
        if not isinstance(entries, dict):
            yield f"{section}: must be a mapping of keys to texts; write e.g. {{key: text}}"
            continue
        for key, text in entries.items():
            if not isinstance(text, str):
                # What it is instead stays unsaid: it may be secret.
                yield f"{section}.{key}: must be text; write it in quotes"
            elif section in in_base64 and not _is_base64(text):
                yield f"{section}.{key}: is not base64; {_plain_section(content)} takes plain text"


def from_base64(text: str) -> bytes:
    """What `data` of a Secret or `binaryData` stands for; lines may be broken, as the API server has it.

    Raises:
        ValueError: it is no base64.
    """
    return base64.b64decode(text.replace("\r", "").replace("\n", ""), validate=True)


def _is_base64(text: str) -> bool:
    try:
        from_base64(text)
    except ValueError:
        return False
    return True


def _plain_section(content: KubernetesObject) -> str:
    return "stringData" if content["kind"] == "Secret" else "data"


def _unknown_kind(kind: Any) -> str:
    known = [*KINDS, *_CORE_KINDS]
    if not kind:
        return f"is required; write one of {', '.join(known)}"
    if close := difflib.get_close_matches(str(kind), known, n=1, cutoff=0.6):
        return f"{kind} is not known; did you mean {close[0]}?"
    return f"{kind} is not known; write one of {', '.join(known)}"


def _clashes(document: _Document, objects: list[Object | KubernetesObject]) -> Iterator[str]:
    """Names of the newest object that an earlier one already takes."""
    earlier = {identity for item in objects[:-1] for identity in _identities(item)}
    for kind, namespace, name in _identities(objects[-1]):
        if (kind, namespace, name) in earlier:
            yield f"{document.where}: {kind} {name} is there twice in namespace {namespace}; rename one"


def _identities(item: Object | KubernetesObject) -> Iterator[tuple[str, str, str]]:
    """(kind, namespace, name) of an object and of the pool objects its inline entries become."""
    if isinstance(item, dict):
        metadata = item["metadata"]
        yield item["kind"], metadata.get("namespace") or "default", metadata["name"]
        return
    namespace, name = item.metadata.namespace, item.metadata.name
    if not isinstance(item, MooncakeCluster):
        # Pods are called after the pool alone, hence no two pools of one name, whatever their kinds.
        yield "pool", namespace, name
        return
    yield item.kind, namespace, name
    for _, entry in item.spec.entries():
        yield "pool", namespace, f"{name}-{entry.name}"


def _label(source: str | Path) -> str:
    return _NO_FILE if isinstance(source, str) and "\n" in source else str(source)
