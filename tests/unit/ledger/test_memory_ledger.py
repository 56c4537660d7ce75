"""What one scheduler's ledger must say of the work it promised."""

import pytest

from mooncake_core.ledger import InstanceLoad, Limits, MemoryLedger, RefusalReason, Reservation
from mooncake_core.ledger.contract import BUCKET_S


def reservation(name: str, cost_s: float = 1.0, **changes: object) -> Reservation:
    fields = dict(id=name, prefill="p", prefill_cost_s=cost_s, decode="d", kv_tokens=100, prefill_end_s=5.0,
                  decode_end_s=9.0)  # fmt: skip
    return Reservation(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
def ledger() -> MemoryLedger:
    return MemoryLedger()


async def test_only_the_oldest_prefill_is_counted_down(ledger: MemoryLedger) -> None:
    await ledger.reserve(reservation("a", 1.0), Limits(), 10.0)
    await ledger.reserve(reservation("b", 2.0), Limits(), 10.5)
    assert ledger.loads(10.75)["p"].queued_s == pytest.approx(2.25)
    assert ledger.loads(10.75)["p"].queued == 2


async def test_a_prefill_that_overruns_its_prediction_counts_as_about_to_end(ledger: MemoryLedger) -> None:
    await ledger.reserve(reservation("a", 1.0), Limits(), 0.0)
    await ledger.reserve(reservation("b", 2.0), Limits(), 0.0)
    assert ledger.loads(50.0)["p"].queued_s == pytest.approx(2.0)


async def test_the_next_prefill_runs_from_the_moment_the_one_before_it_ended(ledger: MemoryLedger) -> None:
    await ledger.reserve(reservation("a", 1.0), Limits(), 0.0)
    await ledger.reserve(reservation("b", 2.0), Limits(), 0.0)
    ledger.prefill_finished("a", 3.0)
    assert ledger.loads(3.5)["p"].queued_s == pytest.approx(1.5)


async def test_a_prefill_behind_the_head_that_leaves_does_not_restart_the_head(ledger: MemoryLedger) -> None:
    await ledger.reserve(reservation("a", 4.0), Limits(), 0.0)
    await ledger.reserve(reservation("b", 2.0), Limits(), 1.0)
    ledger.release("b", 2.0)
    assert ledger.loads(3.0)["p"].queued_s == pytest.approx(1.0)


async def test_a_decode_instance_that_prefills_itself_has_the_prefill_in_its_own_queue(
    ledger: MemoryLedger,
) -> None:
    await ledger.reserve(reservation("a", 1.0, prefill=None), Limits(), 0.0)
    assert ledger.loads(0.0)["d"].queued_s == pytest.approx(1.0)
    assert "p" not in ledger.loads(0.0)


async def test_a_request_arrives_at_decode_when_its_prefill_has_ended(ledger: MemoryLedger) -> None:
    await ledger.reserve(reservation("a"), Limits(), 0.0)
    before = ledger.loads(0.0)["d"]
    assert (before.arriving, before.batch, before.kv_tokens) == (1, 0, 100)
    assert before.prefill_ends == ((round(5.0 / BUCKET_S), 1, 100),)
    ledger.prefill_finished("a", 6.0)
    after = ledger.loads(6.0)["d"]
    assert (after.arriving, after.batch, after.kv_tokens, after.prefill_ends) == (0, 1, 100, ())


async def test_a_decode_that_begins_late_is_expected_to_end_as_much_later(ledger: MemoryLedger) -> None:
    await ledger.reserve(reservation("a", prefill_end_s=5.0, decode_end_s=9.0), Limits(), 0.0)
    ledger.prefill_finished("a", 7.0)
    assert ledger.loads(7.0)["d"].decode_ends == ((round(11.0 / BUCKET_S), 1, 100),)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(queued_s=1.9), RefusalReason.TTFT),
        (Limits(batch=1), RefusalReason.TBT),
        (Limits(kv_tokens=199), RefusalReason.KV_MEMORY),
        (Limits(queued_s=1.9, batch=1, kv_tokens=199), RefusalReason.TTFT),
    ],
)
async def test_a_reservation_beyond_a_limit_is_refused_with_its_reason(
    ledger: MemoryLedger, limits: Limits, reason: RefusalReason
) -> None:
    await ledger.reserve(reservation("a"), Limits(), 0.0)
    assert await ledger.reserve(reservation("b"), limits, 0.0) is reason
    assert ledger.loads(0.0)["d"].arriving == 1


async def test_a_reservation_that_just_fits_is_taken(ledger: MemoryLedger) -> None:
    await ledger.reserve(reservation("a"), Limits(), 0.0)
    assert await ledger.reserve(reservation("b"), Limits(queued_s=2.0, batch=2, kv_tokens=200), 0.0) is None


async def test_ending_twice_and_ending_the_unknown_change_nothing(ledger: MemoryLedger) -> None:
    await ledger.reserve(reservation("a"), Limits(), 0.0)
    await ledger.reserve(reservation("b"), Limits(), 0.0)
    for _ in range(2):
        ledger.prefill_finished("a", 1.0)
        ledger.prefill_finished("nobody", 1.0)
    for _ in range(2):
        ledger.release("a", 2.0)
        ledger.release("nobody", 2.0)
    assert ledger.loads(2.0)["d"] == InstanceLoad(
        arriving=1, kv_tokens=100, prefill_ends=((50, 1, 100),), decode_ends=((90, 1, 100),)
    )


async def test_the_same_id_is_not_reserved_twice(ledger: MemoryLedger) -> None:
    await ledger.reserve(reservation("a"), Limits(), 0.0)
    with pytest.raises(ValueError, match="release it"):
        await ledger.reserve(reservation("a"), Limits(), 0.0)


async def test_after_close_nothing_is_held(ledger: MemoryLedger) -> None:
    await ledger.reserve(reservation("a"), Limits(), 0.0)
    await ledger.close()
    assert ledger.loads(0.0) == {}
