"""What is learned of sessions, and what leaves DRAM and comes back for it."""

import random
import weakref
from array import array

import pytest

from mooncake_scheduler.conductor.tiering import Following, Gaps, Pace, Planner, Scores, Sessions, Silent
from mooncake_scheduler.conductor.tiering.following import MOST_SESSIONS


def chain(session, blocks, shared=0):
    """Block keys of one session's prompt; the first `shared` are those of every session."""
    return [*range(-shared, 0), *range(1_000 * session, 1_000 * session + blocks - shared)]


def learned(draw, sessions=200, turns=8):
    """Gaps of so many sessions, each with gaps of its own."""
    gaps = Gaps()
    for number in range(sessions):
        pace = Pace()
        for turn in range(1, turns):
            gaps.observe_turn(turn, pace, draw(number))
        gaps.observe_end(turns)
    return gaps


def test_a_prompt_that_goes_through_the_end_of_an_earlier_one_is_its_next_turn():
    sessions = Sessions()
    first = sessions.turn(chain(1, 3), "t", 0.0)
    other = sessions.turn(chain(2, 3), "t", 1.0)
    assert sessions.turn(chain(1, 5), "t", 9.0) is first
    assert sessions.turn(chain(2, 3), "t", 9.0) is other
    assert (first.turn, other.turn, len(sessions)) == (2, 2, 2)


def test_a_prompt_of_another_tenant_continues_nothing():
    sessions = Sessions()
    first = sessions.turn(chain(1, 3), "t", 0.0)
    theirs = sessions.turn(chain(1, 3), "u", 9.0)
    assert theirs is not first
    assert sessions.turn(chain(1, 5), "t", 10.0) is first
    assert sessions.turn(chain(1, 4), "u", 11.0) is theirs


def test_what_several_prompts_begin_with_is_no_sessions_end():
    sessions = Sessions()
    sessions.turn([7], "t", 0.0)
    sessions.turn([7, 1], "t", 1.0)
    other = sessions.turn([7, 2], "t", 2.0)
    assert other.turn == 1
    again = sessions.turn([7], "t", 3.0)
    assert sessions.turn([7, 3], "t", 4.0) is not again


def test_the_silent_are_given_up_once_a_turn_is_improbable_and_never_while_busy():
    sessions = Sessions()
    rng = random.Random(1)
    for number in range(40):
        for turn in range(3):
            sessions.turn(chain(number, 3 + turn), "t", number + 30.0 * turn + rng.random())
    busy = sessions.turn(chain(99, 3), "t", 200.0)
    busy.busy = True
    for now_s in (200.0, 400.0, 1_000.0, 100_000.0):
        sessions.look(now_s)
    assert list(sessions) == [busy]


def test_more_sessions_than_are_kept_leave_those_silent_longest_behind():
    sessions = Sessions(most=10)
    for number in range(25):
        sessions.turn(chain(number, 2), "t", float(number))
    gone = sessions.look(25.0)[1]
    assert [session.turn for session in gone] == [1] * 15
    assert [session.last_s for session in sessions] == [float(n) for n in range(15, 25)]


@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_gaps_are_learned_as_they_are(sigma):
    rng = random.Random(3)
    gaps = learned(lambda _: rng.lognormvariate(4.1, sigma))
    seen = sorted(rng.lognormvariate(4.1, sigma) for _ in range(20_000))
    for within_s in (20.0, 60.0, 150.0):
        truth = sum(gap_s <= within_s for gap_s in seen) / len(seen)
        assert gaps.next_turn(1, Pace(), 0.0, within_s).soon == pytest.approx(truth, abs=0.05)


