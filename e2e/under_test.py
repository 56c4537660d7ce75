"""The cluster that the tests run against: one that they start, or one that ``E2E_KUBECONFIG`` names."""

import asyncio
import os
import re
import shlex
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e import tunnel
from e2e.cluster import debian, images, programs, relay
from e2e.cluster.cluster import Cluster, Options
from e2e.cluster.errors import ClusterError
from e2e.cluster.locks import alone
from e2e.cluster.programs import Say
from e2e.kube import Kube

_OWN = re.compile(r"/var/lib/mooncake-clusters/(\w+)/kubeconfig")


@dataclass(frozen=True)
class ClusterUnderTest:
    """What tests may know of the cluster.

    Attributes:
        kubeconfig: admin's credentials.
        own: the cluster where it is one of this machine's, so that its parts can be killed; else None.
        image_template: name of the product's images, with ``{target}``.
        redis_image: a Redis.
        load_command: brings an image archive, its last argument, into a foreign cluster; empty = no such.
    """

    kubeconfig: Path
    own: Cluster | None
    image_template: str
    redis_image: str
    load_command: str = ""

    def image(self, target: str) -> str:
        """Name of the image of a target of the Dockerfile."""
        return self.image_template.format(target=target)

    def image_again(self, target: str, tag: str) -> str:
        """The image of a target under one more name, as a release that changes nothing would be.

        Raises:
            ClusterError: no image can be brought into this cluster.
        """
        image = self.image(target)
        again = f"{image.rpartition(':')[0]}:{tag}"
        if self.own is not None:
            images.tag(self.own.layout, image, again)
        else:
            with images.named_again(image, again) as archive:
                self.load(archive)
        return again

    @property
    def takes_images(self) -> bool:
        """Whether images can be brought into it."""
        return self.own is not None or bool(self.load_command)

    def load(self, archive: Path) -> None:
        """Bring an image archive into it.

        Raises:
            ClusterError: it was refused, or nobody said how.
        """
        if self.own is not None:
            self.own.load(archive)
            return
        if not self.load_command:
            raise ClusterError("set E2E_LOAD_IMAGE to a command that loads an archive, see e2e/README.md")
        command = [*shlex.split(self.load_command), str(archive)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise ClusterError(f"{shlex.join(command)}: {(ran.stdout + ran.stderr).strip()}")

    async def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl; what it printed.

        Raises:
            ClusterError: it failed; the message is what it said.
        """
        process = await asyncio.create_subprocess_exec(
            programs.find("kubectl"),
            f"--kubeconfig={self.kubeconfig}",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await process.communicate((stdin or "").encode())
        except asyncio.CancelledError:
            process.kill()
            await process.communicate()
            raise
        if process.returncode:
            raise ClusterError(f"kubectl {' '.join(arguments[:3])}: {errors.decode().strip()}")
        return output.decode()

    @asynccontextmanager
    async def forward(self, kube: Kube, service: str, namespace: str, port: int) -> AsyncIterator[str]:
        """Reach a Service from the test's process.

        In an own cluster connections go to the ClusterIP, as those of any Pod do; elsewhere through the API
        server, to whichever Pod of the Service is ready.

        Yields:
            A base URL on this machine's loopback.
        """
        if self.own is None:
            async with tunnel.to_service(kube, service, namespace, port) as url:
                yield url
            return
        found = await kube.get("Service", service, namespace)
        async with self._relayed(self.own, found["spec"]["clusterIP"], port) as url:
            yield url

    @asynccontextmanager
    async def forward_pod(self, kube: Kube, pod: Mapping[str, Any], port: int) -> AsyncIterator[str]:
        """Reach one Pod from the test's process.

        Args:
            kube: the API server.
            pod: as read from it; it must have an address.
            port: of the Pod.

        Yields:
            A base URL on this machine's loopback.
        """
        if self.own is None:
            metadata = pod["metadata"]
            async with tunnel.to_pod(kube, metadata["name"], metadata["namespace"], port) as url:
                yield url
            return
        async with self._relayed(self.own, pod["status"]["podIP"], port) as url:
            yield url

    @asynccontextmanager
    async def _relayed(self, own: Cluster, address: str, port: int) -> AsyncIterator[str]:
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with relay.relayed(own.layout, listener, address, port):
            yield url

    @asynccontextmanager
    async def port_forward(self, target: str, namespace: str, port: int) -> AsyncIterator[str]:
        """Reach a Pod, or one of a Service, by ``kubectl port-forward``.

        Args:
            target: ``pod/NAME`` or ``service/NAME``.
            namespace: its.
            port: of the Pod or the Service.

        Yields:
            A base URL on this machine's loopback.
        """
        process = await asyncio.create_subprocess_exec(
            programs.find("kubectl"),
            f"--kubeconfig={self.kubeconfig}",
            *(
                "port-forward",
                "--address=127.0.0.1",
                f"--namespace={namespace}",
                target,
                f":{port}",
            ),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
            yield f"http://127.0.0.1:{line.split(' -> ')[0].rpartition(':')[2]}"
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


@contextmanager
def cluster_under_test(say: Say, options: Options | None = None) -> Iterator[ClusterUnderTest]:
    """Take the cluster of ``E2E_KUBECONFIG``, or start one with the images in it and remove it afterwards.

    A foreign cluster gets the images by the command of ``E2E_LOAD_IMAGE``. Without one it must have them
    already, under names that ``E2E_IMAGE_TEMPLATE`` (``{target}``) and ``E2E_REDIS_IMAGE`` give.
    """
    if given := os.environ.get("E2E_KUBECONFIG"):
        if "PYTEST_XDIST_WORKER" in os.environ:
            raise ClusterError("workers would share the cluster of E2E_KUBECONFIG: run without -n")
        yield _given(Path(given), say)
        return
    debian.provide(say)
    archives = images.build(say)
    # Each of pytest-xdist's workers has a cluster of its own.
    name = os.environ.get("E2E_CLUSTER_NAME", "e2e") + os.environ.get("PYTEST_XDIST_WORKER", "")
    cluster = Cluster(name)
    with _reserved(cluster):
        cluster.start(say, options)
        try:
            for archive in archives:
                cluster.load(archive)
            yield ClusterUnderTest(
                cluster.kubeconfig, cluster, images.product_image("{target}"), images.REDIS_IMAGE
            )
        finally:
            cluster.stop()


def _given(kubeconfig: Path, say: Say) -> ClusterUnderTest:
    own = _OWN.fullmatch(str(kubeconfig))
    found = ClusterUnderTest(
        kubeconfig=kubeconfig,
        own=Cluster(own.group(1)) if own else None,
        image_template=os.environ.get("E2E_IMAGE_TEMPLATE", images.product_image("{target}")),
        redis_image=os.environ.get("E2E_REDIS_IMAGE", images.REDIS_IMAGE),
        load_command=os.environ.get("E2E_LOAD_IMAGE", ""),
    )
    if found.load_command:
        debian.provide(say)
        for archive in images.build(say):
            say(f"loading {archive.name}")
            found.load(archive)
    return found


def _reserved(cluster: Cluster) -> AbstractContextManager[None]:
    """Another session of the same cluster would take the running one for a leftover and remove it."""
    return alone(
        cluster.layout.lock.with_suffix(".session"),
        f"other tests are running on cluster {cluster.layout.name}: wait for them, or set "
        "E2E_CLUSTER_NAME to another name",
    )
