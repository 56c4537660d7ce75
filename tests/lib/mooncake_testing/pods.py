"""Small Pods for tests of the local runtime: real processes, plain Kubernetes manifests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mooncakectl.local import Folders

# Serves HTTP on $PORT: 200 on /healthz, and on /readyz once the file $READY_FILE is there (if one is named).
WEB_SERVER = """
import http.server, os, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        gate = os.environ.get("READY_FILE")
        broken = self.path == "/readyz" and gate and not os.path.exists(gate)
        sick = os.path.exists(os.environ.get("SICK_FILE", "/nonexistent"))
        self.send_response(503 if broken or sick else 200)
        self.end_headers()
    def log_message(self, *arguments):
        pass
def leave(*_):
    print("told to end", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


def pod(name: str, *containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """A Pod manifest; `spec` adds or replaces fields."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": {"app": name}},
        "spec": {"containers": list(containers), "terminationGracePeriodSeconds": 10, **spec},
    }


def python(name: str, code: str, **fields: Any) -> dict[str, Any]:
    """A container that runs a piece of Python."""
    return {"name": name, "image": "x", "command": ["python", "-S", "-c", code], **fields}


@contextmanager
def short_folders(cluster: str = "tested") -> Iterator[Folders]:
    """Folders short enough for sockets, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="mk-", dir="/tmp") as root:
        yield Folders(cluster, Path(root) / "state" / cluster, Path(root) / "run" / "r")
