"""The smallest servers, as a GPU starts them: one or two requests, one size of graphs or none, few tokens a step."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import generate
from conftest import INTERPRETED, graphs, long

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from kinds import KINDS
from parts import K
from recorded import runner
from tree_attention import attend_by_reference

NUM_TOKENS, PROMPTS = 8, slice(21, 23)
WITHOUT_TAPES = "switches the simulated device on itself"
# The row of K tokens a step fails: a dummy run that measures prices has K + 1.
CASES: list[Any] = [long("prompt_lookup", 1, (1,), K)]
CASES += [long(kind, number, (number,), None) for kind in KINDS for number in (1, 2)]


@pytest.mark.parametrize(("kind", "num_reqs", "sizes", "num_tokens"), CASES)
def test_starts(
    engine: Any, device: Any, prompts: Any, expected: Any, tmp_path: Path, monkeypatch: Any,
    kind: str, num_reqs: int, sizes: tuple[int, ...], num_tokens: int | None,
) -> None:  # fmt: skip
    """Kills: a largest number of one; a slice or a list that few requests leave empty; a step that has no room for K +
    1 tokens."""
    if kind in ("tree", "lookahead"):
        engine.stop()
        attend_by_reference(monkeypatch)
    room = {"max_num_batched_tokens": num_tokens} if num_tokens else {}
    own = {"max_num_seqs": num_reqs, "additional_config": {"profiles": True}, **room}
    llm = engine(KINDS[kind](tmp_path), **graphs(sizes), **own)
    assert generate(llm, prompts, [2], max_tokens=NUM_TOKENS) == expected
    assert not runner(llm).speculator.__dict__.get("is_off")
    assert llm.collective_rpc("specplugins_stats")[0]["faults"] == {}


def test_one_graph() -> None:
    """Kills: an estimate that needs two graphs of a depth, where one request has one."""
    from vllm_specplugins.engine.v2.memory import FewGraphs

    few = FewGraphs(None)
    for samples in ([], [5], [5, 3 << 20]):
        few[0] = SimpleNamespace(_capture_descs={0: [1, 2, 3]}, _capture_mem_samples=samples)
        largest = max([1 << 20, *samples[1:]])
        assert few.missing_bytes() == (0 if not samples else (3 - len(samples)) * largest)
