"""A server that behaves towards a router as one vLLM engine does, timed by the cost model (ADR 0014)."""
