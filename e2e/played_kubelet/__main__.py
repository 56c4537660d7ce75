"""``python -m e2e.played_kubelet --kubeconfig FILE --nodes N``: play nodes until SIGTERM or SIGINT."""

import argparse
import asyncio
import os
import signal
from pathlib import Path

import uvloop

from e2e.kube import Kube
from e2e.played_kubelet.behaviour import Behaviour
from e2e.played_kubelet.kubelet import PlayedNodes
from e2e.played_kubelet.nodes import NodeShape


def _pairs(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m e2e.played_kubelet")
    parser.add_argument("--kubeconfig", type=Path, default=os.environ.get("KUBECONFIG"))
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--prefix", default="played")
    parser.add_argument(
        "--resource", type=_pairs, action="append", default=[], help="NAME=QUANTITY on each node"
    )
    parser.add_argument("--label", type=_pairs, action="append", default=[], help="NAME=VALUE on each node")
    parser.add_argument(
        "--taint", action="store_true", help="keep away Pods that do not tolerate played nodes"
    )
    parser.add_argument("--start-seconds", type=float, default=0.0)
    parser.add_argument("--ready-seconds", type=float, default=0.0)
    parser.add_argument("--stop-seconds", type=float, default=0.0)
    arguments = parser.parse_args()
    if not arguments.kubeconfig:
        parser.error("say which cluster: --kubeconfig FILE, or KUBECONFIG in the environment")
    return arguments


async def _main(arguments: argparse.Namespace) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    behaviour = Behaviour(arguments.start_seconds, arguments.ready_seconds, arguments.stop_seconds)
    shape = NodeShape(
        resources={**NodeShape().resources, **dict(arguments.resource)},
        labels=dict(arguments.label),
        taint=arguments.taint,
    )
    async with (
        await Kube.of(arguments.kubeconfig) as kube,
        PlayedNodes(kube, arguments.nodes, script=lambda _: behaviour, shape=shape, prefix=arguments.prefix),
    ):
        print(f"playing {arguments.nodes} nodes", flush=True)
        await ended.wait()


if __name__ == "__main__":
    uvloop.run(_main(_arguments()))
