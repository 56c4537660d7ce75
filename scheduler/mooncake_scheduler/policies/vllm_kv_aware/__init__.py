from mooncake_scheduler.policies.vllm_kv_aware.policy import VllmKvAware

__all__ = ["VllmKvAware"]
