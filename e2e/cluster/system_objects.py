"""Objects that every cluster has and no program makes: the DNS Service and what its server may read."""

from typing import Any

from e2e.cluster.layout import Layout

_LABELS = {"app.kubernetes.io/part-of": "mooncake-e2e"}


def system_objects(layout: Layout) -> dict[str, Any]:
    """A List to apply. CoreDNS runs beside the kubelet, so the endpoint of its Service is written out."""
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [_dns_service(layout), _dns_endpoint(layout), _dns_role(), _dns_binding()],
    }


def _dns_service(layout: Layout) -> dict[str, Any]:
    ports = [{"name": protocol.lower(), "port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": "kube-dns",
            "namespace": "kube-system",
            "labels": {**_LABELS, "k8s-app": "kube-dns"},
        },
        "spec": {"clusterIP": layout.dns_service_ip, "ports": ports},
    }


def _dns_endpoint(layout: Layout) -> dict[str, Any]:
    ports = [{"name": protocol.lower(), "port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
    labels = {**_LABELS, "kubernetes.io/service-name": "kube-dns"}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": labels},
        "addressType": "IPv4",
        "ports": ports,
        "endpoints": [{"addresses": [layout.node_ip], "conditions": {"ready": True}}],
    }


def _dns_role() -> dict[str, Any]:
    reads = ["list", "watch"]
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "mooncake-e2e-dns", "labels": _LABELS},
        "rules": [
            {"apiGroups": [""], "resources": ["services", "namespaces"], "verbs": reads},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": reads},
        ],
    }


def _dns_binding() -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "mooncake-e2e-dns", "labels": _LABELS},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "mooncake-e2e-dns",
        },
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "mooncake-e2e-dns"}],
    }
