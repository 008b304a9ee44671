"""No string of a client selects a mode of the engine: ids, salts, models, tools, stop strings. No engine runs here;
test_dummy_runs.py sends ids as vLLM's warm-up has them to one, and tests/soak/client_strings.py all to a server."""

import ast
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from client_strings import strings
from conftest import DEMO_MODEL, RUNNER
from test_entrances import core
from test_intake import Configured, Sizes
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest

from vllm_specplugins.engine.frontend.entrances import _with_checked_options
from vllm_specplugins.engine.frontend.options import OptionsResolver, request_options
from vllm_specplugins.engine.frontend.prediction import take_predictions
from vllm_specplugins.structures.suffix.store_file import tenant_of

WITHOUT_TAPES = "no engine"
OURS = sorted(Path(__file__).parents[2].glob("vllm_specplugins/**/*.py"))
READS = ("startswith", "endswith", "removeprefix", "removesuffix", "find", "partition", "rpartition", "split", "search")
NOT_IN_SALTS = str.maketrans("", "", "@/\\")
CLIENTS = ("req_id", "request_id", "cache_salt", "tenant", "stop_strings", "arrival", "lora_name", "tool_choice")


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
    """Kills: a salt, an id, an adapter's name or a stop string that changes more of a request's options than its
    tenant, and two salts that have one tenant."""
    engine, tenants = core(method="suffix_lookup"), set()
    for string in strings():
        params = SamplingParams(stop=[string], extra_args={"specplugins": {"max_draft": 2}, "other": 1})
        adapter = LoRARequest(string, 1, string)
        request = EngineCoreRequest(string, [1, 2], None, params, None, 0.0, adapter, string, None)
        taken: Any = _with_checked_options(lambda self, request: request, engine, request)
        options = dict(request_options(taken.sampling_params))
        tenants.add(options.pop("tenant"))
        assert options == {"max_draft": 2}, string
    assert len(tenants) == len(strings()) and tenants == set(map(tenant_of, strings()))


@pytest.mark.skipif(RUNNER == "v2", reason="the same on both runners")
def test_fields_of_a_chat() -> None:
    """Kills: a model, a tool, a role's name, a stop string, a user, an id, a key beside ours or the text of a
    prediction that changes another option of the request, or that vLLM's parameters lose."""
    take_predictions()
    tokenizer = AutoTokenizer.from_pretrained(str(DEMO_MODEL))
    resolver = OptionsResolver(Configured(method="suffix_lookup"), Sizes(), tokenizer)
    for string in strings():
        beside = {} if string.startswith("specplugins") else {string: string}
        tool = {"type": "function", "function": {"name": string, "description": string, "parameters": {}}}
        fields = {"model": string, "user": string, "request_id": string, "stop": [string]}
        fields["cache_salt"] = string.translate(NOT_IN_SALTS) or "x"
        chat = ChatCompletionRequest(
            **fields, messages=[{"role": "user", "name": string, "content": string}],
            tools=[tool], tool_choice={"type": "function", "function": {"name": string}},
            vllm_xargs={**beside, "specplugins": '{"max_draft":2}'},
            prediction={"type": "content", "content": string},
        )  # type: ignore[arg-type]  # fmt: skip
        params = chat.to_sampling_params(9, {})
        extra = resolver.resolved(params).extra_args
        options = dict(request_options(SamplingParams(extra_args=extra)))
        assert options.pop("reference").tolist() == tokenizer.encode(string, add_special_tokens=False), string
        assert options == {"max_draft": 2} and extra.items() >= beside.items() and params.stop == [string]


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