def test_a_session_that_keeps_its_pace_is_known_for_it_and_one_that_does_not_is_not():
    rng = random.Random(5)
    paces_s = [rng.choice([2.0, 500.0]) for _ in range(200)]
    steady = learned(lambda number: paces_s[number] * rng.lognormvariate(0, 0.1))
    mixed = learned(lambda _: rng.choice([2.0, 500.0]) * rng.lognormvariate(0, 0.1))
    for gaps, likely in ((steady, True), (mixed, False)):
        quick, slow = Pace(), Pace()
        for _ in range(4):
            gaps.observe_turn(1, quick, 2.0)
            gaps.observe_turn(1, slow, 500.0)
        assert (gaps.next_turn(5, quick, 0.0, 4.0).soon > 0.8) is likely
        assert (gaps.next_turn(5, slow, 0.0, 4.0).soon < 0.1) is likely


def test_after_the_last_turn_that_there_ever_was_none_is_expected():
    gaps = learned(lambda _: 60.0)
    assert gaps.next_turn(7, Pace(), 0.0, 60.0).comes > 0.9
    assert gaps.next_turn(8, Pace(), 0.0, 60.0).comes < 0.1


def test_silence_alone_teaches_that_sessions_end():
    gaps = Gaps()
    for _ in range(100):
        gaps.observe_turn(1, Pace(), 10.0)
    before = gaps.next_turn(2, Pace(), 0.0, 60.0).comes
    for _ in range(20):
        comes = gaps.next_turn(2, Pace(), 500.0, 60.0).comes
        gaps.silent([Silent(2, Pace(), 500.0, comes)] * 100)
    assert gaps.next_turn(2, Pace(), 0.0, 60.0).comes < before / 2
    assert gaps.next_turn(1, Pace(), 0.0, 60.0).comes > 0.8


def test_gaps_that_go_on_are_in_what_is_learned_as_far_as_they_go():
    gaps = Gaps()
    for _ in range(50):
        gaps.observe_turn(1, Pace(), 10.0)
    alone = gaps.next_turn(1, Pace(), 0.0, 20.0).soon
    gaps.silent([Silent(1, Pace(), 100.0, 1.0)] * 50)
    assert gaps.next_turn(1, Pace(), 0.0, 20.0).soon == pytest.approx(alone / 2, abs=0.08)


def planner(capacity_blocks, sessions=40):
    """A planner that knows gaps of a minute, and that sessions take eight turns."""
    plan = Planner(Sessions(), capacity_blocks)
    rng = random.Random(2)
    gaps = plan.sessions.gaps("t")
    for _ in range(sessions):
        pace = Pace()
        for turn in range(1, 8):
            gaps.observe_turn(turn, pace, rng.lognormvariate(4.1, 0.5))
        gaps.observe_end(8)
    return plan


def test_the_blocks_that_yield_are_the_ends_of_prompts_and_of_nobody_more_than_of_others():
    plan = planner(60)
    for number in range(3):
        session = plan.turn(chain(number, 40), "t", float(number))
        left = plan.stored(session, float(number))
        assert plan.used_blocks <= 60
        assert all(not plan.holds(key) for key in left)
    held = [session.warm for session in plan.sessions]
    assert max(held) - min(held) <= 2
    for session in plan.sessions:
        assert all(plan.holds(key) for key in session.keys[: session.warm])


def test_a_shared_beginning_stays_as_long_as_one_holds_it():
    plan = planner(30)
    for number in range(5):
        plan.stored(plan.turn(chain(number, 12, shared=4), "t", float(number)), float(number))
    assert all(plan.holds(key) for key in range(-4, 0))
    assert plan.used_blocks <= 30


