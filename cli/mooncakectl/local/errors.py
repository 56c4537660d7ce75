"""What can go wrong when Pods are run on this machine, in words for the person at the terminal."""

from __future__ import annotations


class LocalRuntimeError(Exception):
    """The machine cannot run the cluster; the message is one line and says what to do."""


class PodUnsupportedError(LocalRuntimeError):
    """A Pod asks for something that only a Kubernetes node can give; the message names the field."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
