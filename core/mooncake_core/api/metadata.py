"""The parts of Kubernetes' own types that the API's objects carry."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StringConstraints

from mooncake_core.api.base import ApiModel, Rule, server_rule
from mooncake_core.api.scalars import Name, ObjectName


class ObjectMeta(ApiModel):
    """Metadata as Kubernetes knows it; what only the API server writes is accepted and not looked at."""

    name: Name
    namespace: Annotated[str, StringConstraints(min_length=1, max_length=63)] = "default"
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    uid: str | None = None
    resource_version: str | None = None
    generation: int | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    finalizers: list[str] | None = None
    owner_references: list[dict[str, Any]] | None = None
    managed_fields: list[dict[str, Any]] | None = None
    generate_name: str | None = None


class Reference(ApiModel):
    """An object of the same namespace, by name."""

    name: ObjectName


class ClusterReference(ApiModel):
    """The MooncakeCluster that a pool belongs to."""

    name: Name


CLUSTER_REF_IS_IMMUTABLE: Rule = server_rule(
    "self.clusterRef == oldSelf.clusterRef", "cannot be changed; make a new pool", at="clusterRef"
)
"""Moving a pool between clusters has no safe meaning."""
