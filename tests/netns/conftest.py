"""What is said at the end of the drills."""

from __future__ import annotations

import pytest
from netns.drill import ENDS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How the requests of all drills ended."""
    if ENDS:
        terminalreporter.write_line(
            f"{ENDS.total()} requests: {ENDS['answer']} answered, {ENDS['error']} told an error by the API, "
            f"{ENDS['closed']} found nobody or were cut off, {ENDS['left']} left by the client; "
            f"without an answer or an error: {ENDS['silence']}"
        )
