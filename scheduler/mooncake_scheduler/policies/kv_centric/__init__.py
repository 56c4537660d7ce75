from mooncake_scheduler.policies.kv_centric.policy import KvCentric

__all__ = ["KvCentric"]
