from mooncake_core.index import Source
from mooncake_scheduler.orphans import Orphans

GONE = Source("p-0", 3)
THERE = Source("p-1", 1)


def test_a_source_is_due_only_after_it_was_without_a_registration_for_the_whole_time() -> None:
    orphans = Orphans(patience_s=300)
    assert orphans.due([GONE, THERE], {"p-1"}, now_s=0) == []
    assert orphans.due([GONE, THERE], {"p-1"}, now_s=299) == []
    assert orphans.due([GONE, THERE], {"p-1"}, now_s=300) == [GONE]


def test_a_registration_that_comes_back_begins_the_time_anew() -> None:
    orphans = Orphans(patience_s=300)
    orphans.due([GONE], set(), now_s=0)
    assert orphans.due([GONE], {"p-0"}, now_s=200) == []
    assert orphans.due([GONE], set(), now_s=400) == []
    assert orphans.due([GONE], set(), now_s=700) == [GONE]


def test_a_new_life_of_the_instance_has_its_own_time() -> None:
    orphans = Orphans(patience_s=300)
    orphans.due([GONE], set(), now_s=0)
    assert orphans.due([Source("p-0", 4)], set(), now_s=300) == []
