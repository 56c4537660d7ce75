"""A real API server for tests: etcd and kube-apiserver as plain processes, without nodes ("envtest").

The whole cluster of e2e/ is not needed to see whether the operator and the API server understand each other.
The programs are looked for where `make e2e` keeps them; tests that need them are skipped where they are not.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from mooncake_core.api.crds.definitions import RESOURCES
from mooncake_testing.ports import free_port

_CRDS = Path(__file__).resolve().parents[3] / "crds"
_TOKEN = "tests-only"
_PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager")


class ProgramsMissingError(Exception):
    """etcd or kube-apiserver is not on this machine."""


def find_program(name: str) -> Path:
    """Path of one of Kubernetes' programs.

    Raises:
        ProgramsMissingError: it is nowhere.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mooncake" / "k8s"
    candidates = [Path(assets) / name] if (assets := os.environ.get("KUBEBUILDER_ASSETS")) else []
    candidates += sorted(cache.glob(f"v1.*/{name}"), reverse=True)
    if on_path := shutil.which(name):
        candidates.append(Path(on_path))
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    raise ProgramsMissingError(f"no {name}: `make e2e-programs` builds it, or set KUBEBUILDER_ASSETS")


class ApiServer:
    """A control plane of one API server; `stop` ends all of it."""

    def __init__(self, directory: Path, arguments: Sequence[str] = ()) -> None:
        """Start it; returns when it is ready and knows the product's kinds.

        Args:
            directory: for its files.
            arguments: more of the API server's; the last one of a flag counts.

        Raises:
            ProgramsMissingError: a program is missing.
            RuntimeError: it does not start; says what it wrote last.
        """
        self._programs = {name: find_program(name) for name in _PROGRAMS}
        self.directory = directory
        self._arguments = arguments
        self.port = free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._keys()
        try:
            self._start_etcd()
            self.start()
            self._install_crds()
            # After the CRDs: the garbage collector looks for new kinds every 30 s only.
            self._start_controllers()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        """Base URL."""
        return f"https://127.0.0.1:{self.port}"

    @property
    def kubeconfig(self) -> Path:
        """A kubeconfig of an administrator."""
        return self.write_kubeconfig("admin", _TOKEN)

    def write_kubeconfig(self, name: str, token: str, *, server: str = "") -> Path:
        """A kubeconfig of somebody else, or by way of a proxy."""
        path = self.directory / f"{name}.kubeconfig"
        certificate = str(self.directory / "apiserver" / "apiserver.crt")
        # A proxy in between may speak plain HTTP.
        cluster = {"server": server or self.url} | ({} if server else {"certificate-authority": certificate})
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tests",
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": name}}],
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": name, "user": {"token": token}}],
        }
        path.write_text(yaml.safe_dump(document))
        return path

    def start(self) -> None:
        """Start the API server, or start it again at its old address and with its data."""
        certificates = self.directory / "apiserver"
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers={self._etcd}",
            f"--cert-dir={certificates}",
            f"--secure-port={self.port}",
            "--bind-address=127.0.0.1",
            "--service-cluster-ip-range=10.96.0.0/16",
            f"--service-account-key-file={self.directory / 'sa.pub'}",
            f"--service-account-signing-key-file={self.directory / 'sa.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--authorization-mode=RBAC",
            f"--token-auth-file={self.directory / 'tokens.csv'}",
            "--disable-admission-plugins=ServiceAccount",
            "--allow-privileged=true",
            "--max-requests-inflight=1000",
            *self._arguments,
        )
        self._await(self._is_ready, "kube-apiserver")

    def kill(self) -> None:
        """kill -9 the API server; etcd goes on."""
        self._end("kube-apiserver", signal.SIGKILL)

    @contextlib.contextmanager
    def without_etcd(self) -> Iterator[None]:
        """Halt the store, so that the API server is there and cannot answer."""
        etcd = self._processes["etcd"]
        etcd.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            etcd.send_signal(signal.SIGCONT)
            self._await(self._is_ready, "kube-apiserver")

    def stop(self) -> None:
        """End everything."""
        for name in reversed(list(self._processes)):
            # Nothing of it is to be kept, and an orderly end takes its time.
            self._end(name, signal.SIGKILL)

    def request(self, method: str, path: str, body: Any = None, how: str = "application/json") -> Any:
        """One request as an administrator, for a test's own look and touch.

        Raises:
            urllib.error.HTTPError: it was refused.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {_TOKEN}", "Content-Type": how}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=30, context=self._context()) as answer:
            return json.load(answer)

    def _context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.directory / "apiserver" / "apiserver.crt"))

    def _keys(self) -> None:
        key, public = self.directory / "sa.key", self.directory / "sa.pub"
        openssl = shutil.which("openssl")
        if openssl is None:
            raise ProgramsMissingError("no openssl")
        private = str(key)
        for command in (["genrsa", "-out", private], ["rsa", "-in", private, "-pubout", "-out", str(public)]):
            subprocess.run([openssl, *command], check=True, capture_output=True)
        (self.directory / "tokens.csv").write_text(f'{_TOKEN},admin,admin,"system:masters"\n')

    def add_user(self, name: str, token: str) -> None:
        """Let another user in; takes effect when the API server is started again."""
        with (self.directory / "tokens.csv").open("a") as tokens:
            tokens.write(f"{token},{name},{name}\n")

    def _start_etcd(self) -> None:
        client, peer = free_port(), free_port()
        self._etcd = f"http://127.0.0.1:{client}"
        self._spawn(
            "etcd",
            f"--data-dir={self.directory / 'etcd'}",
            f"--listen-client-urls={self._etcd}",
            f"--advertise-client-urls={self._etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
            "--unsafe-no-fsync",
            "--logger=zap",
            "--log-level=warn",
        )

    def _start_controllers(self) -> None:
        """Garbage collection and namespace deletion: without them nothing that is deleted ever ends."""
        self._run_controllers(
            "kube-controller-manager", "garbage-collector-controller", "namespace-controller"
        )

    @contextlib.contextmanager
    def disruption_budgets(self) -> Iterator[None]:
        """Count disruption budgets for a while; not always, for it posts Events of its own."""
        self._run_controllers("disruption", "disruption-controller")
        try:
            yield
        finally:
            self._end("disruption", signal.SIGKILL)

    def _run_controllers(self, name: str, *controllers: str) -> None:
        self._spawn(
            name,
            f"--kubeconfig={self.kubeconfig}",
            f"--controllers={','.join(controllers)}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={free_port()}",
            f"--cert-dir={self.directory / name}",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            program="kube-controller-manager",
        )

    def _install_crds(self) -> None:
        for file in sorted(_CRDS.glob("*.yaml")):
            definition = yaml.safe_load(file.read_text())
            self.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
            spec = definition["spec"]
            served = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
            self._await(functools.partial(self._answers, served), served)

    def _is_ready(self) -> bool:
        return self._answers("/readyz?verbose") and self._answers("/api/v1/namespaces/default")

    def _answers(self, path: str) -> bool:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {_TOKEN}"})
        try:
            with urllib.request.urlopen(request, timeout=5, context=self._context()) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _spawn(self, name: str, *arguments: str, program: str = "") -> None:
        with (self.directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(self._programs[program or name]), *arguments], stdout=log, stderr=subprocess.STDOUT
            )

    def _await(self, holds: Any, name: str) -> None:
        deadline = time.monotonic() + 90
        while not holds():
            ended = [n for n, process in self._processes.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                log = self.directory / f"{ended[0] if ended else 'kube-apiserver'}.log"
                tail = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{name} does not become ready:\n{tail}")
            time.sleep(0.1)

    def _end(self, name: str, how: signal.Signals) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        process.send_signal(how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
            return
        process.kill()
        process.wait(15)


@contextlib.contextmanager
def an_api_server(directory: Path) -> Iterator[ApiServer]:
    """One for a fixture; skips the test where the programs are missing."""
    try:
        server = ApiServer(directory)
    except ProgramsMissingError as error:
        pytest.skip(str(error))
    try:
        yield server
    finally:
        server.stop()


def refusal(server: ApiServer, namespace: str, manifest: dict[str, Any], method: str = "POST") -> str:
    """What kubectl would show of an object of ours, empty = it was taken; nothing is kept."""
    plural = RESOURCES[manifest["kind"]].plural
    name = f"/{manifest['metadata']['name']}" if method == "PUT" else ""
    path = f"/apis/mooncake.io/v1alpha1/namespaces/{namespace}/{plural}{name}"
    try:
        # Strict, as kubectl asks for: or unknown fields would be dropped in silence.
        server.request(method, f"{path}?dryRun=All&fieldValidation=Strict", manifest)
    except urllib.error.HTTPError as error:
        message: str = json.loads(error.read())["message"]
        return message
    return ""


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One API server for the whole session; each test takes a namespace of its own."""
    with an_api_server(tmp_path_factory.mktemp("kubernetes")) as server:
        yield server


@pytest.fixture
def namespace(api_server: ApiServer) -> str:
    """A fresh namespace; it is not deleted, for the server goes with all of them."""
    created = api_server.request(
        "POST", "/api/v1/namespaces", {"metadata": {"generateName": "test-"}, "kind": "Namespace"}
    )
    name: str = created["metadata"]["name"]
    return name
