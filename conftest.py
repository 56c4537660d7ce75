"""What holds for all tests, wherever they are."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With ``--reruns``: why the first try failed, which is else lost with it."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"first try of {report.nodeid}", sep="_")
        terminalreporter.line(report.longreprtext)
