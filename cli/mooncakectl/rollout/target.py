"""Which object a command is about, and the way to it: `cluster/kimi`, `prefillpool/fast`, a kubeconfig."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from kubernetes.aio import config
from kubernetes.aio.client import Configuration

from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import KubeError, NotFoundError, PreconditionError
from mooncake_operator.kube.resources import (
    CLUSTER,
    CONTROLLER_REVISION,
    DECODE_POOL,
    KV_CACHE_POOL,
    POOLS,
    PREFILL_POOL,
    Object,
    Resource,
    controller_uid,
    name_of,
    uid_of,
)
from mooncakectl.console import CommandError

MANAGER = "mooncakectl"
_TRIES = 5
_SHORT: Mapping[Resource, tuple[str, ...]] = {
    CLUSTER: ("cluster", "mkc"),
    PREFILL_POOL: ("prefillpool", "mkpp"),
    DECODE_POOL: ("decodepool", "mkdp"),
    KV_CACHE_POOL: ("kvcachepool", "mkkv"),
}
_WORDS = {
    word: resource
    for resource, short in _SHORT.items()
    for word in (*short, resource.kind.lower(), resource.plural)
}
_REMEDY = "set KUBECONFIG, or write --kubeconfig FILE"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the person at the terminal wants to look; None = as the kubeconfig says."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A live object and the way to it."""

    client: Client
    namespace: str
    resource: Resource
    live: Object

    @property
    def name(self) -> str:
        """As `kubectl` would call it, e.g. `MooncakeCluster kimi`."""
        return f"{self.resource.kind} {name_of(self.live)}"

    @property
    def written_as(self) -> str:
        """As it is written on this command line."""
        return f"{_SHORT[self.resource][0]}/{name_of(self.live)}"

    async def revisions(self) -> list[Object]:
        """The ControllerRevisions that it owns."""
        found = await self.client.list_all(CONTROLLER_REVISION, self.namespace)
        return [revision for revision in found if controller_uid(revision) == uid_of(self.live)]

    async def pools(self) -> list[Object]:
        """The pools of a cluster, whoever wrote them; a pool itself."""
        if self.resource is not CLUSTER:
            return [self.live]
        found = [pool for kind in POOLS for pool in await self.client.list_all(kind, self.namespace)]
        return [pool for pool in found if pool["spec"]["clusterRef"]["name"] == name_of(self.live)]

    async def again(self) -> Target:
        """The same object as it is now."""
        live = await self.client.get(self.resource, self.namespace, name_of(self.live))
        return Target(self.client, self.namespace, self.resource, live)

    async def change(self, new_spec: Callable[[Object], Object]) -> Object:
        """Write another spec, worked out from the live one; again where somebody else wrote meanwhile."""
        live = self.live
        for _ in range(_TRIES):
            try:
                return await self.client.replace({**live, "spec": new_spec(live["spec"])}, manager=MANAGER)
            except PreconditionError:
                live = (await self.again()).live
        raise CommandError(f"{self.name} is being written by others all the time; try again")

    def must_be_its_own(self, command: str) -> None:
        """Pools that a cluster made are decided on there.

        Raises:
            CommandError: it is one of those; says what to write.
        """
        for reference in self.live["metadata"].get("ownerReferences", ()):
            if reference["kind"] == CLUSTER.kind:
                raise CommandError(
                    f"{self.name} is an entry of MooncakeCluster {reference['name']}, which decides on its"
                    f" spec; write mooncakectl rollout {command} cluster/{reference['name']}"
                )


def parse(text: str) -> tuple[Resource, str]:
    """`kimi` and `cluster/kimi` are clusters; pools need their kind.

    Raises:
        CommandError: no such kind; names those there are.
    """
    kind, slash, name = text.partition("/")
    if not slash:
        return CLUSTER, text
    resource = _WORDS.get(kind.lower())
    if resource is None or not name:
        known = ", ".join(f"{short[0]}/NAME" for short in _SHORT.values())
        raise CommandError(f"{text}: write {known}")
    return resource, name


@asynccontextmanager
async def reached(text: str, place: Place) -> AsyncIterator[Target]:
    """The object that was named, and a client for as long as the context lasts.

    Raises:
        CommandError: there is no such cluster or object, or what is tried with it is refused.
    """
    resource, name = parse(text)
    configuration, namespace = await _configuration(place)
    try:
        async with Client(configuration) as client:
            try:
                live = await client.get(resource, namespace, name)
            except NotFoundError as error:
                raise CommandError(
                    f"there is no {resource.kind} {name} in namespace {namespace};"
                    f" kubectl get mooncake -n {namespace} lists what there is"
                ) from error
            yield Target(client, namespace, resource, live)
    except (KubeError, ssl.SSLError) as error:
        raise CommandError(f"the API server at {configuration.host}: {error}") from error


async def _configuration(place: Place) -> tuple[Configuration, str]:
    named, files = _files(place)
    found = Configuration()
    try:
        await config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=named, context=place.context, client_configuration=found, persist_config=False
        )
        contexts, current = config.list_kube_config_contexts(config_file=named)  # type: ignore[no-untyped-call]
        chosen = next((c for c in contexts if c["name"] == place.context), current)
        namespace = chosen["context"].get("namespace")
    except (config.ConfigException, OSError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise CommandError(f"no Kubernetes cluster: {files}: {said}; {_REMEDY}") from error
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        # What its reader stumbles over in a file of another kind.
        raise CommandError(f"no Kubernetes cluster: {files} is no kubeconfig; {_REMEDY}") from error
    return found, place.namespace or namespace or "default"


def _files(place: Place) -> tuple[str | None, str]:
    """The kubeconfig as the client takes it, and as people call it: one file, or several with colons."""
    named = str(place.kubeconfig) if place.kubeconfig is not None else os.environ.get("KUBECONFIG") or None
    files = named or "~/.kube/config"
    if not any(Path(file).expanduser().exists() for file in files.split(os.pathsep)):
        raise CommandError(f"no Kubernetes cluster: there is no {files}; {_REMEDY}")
    return named, files
