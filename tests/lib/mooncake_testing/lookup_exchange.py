"""What a sidecar sees of a store: one exchange with a real and with a simulated one, in its own process.

Usage: `lookup_exchange.py MODULE MASTER_HOST:PORT ADMIN_URL MASTER_PID`; the last line of its output is a
JSON object of what was seen. `MODULE` is `mooncake.store` in an interpreter that has it, or the simulated
store's client. The master is stopped and killed in the end.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZE = 1 << 20
SEGMENT_BYTES = 16 * SIZE
OBJECTS_AT_WATERMARK = 14
WATERMARK = 0.875
LEASE_MS = 2000
"""What the store that is talked to must have been started with."""
WAIT_S = 40.0


class Admin:
    """The master's admin port."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str) -> str:
        with self._opener.open(self._url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def found(self, *keys: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.get(f"/batch_query_keys?keys={','.join(keys)}"))["data"]
        return answer

    def only_on_ssd(self, *keys: str) -> bool:
        return all(one["local_disk_values"] and not one["values"] for one in self.found(*keys).values())

    def on_ssd(self, *keys: str) -> bool:
        return all(one["local_disk_values"] for one in self.found(*keys).values())

    def in_memory(self, *keys: str) -> bool:
        return all(one["values"] for one in self.found(*keys).values())

    def metrics(self) -> dict[str, float]:
        lines = [line.rpartition(" ") for line in self.get("/metrics").splitlines() if line[:1] not in "#"]
        return {name: float(value) for name, _, value in lines}

    def promotions(self) -> dict[str, int]:
        prefix = "master_promotion_"
        return {
            name.removeprefix(prefix).removesuffix("_total"): int(value)
            for name, value in self.metrics().items()
            if name.startswith(prefix)
        }


class RealWriter:
    """Puts through the binding, which is what engines do."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str) -> None:
        self._store.put(key, bytes(SIZE))

    def remove(self, key: str) -> None:
        self._store.remove(key, True)


class SimulatedWriter:
    """Puts as simulated engines do: the bytes of a simulated store are nowhere."""

    def __init__(self, address: str) -> None:
        self._address = address

    def put(self, key: str) -> None:
        if self._call("put_start", {"objects": [(key, SIZE)]}) != [None]:
            self._call("put_end", {"keys": [key]})

    def remove(self, key: str) -> None:
        self._call("remove", {"keys": [key]})

    def _call(self, name: str, value: object) -> Any:
        import msgspec

        url = f"http://{self._address}/rpc/{name}"
        request = urllib.request.Request(url, msgspec.msgpack.encode(value))
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            return msgspec.msgpack.decode(answer.read())


def parameters(method: Any) -> list[str]:
    """`name: type` or `name: type = default` of each, whether the method is Python's or pybind11's."""
    overloads = re.search(r"\(self: [^,]*, (local_hostname: .*)\) -> int", method.__doc__ or "")
    if overloads:
        return overloads[1].split(", ")
    shown = []
    for one in list(inspect.signature(method).parameters.values())[1:]:
        default = "" if one.default is one.empty else f" = {one.default!r}"
        shown.append(f"{one.name}: {one.annotation}{default}")
    return shown


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait; whoever reads the output learns for what in vain."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"not within {WAIT_S:g} s: {what}")
        time.sleep(0.1)


def all_threads_stopped(pid: int) -> bool:
    """Whether a signal to stop has reached all of a process."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return all((one / "stat").read_text().rpartition(")")[2].split()[0] == "T" for one in threads)


def shown(replicas: list[Any]) -> list[Any]:
    """A descriptor list as far as both stores must agree on it."""
    kinds = [
        (one.is_memory_replica(), one.is_local_disk_replica(), one.is_disk_replica()) for one in replicas
    ]
    statuses = {(one.status.name, one.status.value) for one in replicas}
    return [type(replicas).__name__, sorted(kinds), sorted(statuses)]