def test_what_has_ended_is_forgotten_and_its_room_goes_to_those_who_come_again():
    plan = planner(60)
    for number in range(3):
        plan.stored(plan.turn(chain(number, 40), "t", 0.0), 0.0)
    for number in range(2):
        plan.stored(plan.turn(chain(number, 40), "t", 60.0), 60.0)
    # The third is silent for long; two are not.
    for now_s in (61.0, 300.0, 500.0):
        for number in range(2):
            plan.stored(plan.turn(chain(number, 40), "t", now_s), now_s)
    promotions, _ = plan.promotions(560.0, 100)
    assert {promotion.keys[0] // 1_000 for promotion in promotions} <= {0, 1}
    silent = next(iter(plan.sessions), None)
    assert silent is None or silent.warm < 30


def promoted(plan):
    """A session of which some blocks were promoted at 10 s, because another's were lost and left room."""
    first, other = (plan.turn(chain(number, 30), "t", 0.0) for number in (1, 2))
    for session in (first, other):
        plan.stored(session, 1.0)
    other.busy = True
    plan.dropped(other.keys)
    cold = first.cold
    (promotion,), left = plan.promotions(10.0, 100)
    assert not left
    assert promotion.session is first
    assert len(promotion.keys) == cold > 0
    return promotion


def test_a_turn_scores_what_was_promoted_for_it():
    plan = planner(40)
    promotion = promoted(plan)
    plan.arrived(promotion, 11.0)
    plan.turn(chain(1, 31), "t", 40.0)
    plan.close()
    scores = plan.scores
    assert (scores.in_time, scores.late, scores.wasted) == (len(promotion.keys), 0, 0)


def test_a_turn_that_comes_before_its_blocks_scores_them_late():
    plan = planner(40)
    promotion = promoted(plan)
    plan.turn(chain(1, 31), "t", 10.5)
    plan.arrived(promotion, 11.0)
    plan.close()
    scores = plan.scores
    assert (scores.in_time, scores.late, scores.wasted) == (0, len(promotion.keys), 0)


def test_what_nobody_came_for_was_promoted_for_nothing():
    plan = planner(40)
    promotion = promoted(plan)
    plan.arrived(promotion, 11.0)
    plan.close()
    assert plan.scores.wasted == len(promotion.keys)


def test_what_yields_before_it_was_used_was_promoted_for_nothing():
    plan = planner(40)
    promotion = promoted(plan)
    plan.arrived(promotion, 11.0)
    for number in range(3, 9):
        plan.stored(plan.turn(chain(number, 40), "t", 12.0), 12.0)
    assert plan.scores.wasted > 0
    assert plan.used_blocks <= 40


def test_the_policy_stands_back_when_waste_exceeds_gain_and_tries_again_later():
    scores = Scores()
    for _ in range(100):
        scores.lost(10)
    assert scores.bar > 1
    scores.forgive(200.0)
    assert scores.bar < 1
    for _ in range(100):
        scores.used(50, 0)
    assert scores.bar == pytest.approx(0.5)


# A store that makes room by itself: its DRAM is followed.

RUN = 32
"""Blocks of 16 tokens in a run."""


def prompt(session, runs):
    """Keys of a prompt's blocks: what was said before comes first."""
    return [1_000_000 * session + at for at in range(runs * RUN)]


def followed(capacity_runs):
    following = Following(block_size_tokens=16)
    following.resize(capacity_runs * RUN)
    return following


def turn(following, session, runs, at_s):
    name = f"{session}@{at_s}"
    following.came(name, "t", prompt(session, runs), at_s)
    following.ended(name, at_s + 1.0, stored=True)


def with_gaps_of_a_minute(following, sessions, rounds, runs=2):
    """Each session speaks once a minute, one after the other; returns when the last round was over."""
    for number in range(rounds):
        for session in range(sessions):
            turn(following, session, runs + number, 60.0 * number + session)
    return 60.0 * (rounds - 1) + sessions


def with_room_again():
    """Sessions that speak once a minute, half of whose blocks had to leave DRAM; now all have room."""
    following = followed(capacity_runs=30)
    now_s = with_gaps_of_a_minute(following, 10, 5)
    following.resize(100 * RUN)
    return following, now_s


def first_wish(following, now_s):
    """The next thing that is to be brought, and when."""
    for at in range(120):
        for wish in following.plan(now_s + at, 100 * RUN):
            return wish, now_s + at
    raise AssertionError("nothing was wanted for two minutes")


def test_what_lies_on_ssd_is_wanted_before_its_turn_from_the_prompts_start():
    wish, at_s = first_wish(*with_room_again())
    session = wish.keys[0] // 1_000_000
    assert wish.keys == prompt(session, 6)
    assert wish.number > 0
    assert at_s < 60.0 * 5 + session, "its turn had come already"


def test_no_more_is_wanted_at_once_than_may_be_read():
    following, _ = with_room_again()
    _, at_s = first_wish(*with_room_again())
    assert following.plan(at_s, 0.9 * RUN) == []
    assert len(following.plan(at_s, 1.0 * RUN)) == 1


def test_what_was_wanted_for_a_turn_is_not_wanted_again_with_what_joins_it():
    following, now_s = with_room_again()
    wanted = {}
    for at in range(120):
        for wish in following.plan(now_s + at, 1.0 * RUN):
            wanted.setdefault(wish.keys[0] // 1_000_000, []).extend(wish.keys)
    assert any(len(keys) == 6 * RUN for keys in wanted.values())
    for session, keys in wanted.items():
        assert keys == prompt(session, len(keys) // RUN)


def test_prompts_of_sessions_that_were_given_up_are_forgotten():
    following = followed(capacity_runs=1_000)
    keys = array("Q", prompt(0, 4))
    prompt_of_the_first = weakref.ref(keys)
    following.came("first", "t", keys, 0.0)
    following.ended("first", 1.0, stored=True)
    del keys
    for session in range(1, MOST_SESSIONS + 2):
        turn(following, session, 1, 10.0)
    following.plan(20.0, 0)
    following.plan(21.0, 0)
    assert prompt_of_the_first() is None


def test_a_clock_that_went_back_leaves_nothing_to_be_read():
    following, _ = with_room_again()
    _, at_s = first_wish(*with_room_again())
    assert following.plan(at_s, -1.0 * RUN) == []


def test_a_prompt_that_ends_when_its_session_is_given_up_takes_no_room():
    following = followed(capacity_runs=1_000)
    for name in ("quick", "slow"):
        following.came(name, "t", prompt(0, 4), 0.0)
    following.ended("quick", 1.0, stored=True)
    for session in range(1, MOST_SESSIONS + 2):
        following.came(f"{session}", "t", prompt(session, 1), 10.0)
        following.ended(f"{session}", 11.0, stored=False)
    following.plan(20.0, 0)
    following.ended("slow", 30.0, stored=True)
    assert following.used_runs == 0


def test_nothing_is_wanted_where_all_of_it_fits():
    following = followed(capacity_runs=1_000)
    now_s = with_gaps_of_a_minute(following, 10, 5)
    assert [wish for at in range(60) for wish in following.plan(now_s + at, 40 * RUN)] == []


def test_what_is_to_stay_is_looked_up_when_nobody_has_read_it_for_a_while():
    following = followed(capacity_runs=1_000)
    turn(following, 1, 3, 0.0)
    turn(following, 2, 4, 2.0)
    assert following.keep(4.9) == []
    assert following.keep(5.0) == prompt(1, 3)
    assert following.keep(7.0) == prompt(2, 4)
    assert following.keep(9.9) == []
    assert following.keep(10.0) == prompt(1, 3)


def test_what_is_to_stay_is_looked_up_after_a_clock_went_back():
    following = followed(capacity_runs=1_000)
    turn(following, 1, 3, 1_000.0)
    assert following.keep(500.0) == prompt(1, 3)
    assert following.keep(504.0) == []
    assert following.keep(505.0) == prompt(1, 3)


def test_what_conversations_have_in_common_is_looked_up_once():
    following = followed(capacity_runs=1_000)
    for name, own in (("a", 5_000), ("b", 9_000)):
        following.came(name, "t", [*range(2 * RUN), *range(own, own + RUN)], 0.0)
        following.ended(name, 1.0, stored=True)
    kept = following.keep(10.0)
    assert len(kept) == len(set(kept)) == 4 * RUN


def test_what_yields_is_not_looked_up_any_more():
    following = followed(capacity_runs=12)
    turn(following, 1, 6, 0.0)
    turn(following, 2, 6, 1.0)
    assert len(following.keep(60.0)) == 10 * RUN, "of 12 runs of DRAM it counts on 85 %"


def test_blocks_beyond_the_last_whole_run_are_brought_and_kept_with_it():
    following = followed(capacity_runs=1_000)
    keys = prompt(1, 3)[:-5]
    following.came("r", "t", keys, 0.0)
    following.ended("r", 1.0, stored=True)
    assert following.keep(10.0) == keys


def scores_of(found_after_s, *, there=False):
    """How a wish is scored that was answered so late (None: never), when its turn comes 5 s after it."""
    following, now_s = with_room_again()
    wish, at_s = first_wish(following, now_s)
    if found_after_s is not None:
        brought, found = ((), wish.keys) if there else (wish.keys, ())
        following.found(wish.number, brought, found, (), at_s + found_after_s)
    turn(following, wish.keys[0] // 1_000_000, 7, at_s + 5.0)
    return following.scores


def test_what_was_brought_before_its_turn_counts_as_in_time():
    scores = scores_of(1.0)
    assert scores.in_time == 6
    assert scores.late == 0


def test_what_was_wanted_and_is_not_there_yet_counts_as_late():
    scores = scores_of(None)
    assert scores.in_time == 0
    assert scores.late >= 1


def test_what_yielded_before_it_was_brought_is_wasted_and_not_in_time_too():
    following, now_s = with_room_again()
    wish, at_s = first_wish(following, now_s)
    following.resize(0)
    turn(following, 77, 1, at_s + 0.6)
    wasted = following.scores.wasted
    assert wasted > 0
    following.found(wish.number, wish.keys, (), (), at_s + 1.0)
    turn(following, wish.keys[0] // 1_000_000, 7, at_s + 5.0)
    assert (following.scores.in_time, following.scores.wasted) == (0, wasted)


def test_what_had_been_in_dram_all_the_time_counts_as_nothing():
    scores = scores_of(1.0, there=True)
    assert (scores.in_time, scores.late, scores.wasted) == (0, 0, 0)


def test_a_finding_that_comes_after_the_turn_or_of_an_unknown_wish_is_not_heard():
    following, now_s = with_room_again()
    wish, at_s = first_wish(following, now_s)
    turn(following, wish.keys[0] // 1_000_000, 7, at_s + 5.0)
    following.found(wish.number, wish.keys, (), (), at_s + 6.0)
    following.found(12_345, [1], (), (), at_s + 6.0)
    turn(following, wish.keys[0] // 1_000_000, 8, at_s + 65.0)
    assert following.scores.in_time == 0


def test_blocks_that_the_store_has_lost_are_not_kept():
    following, now_s = with_room_again()
    wish, at_s = first_wish(following, now_s)
    used = following.used_runs
    following.found(wish.number, (), (), wish.keys, at_s)
    assert following.used_runs == used - 6


def test_a_request_whose_end_nobody_told_does_not_hold_its_session_for_good():
    following, _ = with_room_again()
    following.came("lost", "t", prompt(0, 6), 300.0)
    for at in range(1, 240):
        assert all(wish.keys[0] != 0 for wish in following.plan(300.0 + at, 100 * RUN))
    following.plan(300.0 + 3_601, 0)
    following.ended("lost", 300.0 + 3_602, stored=True)
    turn(following, 0, 6, 3_960.0)
    assert following.sessions > 0


def test_a_prompt_shorter_than_a_run_is_no_session():
    following = followed(capacity_runs=30)
    following.came("short", "t", list(range(RUN - 1)), 0.0)
    following.ended("short", 1.0, stored=True)
    assert following.sessions == 0
