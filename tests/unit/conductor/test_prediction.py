"""The load of a decode instance at a later moment."""

from itertools import pairwise

from mooncake_core.ledger import InstanceLoad
from mooncake_scheduler.conductor.prediction import DecodeLoad, decode_at, decode_course, decode_now

LOAD = InstanceLoad(
    batch=4,
    arriving=3,
    kv_tokens=7_000,
    prefill_ends=((95, 1, 500), (110, 1, 1_500), (200, 1, 2_000)),
    decode_ends=((90, 1, 400), (105, 2, 1_600), (130, 1, 1_000), (210, 3, 4_000)),
)
"""Seen at bucket 100: one arrival and one decode are overdue."""
NOW_S = 10.05


def test_now_means_blind_to_those_in_prefill():
    assert decode_now(LOAD) == DecodeLoad(4, 3_000, 7_000)


def test_arrivals_that_are_due_are_added():
    assert decode_at(LOAD, NOW_S, 10.05).batch == 4 + 1  # the overdue one may come any moment


def test_decodes_that_will_have_ended_are_removed_and_give_back_their_memory():
    # By 11.05 s: the arrivals of buckets 95 and 110 are there, the two of bucket 105 are gone.
    assert decode_at(LOAD, NOW_S, 11.05) == DecodeLoad(4 + 2 - 2, 7_000 - 2_000 - 1_600, 7_000 - 1_600)


def test_a_decode_that_overran_its_prediction_stays():
    assert decode_at(LOAD, NOW_S, 1e6).batch == 1


def test_a_decode_counts_until_its_bucket_is_over():
    assert decode_at(LOAD, NOW_S, 10.55).batch == 5
    assert decode_at(LOAD, NOW_S, 10.65).batch == 3


def test_a_load_whose_buckets_say_more_than_its_sums_never_gets_negative():
    odd = InstanceLoad(batch=1, kv_tokens=10, decode_ends=((101, 5, 1_000),))
    assert decode_at(odd, NOW_S, 20.0) == DecodeLoad(0, 0, 0)


def test_the_course_agrees_with_the_load_at_each_of_its_moments():
    course = list(decode_course(LOAD, NOW_S, 10.5))
    assert all(a[0] < b[0] for a, b in pairwise(course))
    for at_s, load in course:
        assert load == decode_at(LOAD, NOW_S, at_s + 0.01)
