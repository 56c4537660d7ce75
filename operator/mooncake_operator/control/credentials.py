"""Secrets that the operator makes once and then keeps, and Secrets of others that must be there."""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from mooncake_core.api import MooncakeCluster
from mooncake_core.resp.address import Address
from mooncake_operator.control.gather import World
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import NotFoundError
from mooncake_operator.kube.resources import SECRET, Object, controller_uid, name_of, uid_of
from mooncake_operator.planning import Credentials, reasons
from mooncake_operator.planning.actions import Finding
from mooncake_operator.planning.manifests.redis import is_password
from mooncake_operator.planning.manifests.scheduler import TOKEN_KEY
from mooncake_operator.planning.manifests.sharing import PASSWORD_KEY

_TOKEN_BYTES = 32


class _Wanted(NamedTuple):
    """A key of a Secret that a field of the spec names."""

    field: str
    name: str
    key: str
    usable: Callable[[str], bool]
    form: str
    """What to write into it."""


def _token() -> str:
    return secrets.token_hex(_TOKEN_BYTES)


def kept_credentials(world: World, cluster: MooncakeCluster, make: Callable[[], str] = _token) -> Credentials:
    """What the cluster's own Secrets hold; made new where they hold nothing.

    Only Secrets that the cluster controls are believed: a foreign one would give its author the cluster.
    """
    name, uid = cluster.metadata.name, cluster.metadata.uid or ""
    return Credentials(
        redis_password=kept_redis_password(world, cluster) or make(),
        admin_token=_kept(world, uid, f"{name}-admin", TOKEN_KEY) or make(),
    )


def kept_redis_password(world: World, cluster: MooncakeCluster) -> str:
    """Password of the managed Redis; empty = there is none that can be used."""
    kept = _kept(world, cluster.metadata.uid or "", f"{cluster.metadata.name}-redis", PASSWORD_KEY)
    return kept if is_password(kept) else ""


def kept_admin_token(world: World) -> str:
    """Token of the schedulers' admin port, also where the spec cannot be read; empty = there is none."""
    if world.cluster is None:
        return ""
    return _kept(world, uid_of(world.cluster), f"{name_of(world.cluster)}-admin", TOKEN_KEY)


def _kept(world: World, uid: str, secret: str, key: str) -> str:
    found = world.find("Secret", secret)
    return _value(found, key) if found is not None and controller_uid(found) == uid else ""


async def secret_findings(client: Client, cluster: MooncakeCluster) -> list[Finding]:
    """Secrets that the cluster refers to and that are not there, lack the key, or hold what nobody can use.

    What a Secret holds is never part of a message.

    Raises:
        KubeError: they cannot be read.
    """
    scheduler, namespace = cluster.spec.scheduler, cluster.metadata.namespace
    wanted: list[_Wanted] = []
    if keys := scheduler.auth.api_key_secret_ref:
        field = "scheduler.auth.apiKeySecretRef"
        wanted.append(_Wanted(field, keys.name, keys.key, _is_object, "a JSON object of name → key"))
    if scheduler.redis is not None and scheduler.redis.secret_ref is not None:
        field = "scheduler.redis.secretRef"
        name = scheduler.redis.secret_ref.name
        wanted.append(_Wanted(field, name, "url", _is_redis_url, "redis://[user:password@]host[:port][/db]"))
    found = [await _secret_finding(client, namespace, each) for each in wanted]
    return [finding for finding in found if finding is not None]


async def _secret_finding(client: Client, namespace: str, wanted: _Wanted) -> Finding | None:
    where = f"Secret {wanted.name} in namespace {namespace}"
    try:
        secret = await client.get(SECRET, namespace, wanted.name)
    except NotFoundError:
        what = f"there is no {where}; make it with the key {wanted.key}"
        return Finding(reasons.REFERENCE_MISSING, f"spec.{wanted.field}: {what}")
    if wanted.key not in (secret.get("data") or {}):
        what = f"{where} has no key {wanted.key}; add it"
        return Finding(reasons.REFERENCE_MISSING, f"spec.{wanted.field}: {what}")
    if not wanted.usable(_value(secret, wanted.key).strip()):
        what = f"the key {wanted.key} of {where} cannot be used; write {wanted.form} into it"
        return Finding(reasons.REFERENCE_INVALID, f"spec.{wanted.field}: {what}")
    return None


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except msgspec.DecodeError:
        return False


def _is_redis_url(text: str) -> bool:
    try:
        Address.parse(text)
    except ValueError:
        return False
    return True


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
