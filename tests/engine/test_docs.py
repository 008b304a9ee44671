"""The documentation's proposer, run as a user would: saved as a module, named in the configuration."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import generate, mixed_prompts
from conftest import DEMO_MODEL

PAGE = Path(__file__).parents[2] / "docs" / "write-a-proposer.md"


def test_the_pages_proposer(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: an example that does not run, drafts nothing, or changes the output."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_proposer.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_proposer", raising=False)
    prompts = mixed_prompts(str(DEMO_MODEL), 3)
    expected = generate(engine(), prompts, [12])
    config = {"method": "custom", "proposer": "my_proposer:LastSuccessor", "num_speculative_tokens": 4}
    documented = engine({**config, "options": {"max_tokens": 2}})
    assert generate(documented, prompts, [12]) == expected
    [stats] = documented.collective_rpc("specplugins_stats")
    assert stats["accepted_tokens"] > 0
    assert stats["faults"] == {}
