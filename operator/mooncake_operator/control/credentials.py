"""Secrets that the operator makes once and then keeps, and Secrets of others that must be there."""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable

from mooncake_core.api import MooncakeCluster
from mooncake_operator.control.gather import World
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import NotFoundError
from mooncake_operator.kube.resources import SECRET, Object, controller_uid
from mooncake_operator.planning import Credentials, reasons
from mooncake_operator.planning.actions import Finding

_TOKEN_BYTES = 32


def _token() -> str:
    return secrets.token_hex(_TOKEN_BYTES)


def kept_credentials(world: World, cluster: MooncakeCluster, make: Callable[[], str] = _token) -> Credentials:
    """What the cluster's own Secrets hold; made new where they hold nothing.

    Only Secrets that the cluster controls are believed: a foreign one would give its author the cluster.
    """
    name, uid = cluster.metadata.name, cluster.metadata.uid or ""

    def kept(secret: str, key: str) -> str:
        found = world.find("Secret", secret)
        value = _value(found, key) if found is not None and controller_uid(found) == uid else ""
        return value or make()

    return Credentials(
        redis_password=kept(f"{name}-redis", "password"), admin_token=kept(f"{name}-admin", "token")
    )


async def missing_secrets(client: Client, cluster: MooncakeCluster) -> list[Finding]:
    """Secrets that the cluster refers to and that are not there, or lack the key.

    Raises:
        KubeError: they cannot be read.
    """
    scheduler = cluster.spec.scheduler
    wanted: list[tuple[str, str, str]] = []
    if keys := scheduler.auth.api_key_secret_ref:
        wanted.append(("scheduler.auth.apiKeySecretRef", keys.name, keys.key))
    if scheduler.redis is not None and scheduler.redis.secret_ref is not None:
        wanted.append(("scheduler.redis.secretRef", scheduler.redis.secret_ref.name, "url"))
    namespace = cluster.metadata.namespace
    findings = []
    for field, name, key in wanted:
        try:
            secret = await client.get(SECRET, namespace, name)
        except NotFoundError:
            what = f"there is no Secret {name} in namespace {namespace}; make it with the key {key}"
            findings.append(Finding(reasons.REFERENCE_MISSING, f"spec.{field}: {what}"))
            continue
        if key not in (secret.get("data") or {}):
            what = f"Secret {name} in namespace {namespace} has no key {key}; add it"
            findings.append(Finding(reasons.REFERENCE_MISSING, f"spec.{field}: {what}"))
    return findings


def encoded(secret: Object) -> Object:
    """A Secret with `data` instead of `stringData`, which the API server takes and never gives back."""
    if "stringData" not in secret:
        return secret
    data = {key: base64.b64encode(text.encode()).decode() for key, text in secret["stringData"].items()}
    rest = {field: value for field, value in secret.items() if field != "stringData"}
    return {**rest, "data": {**rest.get("data", {}), **data}}


def _value(secret: Object, key: str) -> str:
    try:
        return base64.b64decode((secret.get("data") or {}).get(key, ""), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
