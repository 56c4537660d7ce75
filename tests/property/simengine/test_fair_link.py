from hypothesis import given
from hypothesis import strategies as st

from mooncake_simulator.engine.links import FairLink

ARRIVALS = st.lists(st.tuples(st.floats(0, 10), st.floats(1, 1000)), min_size=1, max_size=8)


@given(ARRIVALS)
def test_all_bytes_arrive_and_no_faster_than_the_link_allows(arrivals: list[tuple[float, float]]) -> None:
    link = FairLink(50.0)
    started: dict[int, tuple[float, float]] = {}
    ended: dict[int, float] = {}

    def advance(until: float) -> None:
        while (end := link.next_end_s()) is not None and end <= until:
            for flow in link.advance(end):
                ended[flow] = end
        link.advance(until)

    for at, size in sorted(arrivals):
        advance(at)
        started[link.start(size, at)] = (at, size)
    advance(1e6)
    assert set(ended) == set(started)
    total = sum(size for _, size in started.values())
    assert abs(link.carried_bytes - total) < 1e-3 * total
    for flow, (at, size) in started.items():
        assert ended[flow] >= at + size / 50.0 - 1e-6
        assert ended[flow] <= 10 + total / 50.0 + 1e-6
