"""Fixtures of every room's tests."""

from hypothesis import settings
from mooncake_testing.redis import redis_server, shared_redis

__all__ = ["redis_server", "shared_redis"]

# How long an example takes says more of the machine's other work than of the code under test.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")
