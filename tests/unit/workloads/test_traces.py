from pathlib import Path

import pytest

from mooncake_simulator.workloads import Request, TraceError, jitter, read_trace, token_hit_rate, write_trace

LINE = '{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}\n'


def test_a_line_of_the_released_traces_is_read_and_written_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(LINE)
    requests = read_trace(path)
    assert requests == [Request(timestamp_ms=27482, input_length=600, output_length=52, hash_ids=(46, 47))]
    again = tmp_path / "again.jsonl"
    assert write_trace(again, requests) == 1
    assert again.read_text().replace(",", ", ").replace(":", ": ") == LINE


def test_a_part_of_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [LINE.replace("27482", str(n)) for n in range(10)]
    path.write_text("".join(lines[:5]) + "\n" + "".join(lines[5:]))
    assert [request.timestamp_ms for request in read_trace(path, skip=3, limit=4)] == [3, 4, 5, 6]
    assert [request.timestamp_ms for request in read_trace(path, skip=9, limit=4)] == [9]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "t.jsonl:2: "),
        ("[1]", "t.jsonl:2: Expected `object`"),
        (b"\xff\xfe", "t.jsonl:2: "),
        (LINE.replace("27482", "-1"), "timestamp"),
        (LINE.replace("600", "0"), "input_length"),
        (LINE.replace("600", '"600"'), "input_length"),
        (LINE.replace("52", "0"), "output_length"),
        (LINE.replace('"hash_ids"', '"hashes"'), "missing required field `hash_ids`"),
        (LINE.replace("[46, 47]", "[46]"), "1 hash_ids for an input_length of 600: expected 2"),
    ],
)
def test_a_bad_line_is_told_by_file_and_line(tmp_path: Path, line: str | bytes, told: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(LINE.encode() + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(TraceError, match=r"t\.jsonl:2: ") as caught:
        read_trace(path)
    assert told in str(caught.value)


def test_a_file_that_cannot_be_read_or_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="none"):
        write_trace(tmp_path / "none" / "t", [])


def test_jitter_spreads_a_tick_and_keeps_the_requests() -> None:
    tick = [Request(timestamp_ms=3000, input_length=1, output_length=1, hash_ids=(n,)) for n in range(50)]
    moved = jitter(tick, 3000, seed=1)
    times = [request.timestamp_ms for request in moved]
    assert times == sorted(times)
    assert 3000 <= times[0] < times[-1] <= 6000
    assert sorted(request.hash_ids for request in moved) == sorted(request.hash_ids for request in tick)
    assert jitter(tick, 3000, seed=1) == moved != jitter(tick, 3000, seed=2)


def test_a_cache_that_is_too_small_forgets_the_ends_of_prefixes_first() -> None:
    one = Request(timestamp_ms=0, input_length=1024, output_length=1, hash_ids=(1, 2))
    two = Request(timestamp_ms=0, input_length=1024, output_length=1, hash_ids=(3, 4))
    assert token_hit_rate([one, two, one]) == pytest.approx(1024 / 3072)
    assert token_hit_rate([one, two, one], capacity_blocks=3) == pytest.approx(512 / 3072)
    assert token_hit_rate([one, two, one], capacity_blocks=2) == 0


SHARED = Path(__file__).parents[4] / "shared" / "traces"


@pytest.mark.parametrize(
    ("name", "limit", "rate"),
    [
        ("conversation_trace.jsonl", None, 0.374),
        ("conversation_trace.jsonl", 1000, 0.216),
        ("synthetic_trace.jsonl", None, 0.651),
    ],
)
def test_the_released_traces_hit_an_infinite_cache_as_published(
    name: str, limit: int | None, rate: float
) -> None:
    if not (SHARED / name).exists():
        pytest.skip(f"{name} of the FAST'25 release is not beside the checkout")
    assert token_hit_rate(read_trace(SHARED / name, limit=limit)) == pytest.approx(rate, abs=0.001)


@pytest.mark.parametrize(("capacity", "rate"), [(10_000, 0.215), (30_000, 0.332), (50_000, 0.362)])
def test_the_conversation_trace_hits_a_limited_cache_as_computed_elsewhere(
    capacity: int, rate: float
) -> None:
    path = SHARED / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip("the FAST'25 traces are not beside the checkout")
    assert token_hit_rate(read_trace(path), capacity) == pytest.approx(rate, abs=0.004)
