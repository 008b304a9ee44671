"""Every method with every kind of model and every way to spread one that a cheap run can try: the same tokens as one
process says without speculation. Minutes of processes: SPECPLUGINS_ENGINES=all, or TP,DP for some of them.

Each combination is one program, whose engines start one behind the other.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec

import pytest
from combinations import EXITS, PROMPTS, Results, combinations, methods, results_of, results_on_ray
from conftest import INTERPRETED

ASKED = os.environ.get("SPECPLUGINS_ENGINES", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not ASKED, reason="SPECPLUGINS_ENGINES=all: minutes of processes")]
HISTORY = ("prompt_lookup", "suffix_lookup", "custom")
NAMES = (*HISTORY, *EXITS, "built-in stage")
# Of kinds of models, of adapters and of several engines V1 tells as much, and in seconds.
CELLS: dict[str, tuple[str, ...]] = {"TP": NAMES, "PP": HISTORY, "DP of experts": HISTORY} if INTERPRETED else {
    "experts": NAMES,
    "sliding windows": (*HISTORY, *EXITS),  # vLLM wants the draft model's layers in one group of its own
    "LoRA": tuple(name for name in NAMES if name != "medusa"),
    "TP": NAMES,
    "DP": NAMES,
    "DP of experts": HISTORY,
    "Ray": NAMES,
}  # fmt: skip
WITH_TWO_WORKERS = [name for name in ("TP", "PP", "Ray") if name in CELLS]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """found(combination): what became of its methods, and of none."""
    known: dict[str, Results] = {}
    folder = tmp_path_factory.mktemp("methods")

    def results(name: str) -> Results:
        if ASKED != "all" and name not in ASKED.split(","):
            pytest.skip("not asked for")
        if name == "Ray" and find_spec("ray") is None:
            pytest.skip("needs Ray, which vLLM does not bring: pip install ray")
        if name not in known:
            made, arguments = methods(folder / name), combinations()[name]
            alone = {key: value for key, value in arguments.items() if key in ("model", "adapters") or "lora" in key}
            runs = {"plain": alone, **{each: {**arguments, "speculative_config": made[each]} for each in CELLS[name]}}
            if name in WITH_TWO_WORKERS:
                runs["dies"] = {**arguments, "speculative_config": made["custom"], "ends": "dies"}
            known[name] = results_on_ray(runs) if name == "Ray" else results_of("processes.py", runs)
        return known[name]

    return results


@pytest.mark.parametrize(
    ("combination", "method"), [(combination, method) for combination, names in CELLS.items() for method in names]
)
def test_cell(found: Callable[[str], Results], combination: str, method: str) -> None:
    """Fails if a rank, a stage or an engine verifies another draft than was made, or drafts for another's request."""
    results = found(combination)
    result = results[method]
    assert len({tuple(output) for output in result["outputs"]}) == len(PROMPTS)
    assert result["outputs"] == results["plain"]["outputs"]
    assert [rank["faults"] for rank in result["stats"]] == [{}] * len(result["stats"])
    assert max(rank["drafted_tokens"] for rank in result["stats"]) > 5


@pytest.mark.parametrize("combination", WITH_TWO_WORKERS)
def test_worker_that_dies(found: Callable[[str], Results], combination: str) -> None:
    """A worker dies within a step, and vLLM reports it. Fails if the other worker or the caller waits for it."""
    result = found(combination)["dies"]
    assert result["end"] not in ("lived", "TimeoutError") and result["seconds"] < 60
