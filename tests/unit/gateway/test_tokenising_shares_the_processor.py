"""Entry 24 of the fault matrix: a thread that keeps Python's lock while it tokenises is of no use."""

from __future__ import annotations

import threading
from pathlib import Path

from mooncake_scheduler.gateway.tokens import ModelFolder
from mooncake_testing.toy_model import write_toy_model


def test_other_threads_run_on_while_a_long_text_is_tokenised(tmp_path: Path) -> None:
    folder = ModelFolder(write_toy_model(tmp_path))
    text = "the quick brown fox jumps over the lazy dog. " * 20_000
    encoding, ended = threading.Event(), threading.Event()

    def tokenise() -> None:
        for _ in range(3):
            encoding.set()
            folder.encode(text, add_special_tokens=True)
            encoding.clear()
        ended.set()

    worker = threading.Thread(target=tokenise)
    worker.start()
    turns = 0
    while not ended.wait(0.001):
        turns += encoding.is_set()
    worker.join()
    # Where the lock is held, this thread has a turn at the beginning and the end of each text and hardly one
    # more (5 were seen); else it has thousands, or on a busy machine hundreds.
    assert turns > 50, turns
