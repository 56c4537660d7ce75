from mooncake_scheduler.policies.cache_aware.policy import CacheAware

__all__ = ["CacheAware"]
