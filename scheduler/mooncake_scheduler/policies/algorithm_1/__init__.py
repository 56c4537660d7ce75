from mooncake_scheduler.policies.algorithm_1.policy import Algorithm1

__all__ = ["Algorithm1"]
