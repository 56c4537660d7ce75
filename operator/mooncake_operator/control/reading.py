"""From live objects to checked models: what a user wrote, without what servers have added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mooncake_core.api import ManifestError, MooncakeCluster, Pool, parse_object
from mooncake_operator.planning import reasons
from mooncake_operator.planning.actions import Finding

_METADATA = ("name", "namespace", "uid", "labels", "annotations", "generation", "deletionTimestamp")


def read_cluster(live: Mapping[str, Any]) -> MooncakeCluster | Finding:
    """The cluster, or what is wrong with its spec."""
    read = _read(live)
    return read if isinstance(read, MooncakeCluster | Finding) else _not_one(live)


def read_pool(live: Mapping[str, Any]) -> Pool | Finding:
    """The pool, or what is wrong with its spec."""
    read = _read(live)
    return _not_one(live) if isinstance(read, MooncakeCluster) else read


def _read(live: Mapping[str, Any]) -> MooncakeCluster | Pool | Finding:
    metadata = {field: value for field, value in live["metadata"].items() if field in _METADATA}
    content = {
        "apiVersion": live["apiVersion"],
        "kind": live["kind"],
        "metadata": metadata,
        "spec": live.get("spec"),
    }
    try:
        return parse_object(content)
    except ManifestError as error:
        prefix = f"manifest: {live['kind']}/{live['metadata']['name']}: "
        return Finding(
            reasons.INVALID_SPEC, "; ".join(problem.removeprefix(prefix) for problem in error.problems)
        )


def _not_one(live: Mapping[str, Any]) -> Finding:
    return Finding(reasons.INVALID_SPEC, f"{live['kind']} is not what is expected here")
