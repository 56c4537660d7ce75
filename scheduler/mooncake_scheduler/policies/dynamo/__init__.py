from mooncake_scheduler.policies.dynamo.policy import Dynamo

__all__ = ["Dynamo"]
