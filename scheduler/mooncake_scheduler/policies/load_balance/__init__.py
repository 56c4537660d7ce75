from mooncake_scheduler.policies.load_balance.policy import LoadBalance

__all__ = ["LoadBalance"]
