"""The names that Mooncake's master exports and dashboards read (0.3.13)."""

import re

from mooncake_simulator.store.directory import Directory
from mooncake_simulator.store.metrics import MasterMetrics
from mooncake_simulator.store.objects import Segment

READ_BY_DASHBOARDS = {
    "master_allocated_bytes",
    "master_total_capacity_bytes",
    "segment_allocated_bytes",
    "segment_total_capacity_bytes",
    "master_key_count",
    "master_active_clients",
    "master_value_size_bytes_bucket",
    "master_exist_key_requests_total",
    "master_put_start_alloc_failures_total",
    "master_batch_put_start_requests_total",
    "master_batch_get_replica_list_items_total",
    "mem_cache_hit_nums_",
    "file_cache_hit_nums_",
    "valid_get_nums_",
    "total_get_nums_",
    "master_successful_evictions_total",
    "master_attempted_evictions_total",
    "master_evicted_key_count",
    "master_evicted_size_bytes",
    "master_promotion_completed_total",
    "ha_standby_state",
}


def test_the_names_of_a_real_master_are_there_with_their_values() -> None:
    directory, metrics = Directory(), MasterMetrics()
    directory.mount(Segment("10.0.0.1:15000", "c", 1 << 20), 0.0)
    directory.put_start([("k", 5000)], 0.0)
    directory.put_end(["k"], 0.0)
    metrics.called("batch_put_start", items=1)
    text = metrics.render(directory).decode()
    names = set(re.findall(r"^([a-z_]+)", text, re.MULTILINE))
    assert names >= READ_BY_DASHBOARDS
    assert 'segment_allocated_bytes{segment="10.0.0.1:15000"} 5000' in text
    assert "master_key_count 1" in text
    assert 'master_value_size_bytes_bucket{le="65536.000000"} 1' in text
    assert "master_batch_put_start_requests_total 1" in text


def test_sizes_are_counted_for_good_and_take_no_more_room_for_it() -> None:
    directory, metrics = Directory(), MasterMetrics()
    directory.mount(Segment("10.0.0.1:15000", "c", 1 << 30), 0.0)
    for number in range(2000):
        size = 5000 if number % 2 else 100_000
        directory.put_start([(f"k{number}", size)], 0.0)
        directory.put_end([f"k{number}"], 0.0)
        directory.remove(f"k{number}")
    assert len(directory.counts.sizes) == 2
    for _ in range(2):
        text = metrics.render(directory).decode()
        assert 'master_value_size_bytes_bucket{le="4096.000000"} 0' in text
        assert 'master_value_size_bytes_bucket{le="65536.000000"} 1000' in text
        assert 'master_value_size_bytes_bucket{le="+Inf"} 2000' in text
        assert f"master_value_size_bytes_sum {1000 * 105_000}" in text
        assert "master_value_size_bytes_count 2000" in text
