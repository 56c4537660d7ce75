"""The Kubernetes API server, as the operator speaks to it."""
