from mooncake_scheduler.policies.sglang_cache_aware.policy import SglangCacheAware

__all__ = ["SglangCacheAware"]
