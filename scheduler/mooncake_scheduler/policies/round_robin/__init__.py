from mooncake_scheduler.policies.round_robin.policy import RoundRobin

__all__ = ["RoundRobin"]
