"""The CustomResourceDefinition of each kind: names, columns, subresources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mooncake_core.api.base import GROUP, VERSION, Rule
from mooncake_core.api.crds.schema import Schema, structural_schema, validation
from mooncake_core.api.manifests import KINDS, Object
from mooncake_core.api.scalars import MAX_NAME, NAME_PATTERN

CATEGORY = "mooncake"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of `kubectl get`."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False

    def document(self) -> Schema:
        """As `additionalPrinterColumns` has it."""
        column: Schema = {"name": self.name, "type": self.type, "jsonPath": self.path}
        return column | {"priority": 1} if self.wide else column


@dataclass(frozen=True, slots=True)
class Resource:
    """How a kind appears to kubectl."""

    plural: str
    singular: str
    short: str
    columns: tuple[Column, ...]
    scalable: bool


def _condition(kind: str, field: str) -> str:
    return f".status.conditions[?(@.type=='{kind}')].{field}"


_AGE = Column("Age", ".metadata.creationTimestamp", "date")
_POOL_COLUMNS = (
    Column("Cluster", ".spec.clusterRef.name", wide=True),
    Column("Desired", ".spec.replicas", "integer"),
    Column("Ready", ".status.readyReplicas", "integer"),
    Column("Routable", ".status.routableReplicas", "integer"),
    Column("Updated", ".status.updatedReplicas", "integer"),
    Column("Revision", ".status.updateRevision", wide=True),
    Column("Reason", _condition("Available", "reason")),
    _AGE,
)
_STORE_COLUMNS = (
    Column("Cluster", ".spec.clusterRef.name", wide=True),
    Column("Desired", ".spec.replicas", "integer"),
    Column("Ready", ".status.readyReplicas", "integer"),
    Column("Capacity", ".status.capacity"),
    Column("Used", ".status.used"),
    Column("Revision", ".status.updateRevision", wide=True),
    Column("Reason", _condition("Available", "reason")),
    _AGE,
)
_CLUSTER_COLUMNS = (
    Column("Prefill", ".status.prefill"),
    Column("Decode", ".status.decode"),
    Column("KV", ".status.kv"),
    Column("TTFT", ".status.ttft"),
    Column("TBT", ".status.tbt"),
    Column("Ready", _condition("Ready", "status")),
    Column("Reason", _condition("Ready", "reason")),
    Column("Endpoint", ".status.endpoint", wide=True),
    _AGE,
)

RESOURCES: Mapping[str, Resource] = {
    "MooncakeCluster": Resource("mooncakeclusters", "mooncakecluster", "mkc", _CLUSTER_COLUMNS, False),
    "MooncakePrefillPool": Resource(
        "mooncakeprefillpools", "mooncakeprefillpool", "mkpp", _POOL_COLUMNS, True
    ),
    "MooncakeDecodePool": Resource("mooncakedecodepools", "mooncakedecodepool", "mkdp", _POOL_COLUMNS, True),
    "MooncakeKVCachePool": Resource(
        "mooncakekvcachepools", "mooncakekvcachepool", "mkkv", _STORE_COLUMNS, True
    ),
}

_NAME_RULE = Rule(
    lambda item: len(item.metadata.name) <= MAX_NAME,
    f"size(self.metadata.name) <= {MAX_NAME} && self.metadata.name.matches('{NAME_PATTERN}')",
    "metadata.name must be small letters, digits and '-', begin with a letter and have at most"
    f" {MAX_NAME} characters; write e.g. kimi",
)


def definitions() -> dict[str, Schema]:
    """All definitions by file name."""
    return {f"{RESOURCES[kind].plural}.yaml": definition(kind) for kind in KINDS}


def definition(kind: str) -> Schema:
    """The CustomResourceDefinition of one kind.

    Raises:
        KeyError: there is no such kind.
    """
    resource = RESOURCES[kind]
    subresources: dict[str, Any] = {"status": {}}
    if resource.scalable:
        subresources["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _root_schema(KINDS[kind])},
        "subresources": subresources,
        # So that a cluster's pools can be asked for: those written on their own bear no label of it.
        **({"selectableFields": [{"jsonPath": ".spec.clusterRef.name"}]} if resource.scalable else {}),
        "additionalPrinterColumns": [column.document() for column in resource.columns],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{resource.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": resource.plural,
                "singular": resource.singular,
                "shortNames": [resource.short],
                "categories": [CATEGORY],
            },
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def _root_schema(model: type[Object]) -> Schema:
    schema = structural_schema(model)
    # These three belong to the API server, which takes no schema of them but their types.
    schema["properties"] |= {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
    }
    schema["required"] = ["spec"]
    rules = schema.get("x-kubernetes-validations", [])
    schema["x-kubernetes-validations"] = [validation(_NAME_RULE), *rules]
    return schema
