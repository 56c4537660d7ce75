import pytest

from mooncake_core.profiles import LLAMA3_70B_A800
from mooncake_scheduler.conductor.cost import CostModel
from mooncake_simulator.engine.sequence import State
from mooncake_simulator.engine.steps import Step
from mooncake_testing.simulated_scheduler import run, scheduler, sequence

COST = CostModel.from_profile(LLAMA3_70B_A800)


class External:
    """A connector that promises a fixed number of tokens."""

    def __init__(self, tokens: int | None) -> None:
        self.tokens = tokens
        self.keeps = False

    def matched_tokens(self, _: object, local_tokens: int) -> int | None:
        return None if self.tokens is None else max(0, self.tokens - local_tokens)

    def keeps_blocks(self, _: object, finish_reason: str) -> bool:
        return self.keeps and finish_reason == "length"


def test_a_chunked_prefill_takes_as_long_as_the_cost_model_says_for_the_whole_prompt() -> None:
    one = scheduler(max_num_batched_tokens=8)
    one.add(sequence("a", range(30), output=1))
    seconds = steps = 0.0
    while (step := one.plan()).work:
        seconds += step.duration_s(COST)
        steps += 1
        one.complete(step)
    assert steps == 4
    assert seconds == pytest.approx(COST.prefill_s(30, 0))


def test_the_last_token_is_computed_even_when_the_whole_prompt_is_cached() -> None:
    one = scheduler()
    one.add(sequence("first", range(16)))
    run(one)
    again = sequence("again", range(16))
    one.add(again)
    step = one.plan()
    assert again.cached_tokens == 12
    assert [item.tokens for item in step.work] == [4]


def test_a_decode_step_lasts_as_long_as_its_batch_and_context_demand() -> None:
    one = scheduler()
    for name in "abc":
        one.add(sequence(name, [ord(name)] * 8))
    one.complete(one.plan())
    assert one.plan().duration_s(COST) == pytest.approx(COST.step_s(3, 3 * 8))


def test_running_sequences_are_served_before_new_prompts_get_the_rest_of_the_budget() -> None:
    one = scheduler(max_num_batched_tokens=10)
    one.add(sequence("old", range(4), output=9))
    one.complete(one.plan())
    one.add(sequence("new", range(100, 130)))
    work = [(item.sequence.id, item.tokens) for item in one.plan().work]
    assert work == [("old", 1), ("new", 9)]


def test_the_youngest_is_preempted_when_memory_is_full_and_still_gives_the_same_tokens() -> None:
    one = scheduler(blocks=8, max_model_len=28)
    for name in "ab":
        one.add(sequence(name, [ord(name)] * 8, output=16))
    emissions = run(one)
    tokens = {n: [e.token for e in emissions if e.sequence.id == n] for n in "ab"}
    assert one.counts.preemptions > 0
    assert tokens["a"] == tokens["b"] == [1000 + position for position in range(16)]
    assert one.pool.free_blocks == 7


def test_no_more_sequences_run_than_allowed_and_they_go_in_the_order_of_arrival() -> None:
    one = scheduler(max_num_seqs=2)
    for number in range(5):
        one.add(sequence(str(number), [number] * 4, output=1))
    order = [e.sequence.id for e in run(one)]
    assert order == ["0", "1", "2", "3", "4"]
    assert one.unfinished == 0


def test_a_sequence_waits_for_external_tokens_and_computes_only_the_rest() -> None:
    connector = External(8)
    one = scheduler(connector=connector)
    waiting = sequence("a", range(13))
    one.add(waiting)
    step = one.plan()
    assert (step.work, step.loads) == ([], [waiting])
    assert one.plan().loads == []
    one.loaded(waiting, 8)
    assert [item.tokens for item in one.plan().work] == [5]
    assert waiting.cached_tokens == 8


def test_external_tokens_that_did_not_arrive_are_computed() -> None:
    one = scheduler(connector=External(8))
    waiting = sequence("a", range(13))
    one.add(waiting)
    one.plan()
    one.loaded(waiting, 0)
    assert [item.tokens for item in one.plan().work] == [13]
    assert waiting.cached_tokens == 0


def test_a_lookup_that_is_not_answered_yet_lets_others_pass() -> None:
    connector = External(None)
    one = scheduler(connector=connector)
    one.add(sequence("slow", range(8)))
    assert one.plan() == Step()
    connector.tokens = 0
    one.add(sequence("other", range(50, 58)))
    assert [item.sequence.id for item in one.plan().work] == ["slow", "other"]


def test_blocks_of_a_sequence_that_ends_while_kv_flows_in_are_freed_only_when_it_has_arrived() -> None:
    one = scheduler(connector=External(8))
    leaving = sequence("a", range(13))
    one.add(leaving)
    one.plan()
    held = one.pool.free_blocks
    one.finish(leaving, "abort")
    assert one.pool.free_blocks == held
    one.loaded(leaving, 8)
    assert one.pool.free_blocks == 63
    assert one.pool.cached_hashes() == []


def test_blocks_that_a_connector_keeps_stay_until_they_are_released_once() -> None:
    connector = External(0)
    connector.keeps = True
    one = scheduler(connector=connector)
    one.add(sequence("a", range(13), output=1))
    run(one)
    assert one.pool.free_blocks == 63 - 4
    assert one.release_held("a")
    assert not one.release_held("a")
    assert one.pool.free_blocks == 63


def test_a_finished_sequence_can_be_finished_again_without_effect() -> None:
    one = scheduler()
    gone = sequence("a", range(8))
    one.add(gone)
    one.finish(gone, "abort")
    one.finish(gone, "abort")
    assert gone.state is State.FINISHED
    assert one.unfinished == 0


def test_a_sequence_aborted_during_a_step_gets_no_token_from_it() -> None:
    one = scheduler()
    leaving, staying = sequence("a", range(8)), sequence("b", range(20, 28))
    one.add(leaving)
    one.add(staying)
    step = one.plan()
    one.finish(leaving, "abort")
    assert [e.sequence.id for e in one.complete(step)] == ["b"]


def test_generation_ends_where_the_context_ends() -> None:
    one = scheduler(max_model_len=12)
    one.add(sequence("a", range(8), output=100))
    emissions = run(one)
    assert len(emissions) == 4
    assert emissions[-1].finish_reason == "length"


def test_sequences_whose_kv_has_arrived_go_before_one_that_was_preempted() -> None:
    connector = External(0)
    one = scheduler(blocks=9, connector=connector, max_model_len=28)
    growing = sequence("growing", range(12), output=16)
    one.add(growing)
    one.complete(one.plan())
    connector.tokens = 16
    arriving = sequence("arriving", range(100, 116), output=2)
    one.add(arriving)
    one.complete(one.plan())
    while growing.state is State.RUNNING:
        one.complete(one.plan())
    assert growing.preemptions == 1
    one.loaded(arriving, 16)
    assert [item.sequence.id for item in one.plan().work][:1] == ["arriving"]


def test_salts_keep_prefixes_apart() -> None:
    one = scheduler()
    one.add(sequence("a", range(16), salt="x"))
    run(one)
    other = sequence("b", range(16), salt="y")
    one.add(other)
    one.plan()
    assert other.cached_tokens == 0
