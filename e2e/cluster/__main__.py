"""``python -m e2e.cluster build|up|stop|images|status``, from the project's root."""

import argparse
import sys

from e2e.cluster import debian, images, leftovers, programs
from e2e.cluster.cluster import Cluster, Options
from e2e.cluster.errors import ClusterError


def main() -> int:
    """Run one command; 1 and a message where it could not be done."""
    arguments = _parser().parse_args()
    try:
        return int(arguments.run(arguments) or 0)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _build(_: argparse.Namespace) -> None:
    debian.provide(_say)
    found = programs.provide(_say)
    for name, path in found.items():
        print(f"{name:26}{path}")


def _images(arguments: argparse.Namespace) -> None:
    debian.provide(_say)
    for archive in images.build(_say, arguments.targets or images.TARGETS):
        print(archive)
        if arguments.load:
            Cluster(arguments.load).load(archive)


def _up(arguments: argparse.Namespace) -> None:
    debian.provide(_say)
    archives = [] if arguments.no_images else images.build(_say)
    cluster = Cluster(arguments.name)
    cluster.start(_say, Options(hugepages_2mi=arguments.hugepages))
    for archive in archives:
        cluster.load(archive)
    kubectl = programs.find("kubectl")
    print(f"export KUBECONFIG={cluster.kubeconfig} PATH={kubectl.parent}:$PATH")
    print(f"{kubectl} --kubeconfig {cluster.kubeconfig} get pods --all-namespaces")
    if archives:
        print(f"images: {', '.join([images.REDIS_IMAGE, *map(images.product_image, images.TARGETS)])}")
    print(f"stop it with: {sys.executable} -m e2e.cluster stop --name {arguments.name}")


def _stop(arguments: argparse.Namespace) -> None:
    Cluster(arguments.name).stop()


def _status(arguments: argparse.Namespace) -> int:
    cluster = Cluster(arguments.name)
    for trace in leftovers.traces(cluster.layout):
        print(trace[:200])
    running = cluster.is_running()
    print(f"cluster {arguments.name} is {'running' if running else 'not running'}")
    return 0 if running else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m e2e.cluster", description="A Kubernetes cluster on this machine."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object, text: str, named: bool = True) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        if named:
            added.add_argument(
                "--name", default="dev", help="of the cluster (default: dev; the tests' is e2e)"
            )
        return added

    command("build", _build, "find or build all programs; takes about 20 minutes the first time", named=False)
    built = command("images", _images, "build the images on a local base", named=False)
    built.add_argument("targets", nargs="*", help="targets of the Dockerfile")
    built.add_argument("--load", metavar="NAME", help="and load them into the running cluster of this name")
    up = command("up", _up, "start a cluster, leave it running, print how to reach it")
    up.add_argument("--hugepages", type=int, default=0, help="pages of 2 MiB to add to the machine's")
    up.add_argument("--no-images", action="store_true", help="do not build and load the project's images")
    command("stop", _stop, "end a cluster and remove all its traces")
    command("status", _status, "show what of a cluster is on this machine")
    return parser


if __name__ == "__main__":
    sys.exit(main())
