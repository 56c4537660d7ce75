"""Entry 24 of the fault matrix: a thread that keeps Python's lock while it tokenises is of no use."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

from mooncake_scheduler.gateway.tokens import ModelFolder
from mooncake_testing.toy_model import write_toy_model


def test_other_threads_run_on_while_a_long_text_is_tokenised(tmp_path: Path) -> None:
    folder = ModelFolder(write_toy_model(tmp_path))
    text = "the quick brown fox jumps over the lazy dog. " * 100_000
    span_s: list[float] = []

    def tokenise() -> None:
        for _ in range(2):
            span_s.append(time.monotonic())
            folder.encode(text, add_special_tokens=True)
            span_s.append(time.monotonic())

    worker = threading.Thread(target=tokenise)
    looked_s = [time.monotonic()]
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        looked_s.append(time.monotonic())
    took_s = span_s[3] - span_s[2]
    longest_s = max(late - early for early, late in itertools.pairwise(looked_s))
    # Handing the ids over needs the lock for a part of the time; the work itself does not.
    assert longest_s < 0.6 * took_s
