"""Kubeconfig files for the cluster's own parts and for people."""

from pathlib import Path

import yaml

from e2e.cluster.layout import Layout


def write(layout: Layout, path: Path, client: str, server: str) -> None:
    """Write a kubeconfig.

    Args:
        layout: the cluster.
        path: the file.
        client: name of the client certificate.
        server: URL of the API server as seen by the client.
    """
    name = layout.network_namespace
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "clusters": [
            {"name": name, "cluster": {"server": server, "certificate-authority": str(layout.pki / "ca.crt")}}
        ],
        "users": [
            {
                "name": client,
                "user": {
                    "client-certificate": str(layout.pki / f"{client}.crt"),
                    "client-key": str(layout.pki / f"{client}.key"),
                },
            }
        ],
        "contexts": [{"name": name, "context": {"cluster": name, "user": client}}],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    path.chmod(0o600)
