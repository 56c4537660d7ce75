from mooncake_scheduler.policies.llm_d_weighted.policy import LlmDWeighted

__all__ = ["LlmDWeighted"]
