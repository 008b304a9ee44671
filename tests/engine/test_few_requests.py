"""The smallest servers, as a GPU starts them: one or two requests, one size of graphs or none, few tokens a step."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import EXIT, PROMPT_LOOKUP, SUFFIX_LOOKUP, early_exit, generate
from conftest import DEMO_MODEL, INTERPRETED, NUM_LAYERS, graphs, long

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from parts import medusa, with_embeddings, write_head
from recorded import runner
from shortened import first_layers
from tree_attention import attend_by_reference

K, NUM_TOKENS, FEW = 4, 8, slice(21, 23)
PROMPTS = FEW
WITHOUT_TAPES = "switches the simulated device on itself"


def cascade(stage: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"method": "cascade", "num_speculative_tokens": K, "stages": [{"method": "prompt_lookup"}, stage], **options}


DRAFTER = {"method": "draft_model", "model": str(first_layers(DEMO_MODEL, 1)), "num_speculative_tokens": 3}
KINDS: dict[str, Any] = {
    "prompt_lookup": lambda _: PROMPT_LOOKUP,
    "suffix_lookup": lambda _: SUFFIX_LOOKUP,
    "early_exit": lambda _: early_exit(1),
    "jump": lambda folder: write_head(folder, NUM_LAYERS // 2, NUM_LAYERS // 2, 0.0),
    "medusa": lambda folder: medusa(folder, num_draft=2),
    "look-ahead": lambda folder: with_embeddings(folder, NUM_LAYERS, K),
    "lookup and exit": lambda _: cascade(EXIT),
    "verified": lambda _: cascade(EXIT, policy="verify"),
    "lookup and draft_model": lambda _: cascade(DRAFTER),
    "tree": lambda _: {"method": "early_exit", "exit_layer": 1, "tree": 7, "gate": "off"},
    "lookahead": lambda _: {"method": "lookahead", "gate": "off"},
}
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
