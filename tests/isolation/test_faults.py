"""What the log quotes of a proposer's exceptions."""

import pytest

from vllm_specplugins.config import error_text
from vllm_specplugins.isolation.faults import LONGEST_CAUSE, cause_text


@pytest.mark.parametrize("hostile", ["\r", "\x1b[2J", "\x85", "\u2028", "\u202e", "\ud800", "\x00", "\x9b", "\x0b"])
def test_one_printable_line(hostile: str) -> None:
    """A client's text in an exception is one line of the log. Kills: a terminal's command or
    the end of a line, by which a client forges one."""
    words = f"bad option {hostile}ERROR the engine is compromised"
    for text in (cause_text(ValueError(words)), error_text(ValueError(words))):
        assert text.isprintable() and len(text.splitlines()) == 1 and text.encode()
    assert len(cause_text(ValueError("x" * 10_000))) == LONGEST_CAUSE
