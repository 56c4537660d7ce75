import json

from typer.testing import CliRunner

from mooncakectl.app import build_app


def run(*arguments):
    return CliRunner().invoke(build_app(), ["rollout", "plan", *arguments])


def test_steps_as_json_tell_counts_and_actions():
    result = run("--prefill", "4", "--decode", "4", "--max-surge", "1", "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["finished"]
    assert "create prefill-p-4" in document["steps"][0]["actions"]
    assert document["steps"][-1]["pools"]["decode"] == {"old": 0, "new": 4, "all": 4}


def test_the_table_ends_with_all_new():
    result = run("--prefill", "2", "--decode", "1")
    assert result.exit_code == 0
    assert "0 + 2" in result.stdout


def test_what_cannot_move_is_refused_with_what_to_write():
    result = run("--prefill", "1", "--decode", "1", "--max-surge", "0", "--max-unavailable", "0")
    assert "write --max-surge 1" in str(result.exception)
    result = run("--prefill", "2", "--decode", "2", "--gpus", "8", "--gpu-budget", "8")
    assert "write --gpu-budget 32" in str(result.exception)


def test_a_rollout_that_stops_says_what_holds_it():
    result = run(
        *("--prefill", "2", "--decode", "2", "--max-unavailable", "0", "--gpus", "8", "--gpu-budget", "32")
    )
    assert "stops before its end" in str(result.exception)
    assert "coordination.gpuBudget 32" in str(result.exception)
