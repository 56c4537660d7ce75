"""The desired world of a cluster as Kubernetes objects: one module a kind of Pod."""
