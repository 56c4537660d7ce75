"""The queue's contract, for every order of calls."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncake_operator.control.backlog import Backlog

KEYS = st.sampled_from(["a", "b", "c"])


class BacklogMachine(RuleBasedStateMachine):
    """Wishes come, time passes, keys are taken and given back, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.backlog: Backlog[str] = Backlog(rest_s=0.5)
        self.now_s = 0.0
        self.active: set[str] = set()
        self.owed: dict[str, float] = {}
        """For each key the latest time by which it may first be handed out again."""

    @rule(key=KEYS)
    def wish_now(self, key: str) -> None:
        self.backlog.add(key, self.now_s)
        self.owed[key] = min(self.owed.get(key, 1e9), self.now_s)

    @rule(key=KEYS, delay_s=st.floats(0, 20))
    def wish_later(self, key: str, delay_s: float) -> None:
        self.backlog.add_at(key, self.now_s + delay_s, self.now_s)
        self.owed[key] = min(self.owed.get(key, 1e9), self.now_s + delay_s)

    @rule(step_s=st.floats(0, 10))
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s

    @rule()
    def take(self) -> None:
        taken = self.backlog.take(self.now_s)
        if taken is None:
            return
        key, since_s = taken
        assert key not in self.active, "a key was handed out twice at a time"
        assert key in self.owed, "a key was handed out that nobody wanted"
        assert since_s <= self.now_s
        del self.owed[key]
        self.active.add(key)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.active)))
        self.active.remove(key)
        self.backlog.done(key, self.now_s)

    @invariant()
    def the_same_number_is_active(self) -> None:
        assert self.backlog.active == len(self.active)

    @invariant()
    def what_was_wanted_is_never_lost(self) -> None:
        assert self.backlog.known() >= self.owed.keys() - self.active

    def teardown(self) -> None:
        # However it went: with all keys back and time enough, each wish is served exactly once.
        for key in sorted(self.active):
            self.backlog.done(key, self.now_s)
        served = []
        self.now_s += 100
        while taken := self.backlog.take(self.now_s):
            served.append(taken[0])
            self.backlog.done(taken[0], self.now_s)
        assert len(served) == len(set(served))
        assert set(served) >= self.owed.keys()


TestBacklog = BacklogMachine.TestCase


def test_a_key_rests_between_two_passes_so_that_a_burst_becomes_one() -> None:
    backlog: Backlog[str] = Backlog(rest_s=1.0)
    backlog.add("a", 0.0)
    assert backlog.take(0.0) == ("a", 0.0)
    backlog.add("a", 0.1)
    backlog.done("a", 0.2)
    backlog.add("a", 0.3)
    assert backlog.take(0.4) is None
    assert backlog.next_due_s() == 1.2
    assert backlog.take(1.2) == ("a", 1.2)
    backlog.done("a", 1.3)
    assert backlog.take(5.0) is None


def test_keys_are_served_in_the_order_in_which_they_came() -> None:
    backlog: Backlog[str] = Backlog()
    for key in ("c", "a", "b", "a", "c"):
        backlog.add(key, 0.0)
    assert [backlog.take(1.0), backlog.take(1.0), backlog.take(1.0), backlog.take(1.0)] == [
        ("c", 0.0),
        ("a", 0.0),
        ("b", 0.0),
        None,
    ]


def test_a_pass_replaces_older_wishes_for_later_times() -> None:
    backlog: Backlog[str] = Backlog()
    backlog.add_at("a", 30.0, 0.0)
    backlog.add("a", 0.0)
    assert backlog.take(0.0) == ("a", 0.0)
    backlog.done("a", 1.0)
    assert backlog.next_due_s() is None
