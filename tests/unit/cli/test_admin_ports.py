"""Several schedulers answer for one cluster: one that is dead is no reason to fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from typer.testing import CliRunner

import mooncakectl.admin
from mooncake_testing.certificates import self_signed
from mooncake_testing.redis import free_port
from mooncakectl.app import build_app
from mooncakectl.console import CommandError

METRICS = b"""# TYPE master_allocated_bytes gauge
master_allocated_bytes 1099511627776
master_total_capacity_bytes 8796093022208
master_total_file_capacity_bytes 0
master_key_count 6711
"""


class Port(BaseHTTPRequestHandler):
    """One process that is an admin port and a store's master."""

    def _answer(self) -> None:
        if self.server.instead is not None:
            return self._send(200, self.server.instead)
        if self.path == "/metrics":
            return self._send(200, METRICS)
        if self.path == "/instances":
            stores = [{"id": name, "role": "store", "url": url} for name, url in self.server.stores.items()]
            return self._send(200, json.dumps({"instances": stores}).encode())
        if self.path == "/stats":
            return self._send(200, b"{}")
        if self.path == "/instances/p-0/drain":
            self.server.asked.append(self.command)
            return self._send(200, b'{"id": "p-0"}')
        return self._send(404, b"{}")

    do_GET = do_POST = do_DELETE = _answer

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    asked: list[str]
    stores: dict[str, str]
    instead: bytes | None
    """What is answered to everything."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Port) as serving:
        serving.asked, serving.stores, serving.instead = [], {}, None
        thread = Thread(target=serving.serve_forever, daemon=True)
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


@pytest.fixture
def ports(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    urls = [f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{server.server_port}"]
    monkeypatch.setattr(mooncakectl.admin, "admin_urls", lambda given: [given] if given else urls)
    return urls


def test_a_drain_is_told_to_the_next_scheduler_when_the_first_is_dead(
    ports: list[str], server: Server
) -> None:
    for undo in ([], ["--undo"]):
        result = CliRunner().invoke(build_app(), ["drain", "p-0", *undo])
        assert result.exit_code == 0, result.output
        assert ports[0] in result.stderr
    assert server.asked == ["POST", "DELETE"]


def test_an_admin_port_behind_tls_is_trusted_by_the_certificates_of_the_environment(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, tls = self_signed(tmp_path)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    drain = ["drain", "p-0", "--url", f"https://127.0.0.1:{server.server_port}"]
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    result = CliRunner().invoke(build_app(), drain)
    assert result.exit_code == 0, result.output
    assert server.asked == ["POST"]
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(CommandError, match="CERTIFICATE_VERIFY_FAILED"):
        CliRunner().invoke(build_app(), drain, catch_exceptions=False)


def test_an_unknown_instance_is_not_asked_for_everywhere(ports: list[str]) -> None:
    with pytest.raises(CommandError, match="no instance p-9"):
        CliRunner().invoke(build_app(), ["drain", "p-9"], catch_exceptions=False)


def test_without_any_scheduler_the_address_that_was_asked_is_named(ports: list[str]) -> None:
    with pytest.raises(CommandError, match=ports[0]):
        CliRunner().invoke(build_app(), ["drain", "p-0", "--url", ports[0]], catch_exceptions=False)


def test_a_decision_is_looked_for_behind_a_dead_scheduler_too(ports: list[str]) -> None:
    with pytest.raises(CommandError, match="no decision about request r-1"):
        CliRunner().invoke(build_app(), ["explain", "r-1"], catch_exceptions=False)


def test_the_status_tells_how_full_the_store_is_and_when_its_master_cannot_be_asked(
    ports: list[str], server: Server
) -> None:
    server.stores = {"kv": ports[1], "far": ports[0]}
    result = CliRunner().invoke(build_app(), ["status"])
    assert result.exit_code == 0, result.output
    assert "12.5 % of 8 TiB memory; 6,711 blocks" in result.stdout
    assert "SSD" not in result.stdout
    assert "store far  its master cannot be asked from here" in result.stdout
    told = json.loads(CliRunner().invoke(build_app(), ["status", "--json"]).stdout)
    assert {store["id"]: store["blocks"] for store in told["stores"]} == {"kv": 6711, "far": None}


@pytest.mark.parametrize("instead", [b"", b"[1]", b"null", b"5", b"<html>", b"\xff"])
@pytest.mark.parametrize("command", [["status"], ["explain", "r-1"], ["drain", "p-0"]])
def test_what_is_no_admin_port_is_told(
    ports: list[str], server: Server, command: list[str], instead: bytes
) -> None:
    server.instead = instead
    with pytest.raises(CommandError, match="answers no JSON object"):
        CliRunner().invoke(build_app(), [*command, "--url", ports[1]], catch_exceptions=False)


@pytest.mark.parametrize("instead", [b"{}", b'{"instances": 5}', b'{"instances": [5]}'])
def test_a_status_without_instances_is_none(ports: list[str], server: Server, instead: bytes) -> None:
    server.instead = instead
    with pytest.raises(CommandError, match="/instances lists no instances"):
        CliRunner().invoke(build_app(), ["status", "--url", ports[1]], catch_exceptions=False)


def test_an_empty_id_is_no_question(ports: list[str]) -> None:
    with pytest.raises(CommandError, match="no id: write that of the answer's header x-request-id"):
        CliRunner().invoke(build_app(), ["explain", ""], catch_exceptions=False)
