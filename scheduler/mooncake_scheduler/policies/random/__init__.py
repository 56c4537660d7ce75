"""The policy `random`."""  # noqa: A005 - named as users write it

from mooncake_scheduler.policies.random.policy import Random

__all__ = ["Random"]
