"""The ways of placing a request, by the name they have in a manifest. One folder each, with a README."""

from mooncake_scheduler.policies.registry import UnknownPolicyError, create, names

__all__ = ["UnknownPolicyError", "create", "names"]
