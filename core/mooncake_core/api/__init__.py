"""The Kubernetes API `mooncake.io/v1alpha1`: models, defaults, validation, and reading of manifests."""

from mooncake_core.api.base import API_VERSION, GROUP, VERSION
from mooncake_core.api.cluster import MooncakeCluster, MooncakeClusterSpec
from mooncake_core.api.kvcache import KVCachePoolEntry, KVCachePoolSpec, MooncakeKVCachePool
from mooncake_core.api.manifests import (
    KINDS,
    ManifestError,
    Object,
    Pool,
    from_base64,
    load_manifests,
    load_secrets,
    manifest_text,
    parse_manifests,
    parse_object,
)
from mooncake_core.api.pools import (
    EnginePoolEntry,
    EnginePoolSpec,
    MooncakeDecodePool,
    MooncakePrefillPool,
)

__all__ = [
    "API_VERSION",
    "GROUP",
    "KINDS",
    "VERSION",
    "EnginePoolEntry",
    "EnginePoolSpec",
    "KVCachePoolEntry",
    "KVCachePoolSpec",
    "ManifestError",
    "MooncakeCluster",
    "MooncakeClusterSpec",
    "MooncakeDecodePool",
    "MooncakeKVCachePool",
    "MooncakePrefillPool",
    "Object",
    "Pool",
    "from_base64",
    "load_manifests",
    "load_secrets",
    "manifest_text",
    "parse_manifests",
    "parse_object",
]
