"""Fixtures of every room's tests."""

from mooncake_testing.redis import redis_server, shared_redis

__all__ = ["redis_server", "shared_redis"]