class Exchange:
    """The scripted exchange; `seen` is what it found."""

    def __init__(self, module: str, address: str, admin_url: str, master_pid: int) -> None:
        self.seen: dict[str, Any] = {}
        self._class = importlib.import_module(module).MooncakeDistributedStore
        self._store = self._class()
        self._real = module == "mooncake.store"
        self._writer = RealWriter(self._store) if self._real else SimulatedWriter(address)
        self._address = address
        self._admin = Admin(admin_url)
        self._master_pid = master_pid

    def run(self) -> None:
        """Step by step; each leaves the store as the next wants it."""
        self.seen["setup parameters"] = parameters(self._class.setup)
        self.seen["setup without a master"] = self._set_up(self._class(), "127.0.0.1:1")
        self.seen["setup"] = self._set_up(self._store, self._address)
        self._names()
        self._unknown_keys()
        self._one_key_twice()
        self._many_at_once()
        self._what_does_not_count()
        self._evicted_again()
        self._above_the_watermark()
        self._what_is_looked_up_stays()
        self._from_threads()
        self._hanging_and_dead_master()
        self.seen["close"] = [self._store.close(), self._store.close()]

    def _set_up(self, store: Any, address: str) -> Any:
        # A pure client: it lends nothing and takes no bytes.
        return store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", address)

    def _names(self) -> None:
        names = set(self._admin.metrics())
        self.seen["promotion metrics"] = sorted(name for name in names if "promotion" in name)
        self.seen["cache metrics"] = sorted(name for name in names if "cache" in name or "_get_nums" in name)

    def _unknown_keys(self) -> None:
        self.seen["unknown: lookup"] = self._store.get_replica_desc("none")
        self.seen["unknown: empty key"] = self._store.get_replica_desc("")
        self.seen["unknown: many lookups"] = self._store.batch_get_replica_desc(["none", "neither"])
        self.seen["unknown: exists"] = self._store.batch_is_exist(["none", "neither"])
        self.seen["unknown: no keys: lookup"] = self._store.batch_get_replica_desc([])
        self.seen["unknown: no keys: exists"] = self._store.batch_is_exist([])
        self.seen["unknown: admin"] = self._admin.found("none")["none"]
        self.seen["unknown: promotions"] = self._admin.promotions()

    def _to_ssd(self, *keys: str) -> None:
        """Put keys, push them out of DRAM, and leave DRAM empty."""
        for key in keys:
            self._writer.put(key)
        self._push_out(*keys)

    def _push_out(self, *keys: str) -> None:
        fillers: list[str] = []

        def out() -> bool:
            fillers.append(f"filler-{time.monotonic_ns()}")
            self._writer.put(fillers[-1])
            return self._admin.only_on_ssd(*keys)

        until(out, f"{keys} leave DRAM")
        for filler in fillers:
            self._writer.remove(filler)
        until(lambda: self._admin.metrics()["master_allocated_bytes"] == 0, "DRAM is empty")

    def _one_key_twice(self) -> None:
        self._to_ssd("a", "b", "c", "d", "e")
        before = self._admin.promotions()
        self.seen["first lookup"] = shown(self._store.get_replica_desc("a"))
        self.seen["first lookup: promotions"] = self._since(before, "admitted", "rejected_frequency")
        self.seen["second lookup"] = shown(self._store.get_replica_desc("a"))
        self.seen["second lookup: promotions"] = self._since(before, "admitted", "rejected_frequency")
        until(lambda: self._admin.in_memory("a"), "two lookups bring a key back")
        self._settled()
        self.seen["promoted"] = self._since(before, *before)
        place = self._admin.found("a")["a"]
        self.seen["promoted: admin"] = {name: type(value).__name__ for name, value in place.items()}
        self.seen["promoted: size"] = [one["size_"] for one in place["values"]]
        self.seen["promoted: lookup"] = shown(self._store.get_replica_desc("a"))
        self.seen["promoted: bytes in DRAM"] = self._admin.metrics()["master_allocated_bytes"]

    def _many_at_once(self) -> None:
        before = self._admin.promotions()
        for _ in range(2):
            found = self._store.batch_get_replica_desc(["b", "none", "c"])
        self.seen["many"] = [type(found).__name__, {key: shown(found[key]) for key in sorted(found)}]
        until(lambda: self._admin.in_memory("b", "c"), "many come together")
        self._settled()
        self.seen["many: promotions"] = self._since(before, *before)

    def _what_does_not_count(self) -> None:
        before = self._admin.promotions()
        for _ in range(3):
            self.seen["exists"] = self._store.batch_is_exist(["d", "none"])
            self._admin.found("d")
        self.seen["what does not count"] = self._since(before, *before)

    def _evicted_again(self) -> None:
        self._push_out("a", "b", "c")
        before = self._admin.promotions()
        self._store.get_replica_desc("a")
        until(lambda: self._admin.in_memory("a"), "what came once comes with one lookup")
        self._settled()
        self.seen["evicted again"] = self._since(before, *before)

    def _above_the_watermark(self) -> None:
        """Exactly at the watermark nothing is evicted yet, and nothing comes any more."""
        before = self._admin.promotions()
        kept = [f"kept-{number}" for number in range(OBJECTS_AT_WATERMARK - 1)]
        for key in kept:
            self._writer.put(key)
        self.seen["at the watermark"] = self._admin.metrics()["master_allocated_bytes"]
        for _ in range(2):
            self._store.batch_get_replica_desc(["e"])
        self.seen["at the watermark: promotions"] = self._since(
            before, "admitted", "completed", "rejected_frequency"
        )
        self.seen["at the watermark: refused"] = self._since(before, "rejected_watermark") != {}
        self.seen["at the watermark: stays"] = self._admin.only_on_ssd("e")
        for key in (*kept, "a"):
            self._writer.remove(key)

    def _what_is_looked_up_stays(self) -> None:
        """Every look-up is a lease: what is looked up again before it ends leaves DRAM never."""
        self._writer.put("stays")
        self._writer.put("goes")
        others: list[str] = []

        def gone() -> bool:
            self._store.batch_get_replica_desc(["stays"])
            others.append(f"other-{time.monotonic_ns()}")
            self._writer.put(others[-1])
            return self._admin.only_on_ssd("goes")

        until(gone, "what nobody looked up leaves DRAM")
        self.seen["looked up: stays"] = self._admin.in_memory("stays")
        for key in (*others, "stays", "goes"):
            self._writer.remove(key)

    def _from_threads(self) -> None:
        found: list[int] = []

        def look_up() -> None:
            found.extend(len(self._store.batch_get_replica_desc(["b", "c"])) for _ in range(20))

        threads = [threading.Thread(target=look_up) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.seen["four threads"] = sorted(set(found))

    def _hanging_and_dead_master(self) -> None:
        os.kill(self._master_pid, signal.SIGSTOP)
        until(lambda: all_threads_stopped(self._master_pid), "the master hangs")
        self.seen["hanging master"] = self._answers()
        os.kill(self._master_pid, signal.SIGCONT)
        until(lambda: self._store.batch_is_exist(["b"]) == [1], "the master answers again")
        os.kill(self._master_pid, signal.SIGKILL)
        self.seen["dead master"] = self._answers()

    def _answers(self) -> list[Any]:
        return [
            self._store.get_replica_desc("b"),
            self._store.batch_get_replica_desc(["b", "c"]),
            self._store.batch_is_exist(["b", "c"]),
        ]

    def _settled(self) -> None:
        until(lambda: self._admin.promotions()["in_flight"] == 0, "nothing is in flight")

    def _since(self, before: dict[str, int], *names: str) -> dict[str, int]:
        now = self._admin.promotions()
        return {name: now[name] - before[name] for name in names if now[name] != before[name]}


def main(module: str, address: str, admin_url: str, master_pid: str) -> None:
    """Run it and print what was seen."""
    exchange = Exchange(module, address, admin_url, int(master_pid))
    exchange.run()
    print(json.dumps(exchange.seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
