"""Fixtures of every room's tests."""

import asyncio

from hypothesis import settings

from mooncake_testing.redis import client, redis_server, shared_redis

__all__ = ["client", "redis_server", "shared_redis"]

# How long an example takes says more of the machine's other work than of the code under test.
# The same examples in each run: what has just been changed is what a failure tells of. Others are looked for
# by `make explore`; what it finds is written down as an example of its test.
settings.register_profile("any-machine", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("any-machine")

# pytest-asyncio asks for the present loop before each test, and asyncio makes one that nobody closes unless
# it was told that there is none.
asyncio.set_event_loop(None)
