"""A real Kubernetes cluster on one Debian machine, without Docker: see docs/adr/0021."""
