"""kill -9 of `mooncakectl up` itself: nothing survives it, and the next one begins clean."""

from __future__ import annotations

import httpx

from mooncake_testing.cluster import Cluster
from mooncake_testing.waiting import eventually


def test_after_kill_9_of_the_runtime_nothing_is_left_and_a_second_up_serves(running: Cluster) -> None:
    first = running.run_id
    running.runtime.kill()
    running.runtime.wait(10)
    eventually(lambda: not running.left_running(), "no process of the run is left", 10.0)
    running.start()
    assert running.run_id != first
    body = {"model": running.model, "prompt": [7] * 2000, "max_tokens": 5}
    answer = httpx.post(f"{running.endpoint}/v1/completions", json=body, timeout=30, trust_env=False)
    assert answer.json()["usage"]["completion_tokens"] == 5
