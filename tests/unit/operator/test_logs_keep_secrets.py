"""What must not stand in a log."""

import json
import logging

import pytest

from mooncake_operator.logs import set_up_logging


@pytest.fixture(autouse=True)
def restored_logging():
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level


def test_a_traceback_tells_where_and_why_and_no_variables(capsys):
    set_up_logging("INFO")

    def call(token):
        raise ValueError("refused")

    try:
        call("very-secret")
    except ValueError:
        logging.getLogger("test").exception("a call failed")
    line = capsys.readouterr().err.strip().splitlines()[-1]
    told = json.loads(line)["exception"][0]
    assert (told["exc_type"], told["exc_value"]) == ("ValueError", "refused")
    assert [frame["name"] for frame in told["frames"]][-1] == "call"
    assert "very-secret" not in line
