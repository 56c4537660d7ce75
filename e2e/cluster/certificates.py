"""A certificate authority and the certificates of one cluster, made with openssl."""

import subprocess
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout

_DAYS = "30"


def create(layout: Layout) -> None:
    """Write all keys and certificates into ``layout.pki``.

    Clients: admin, kubelet, controller-manager, scheduler, proxy, dns (common name and group as RBAC's
    bootstrap policy knows them), apiserver-kubelet-client. Servers: apiserver, kubelet-server.
    """
    layout.pki.mkdir(parents=True, exist_ok=True)
    layout.pki.chmod(0o700)
    _authority(layout.pki)
    _key_pair(layout.pki, "service-account")
    client = "clientAuth"
    _certificate(layout.pki, "admin", "/O=system:masters/CN=mooncake-e2e-admin", client)
    _certificate(layout.pki, "apiserver-kubelet-client", "/O=system:masters/CN=kube-apiserver", client)
    _certificate(layout.pki, "kubelet", f"/O=system:nodes/CN=system:node:{layout.node}", client)
    for name, user in (
        ("controller-manager", "system:kube-controller-manager"),
        ("scheduler", "system:kube-scheduler"),
        ("proxy", "system:kube-proxy"),
        ("dns", "mooncake-e2e-dns"),
    ):
        _certificate(layout.pki, name, f"/CN={user}", client)
    service = f"kubernetes.default.svc.{layout.dns_domain}"
    names = ["localhost", layout.node, service]
    while "." in service:
        service = service.rpartition(".")[0]
        names.append(service)
    addresses = ["127.0.0.1", layout.node_ip, layout.apiserver_service_ip]
    alternatives = ",".join([f"DNS:{name}" for name in names] + [f"IP:{address}" for address in addresses])
    _certificate(layout.pki, "apiserver", "/CN=kube-apiserver", "serverAuth", alternatives)
    _certificate(
        layout.pki,
        "kubelet-server",
        f"/CN=system:node:{layout.node}",
        "serverAuth",
        f"DNS:{layout.node},IP:{layout.node_ip}",
    )


def _authority(pki: Path) -> None:
    _openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", _DAYS),
        *("-subj", "/CN=mooncake-e2e-ca", "-keyout", str(pki / "ca.key"), "-out", str(pki / "ca.crt")),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"),
    )


def _key_pair(pki: Path, name: str) -> None:
    _openssl("genrsa", "-out", str(pki / f"{name}.key"), "2048")
    _openssl("rsa", "-in", str(pki / f"{name}.key"), "-pubout", "-out", str(pki / f"{name}.pub"))


def _certificate(pki: Path, name: str, subject: str, usage: str, alternatives: str | None = None) -> None:
    request, extensions = pki / f"{name}.csr", pki / f"{name}.ext"
    _openssl(
        *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-subj", subject, "-keyout", str(pki / f"{name}.key"), "-out", str(request)),
    )
    lines = [
        "basicConstraints=critical,CA:FALSE",
        "keyUsage=critical,digitalSignature",
        f"extendedKeyUsage={usage}",
    ]
    if alternatives:
        lines.append(f"subjectAltName={alternatives}")
    extensions.write_text("\n".join(lines) + "\n")
    _openssl(
        *("x509", "-req", "-in", str(request), "-CA", str(pki / "ca.crt"), "-CAkey", str(pki / "ca.key")),
        *("-CAcreateserial", "-days", _DAYS, "-extfile", str(extensions), "-out", str(pki / f"{name}.crt")),
    )
    request.unlink()
    extensions.unlink()


def _openssl(*arguments: str) -> None:
    ran = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise ClusterError(f"`openssl {arguments[0]}` failed: {ran.stderr.strip()[-1000:]}")
