"""Engine and sidecar of one Pod are of different users where the engine's image says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from mooncake_operator.planning.manifests.sidecar import EVENTS_ENDPOINT, REPLAY_ENDPOINT

SIDECAR_USER = 65532
LISTENS = f"""
import os, sys, zmq
os.setgroups([])
os.setgid({SIDECAR_USER})
os.setuid({SIDECAR_USER})
events, replay = zmq.Context().socket(zmq.SUB), zmq.Context().socket(zmq.DEALER)
events.subscribe(b"")
for socket, endpoint in zip((events, replay), sys.argv[1:]):
    socket.rcvtimeo = 20_000
    socket.connect(endpoint)
replay.send(b"again")
print(events.recv().decode(), replay.recv().decode())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_sidecar_hears_an_engine_that_runs_as_root(tmp_path: Path) -> None:
    endpoints = [
        endpoint.replace("$(MOONCAKE_RUN_DIR)", str(tmp_path))
        for endpoint in (EVENTS_ENDPOINT, REPLAY_ENDPOINT)
    ]
    with zmq.Context() as context, context.socket(zmq.XPUB) as events, context.socket(zmq.ROUTER) as replay:
        for socket, endpoint in zip((events, replay), endpoints, strict=True):
            socket.linger, socket.rcvtimeo = 0, 20_000
            socket.bind(endpoint)
        sidecar = subprocess.Popen([sys.executable, "-c", LISTENS, *endpoints], stdout=subprocess.PIPE)
        try:
            assert events.recv() == b"\x01"  # it has subscribed
            events.send(b"stored")
            who, _ = replay.recv_multipart()
            replay.send_multipart([who, b"replayed"])
            said, _ = sidecar.communicate(timeout=20)
        finally:
            sidecar.kill()
            sidecar.wait()
    assert said.decode().split() == ["stored", "replayed"]
