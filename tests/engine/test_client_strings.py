"""No string of a client selects a mode of the engine: ids, salts, stop strings. No engine runs here;
test_dummy_runs.py sends ids as vLLM's warm-up has them to one."""

import ast
import re
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from conftest import RUNNER
from test_entrances import core
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from vllm_specplugins.engine.frontend.entrances import _with_checked_options
from vllm_specplugins.engine.frontend.options import request_options
from vllm_specplugins.structures.suffix.store_file import tenant_of

WITHOUT_TAPES = "no engine"
OURS = sorted(Path(__file__).parents[2].glob("vllm_specplugins/**/*.py"))
VLLMS = [path for part in ("core", "engine", "worker") for path in (Path(vllm.__path__[0]) / "v1" / part).rglob("*.py")]
READS = ("startswith", "endswith", "removeprefix", "removesuffix", "find", "partition", "rpartition", "split", "search")
CLIENTS = ("req_id", "request_id", "cache_salt", "tenant", "stop_strings", "arrival")


@cache
def strings() -> list[str]:
    """The constants of our code and of vLLM's engine, alone and as the beginning of a longer string."""
    texts = (path.read_text() for path in OURS + VLLMS)
    constants = {constant for text in texts for constant in re.findall(r'"([^"\\\s{}]{1,40})(?=["{])', text)}
    assert {"_warmup_", "_v2_mixed_warmup", "default"} < constants
    return sorted(constants | {f"{constant}x" for constant in constants})


def is_constant(node: ast.expr, names: set[str]) -> bool:
    """A string, several, or a global name of some."""
    if isinstance(node, ast.Name):
        return node.id in names
    return any(isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value for part in ast.walk(node))


def test_no_code_compares() -> None:
    """Kills: any comparison of an id, a salt or a stop string with a constant of ours, as `startswith("_v2_")`."""
    found = []
    for path in OURS:
        tree = ast.parse(path.read_text())
        names = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign) and is_constant(node.value, set())
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            sides: list[ast.expr] = []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS:
                sides = [node.func.value, *node.args]
            elif isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
            if not any(is_constant(side, names) for side in sides):
                continue
            texts = [side for side in sides if any(name in ast.unparse(side) for name in CLIENTS)]
            others = [side for side in sides if side not in texts]
            if texts and any(is_constant(side, names) for side in others):
                found.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert not found


@pytest.mark.skipif(RUNNER == "v2", reason="the same on both runners")
def test_salts_and_ids_at_the_entrance() -> None:
    """Kills: a salt, an id or a stop string that changes more of a request's options than its tenant, and two salts
    that have one tenant."""
    engine, tenants = core(method="suffix_lookup"), set()
    for string in strings():
        params = SamplingParams(stop=[string], extra_args={"specplugins": {"max_draft": 2}, "other": 1})
        request = EngineCoreRequest(string, [1, 2], None, params, None, 0.0, None, string, None)
        taken: Any = _with_checked_options(lambda self, request: request, engine, request)
        options = dict(request_options(taken.sampling_params))
        tenants.add(options.pop("tenant"))
        assert options == {"max_draft": 2}, string
    assert len(tenants) == len(strings()) and tenants == set(map(tenant_of, strings()))


@pytest.mark.skipif(RUNNER == "v1", reason="of V2")
def test_ids_on_v2() -> None:
    """Kills: an id that makes a speculator rehearse for all requests, changes a request's limits, or hides a step from
    what learns."""
    from vllm_specplugins.engine.v2.feedback.report import SampledTokens
    from vllm_specplugins.engine.v2.learning import Readings
    from vllm_specplugins.engine.v2.requests import Request
    from vllm_specplugins.engine.v2.speculators.base import Speculator

    calls: list[str] = []
    speculator: Any = SimpleNamespace(is_off=False, runs_target=False, num_speculative_steps=2, watchers=[])
    speculator.session, speculator._last_hidden_states = SimpleNamespace(is_warming_up=False), None
    speculator.draft_tokens = torch.zeros(2, 2, dtype=torch.int64)
    speculator._rehearse = lambda *_: calls.append("rehearses")
    speculator._draft_step = lambda *_: calls.append("drafts")
    readings: Any = SimpleNamespace(_learner=SimpleNamespace(step=partial(calls.append, "learns")), _num_taken=0)
    readings._put, readings._states = lambda change: None, None
    limits = set()
    for string in strings():
        batch, nothing = SimpleNamespace(req_ids=[string, "b"], num_reqs=2), torch.zeros(2)
        Speculator.propose(speculator, batch, None, None, nothing, None, nothing, nothing)
        Readings.note(readings, SampledTokens(batch.req_ids, None, None, None))  # type: ignore[arg-type]
        new = SimpleNamespace(req_id=string, prefill_token_ids=[1, 2], prompt_embeds=None, prompt_len=2)
        new.sampling_params = SamplingParams(max_tokens=3)
        limits.add(Request(new, 0, 64).limits.length_limit)
    assert calls == ["drafts", "learns"] * len(strings()) and len(limits) == 1
