"""What `mooncakectl rollout` does with clusters and pools on Kubernetes."""
