"""Where the API server is and who we are there: inside a Pod its service account, else the kubeconfig."""

from __future__ import annotations

import os
from pathlib import Path

from kubernetes.aio import config
from kubernetes.aio.client import Configuration

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


def in_a_pod() -> bool:
    """Whether a service account's token is there, and no kubeconfig was asked for by `KUBECONFIG`."""
    return not os.environ.get("KUBECONFIG") and _SERVICE_ACCOUNT.exists()


class NoClusterError(Exception):
    """No credentials were found."""


async def find_configuration() -> Configuration:
    """Credentials from the service account, or from `KUBECONFIG` or `~/.kube/config`.

    A kubeconfig that `KUBECONFIG` names goes first, so that an operator can be run by hand inside a Pod.

    Raises:
        NoClusterError: neither is there, or it cannot be used; says what to set.
    """
    found = Configuration()
    try:
        if in_a_pod():
            config.load_incluster_config(client_configuration=found)  # type: ignore[no-untyped-call]
        else:
            explicit = os.environ.get("KUBECONFIG") or None
            await config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=explicit, client_configuration=found
            )
    except (config.ConfigException, OSError) as error:
        raise NoClusterError(f"no Kubernetes cluster: {error}; set KUBECONFIG to a kubeconfig") from error
    return found
