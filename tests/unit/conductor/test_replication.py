"""Which blocks are copied, where to, and when copies are given up."""

import pytest

from mooncake_scheduler.conductor.replication import SUPERBLOCK_BLOCKS, Replication

SIZE = SUPERBLOCK_BLOCKS
HOSTS = ("a", "b", "c", "d")


def heated(reads_a_s, *, runs=1, block_s=0.01, seconds=60, **settings):
    """Runs on host a, each read so many times a second for a minute: what knows of it, and where they are."""
    replication = Replication(block_s, **settings)
    homes = {}
    for run in range(runs):
        keys = [1_000 * run + at for at in range(SIZE)]
        homes |= {key: ["a"] for key in keys}
        for read in range(int(seconds * reads_a_s)):
            replication.read(keys, 0, SIZE, read / reads_a_s)
    return replication, homes


def carry_out(copies, releases, homes):
    for copy in copies:
        for key in copy.keys:
            homes[key].append(copy.target)
    for release in releases:
        for key in release.keys:
            homes[key].remove(release.host)


def test_what_is_read_so_often_that_readers_wait_is_copied_to_another_host():
    replication, homes = heated(4.0)  # 0.16 s a read, 4 a second: a would be busy for 40 % of the time
    copies, releases = replication.plan(60.0, HOSTS, homes)
    assert [(copy.source, len(copy.keys)) for copy in copies] == [("a", SIZE)]
    assert copies[0].target != "a"
    assert not releases


def test_what_is_read_rarely_or_moves_quickly_is_not():
    for replication, homes in (heated(0.2), heated(4.0, block_s=0.0001)):
        assert replication.plan(60.0, HOSTS, homes) == ([], [])


def test_a_copy_goes_to_the_host_that_is_busy_least_and_comes_from_a_holder():
    replication, homes = heated(2.0, runs=2)
    homes |= {key: ["b"] for key in homes if key >= 1_000}
    copies, _ = replication.plan(60.0, HOSTS, homes)
    assert {copy.target for copy in copies} <= {"c", "d"}
    for copy in copies:
        assert copy.source in homes[copy.keys[0]]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_copies_end_at_the_cap_and_at_one_a_host(most):
    replication, homes = heated(40.0, most_replicas=most, cool_down_s=1.0)
    for second in range(10):
        carry_out(*replication.plan(60.0 + 2 * second, HOSTS, homes), homes)
        for key in range(SIZE):
            replication.read(list(range(SIZE)), 0, SIZE, 60.0 + 2 * second)
            assert len(set(homes[key])) == len(homes[key]) <= most
    assert len(homes[0]) == most
    assert replication.copied_blocks == (most - 1) * SIZE


def test_copies_take_no_more_room_than_they_are_given():
    replication, homes = heated(4.0, runs=5, most_blocks=2 * SIZE)
    copies, _ = replication.plan(60.0, HOSTS, homes)
    assert len(copies) == 2
    assert replication.copied_blocks == 2 * SIZE


def test_what_was_copied_is_left_alone_until_it_has_cooled_down():
    replication, homes = heated(40.0, cool_down_s=10.0)
    carry_out(*replication.plan(60.0, HOSTS, homes), homes)
    assert replication.plan(65.0, HOSTS, homes) == ([], [])
    assert replication.plan(70.0, HOSTS, homes)[0]


def test_a_copy_that_nobody_reads_any_longer_is_released_and_the_first_stays():
    replication, homes = heated(8.0)
    carry_out(*replication.plan(60.0, HOSTS, homes), homes)
    assert len(homes[0]) == 2
    carry_out(*replication.plan(600.0, HOSTS, homes), homes)
    assert homes[0] == ["a"]
    assert replication.copied_blocks == 0


def test_neither_copies_nor_releases_alternate_under_even_heat():
    replication, homes = heated(4.0, cool_down_s=1.0)
    changes = 0
    for second in range(60, 240):
        for read in range(4):
            replication.read(list(range(SIZE)), 0, SIZE, second + read / 4)
        plan = replication.plan(float(second + 1), HOSTS, homes)
        changes += len(plan[0]) + len(plan[1])
        carry_out(*plan, homes)
    assert changes == len(homes[0]) - 1


def test_a_host_that_is_gone_takes_its_copies_with_it():
    replication, homes = heated(8.0, cool_down_s=1.0)
    (copy,), _ = replication.plan(60.0, HOSTS, homes)
    replication.lost(copy.target)
    assert replication.copied_blocks == 0
    left = [host for host in HOSTS if host != copy.target]
    copies, _ = replication.plan(62.0, left, homes)
    assert copy.target not in [each.target for each in copies]


def test_a_copy_on_its_way_is_waited_for_and_not_made_twice():
    replication, homes = heated(40.0, cool_down_s=10.0)
    (copy,), _ = replication.plan(60.0, HOSTS, homes)
    for second in (70.0, 80.0, 90.0):
        replication.read(list(range(SIZE)), 0, SIZE, second)
        assert replication.plan(second, HOSTS, homes) == ([], [])
        assert replication.copied_blocks == SIZE
    carry_out([copy], [], homes)
    assert replication.counts(copy)
    # It is known when it comes, and released when nobody reads it.
    _, (release,) = replication.plan(900.0, HOSTS, homes)
    assert release.host == copy.target


def test_a_copy_that_takes_longer_than_heat_lasts_is_given_up():
    replication, homes = heated(40.0, memory_s=60.0)
    (copy,), _ = replication.plan(60.0, HOSTS, homes)
    assert replication.plan(119.0, HOSTS, homes) == ([], [])
    assert replication.counts(copy)
    assert replication.plan(900.0, HOSTS, homes) == ([], [])
    assert not replication.counts(copy)
    assert replication.copied_blocks == 0


def test_only_whole_runs_count_and_a_read_in_the_middle_of_one_does_not():
    replication = Replication(0.01)
    keys = list(range(3 * SIZE))
    homes = {key: ["a"] for key in keys}
    for read in range(400):
        replication.read(keys, SIZE // 2, 3 * SIZE - 1, read / 8)
    copies, _ = replication.plan(50.0, HOSTS, homes)
    assert [copy.keys[0] for copy in copies] == [SIZE]
