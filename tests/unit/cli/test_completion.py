"""What a shell offers when Tab is pressed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mooncakectl.completion import of_list


def test_a_list_is_completed_word_by_word_and_offers_none_twice() -> None:
    complete = of_list(lambda: ["random", "round-robin", "kv-centric"])
    assert complete("r") == ["random", "round-robin"]
    assert complete("random,r") == ["random,round-robin"]
    assert complete("random,kv-centric,") == ["random,kv-centric,round-robin"]
    assert complete("x") == []


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("mooncakectl pl", ["plan"]),
        ("mooncakectl simulate --re", ["--report"]),
        ("mooncakectl simulate --admission none,", ["none,early", "none,predictive"]),
        ("mooncakectl simulate --policy load", ["load-balance"]),
        ("mooncakectl simulate --profile h,llama3.", ["h,llama3.1-405b-8xh200"]),
        ("mooncakectl plan --profile llama3.", ["llama3.1-405b-8xh200"]),
        ("mooncakectl plan --max-", ["--max-prefill", "--max-decode"]),
    ],
)
def test_a_shell_is_offered_commands_options_and_their_values(typed: str, offered: list[str]) -> None:
    words = typed.split(" ")
    asked = {
        "_MOONCAKECTL_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1),
    }  # fmt: skip
    program = "from mooncakectl.__main__ import main; import sys; sys.argv[0] = 'mooncakectl'; main()"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program], env=os.environ | asked, capture_output=True, text=True
    )
    assert ran.stdout.split() == offered
