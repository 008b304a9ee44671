"""Every method as users start it: default memory, CUDA graphs, and on a GPU bfloat16, 12 layers and 256 requests.

The simulated device starts them, too, with SPECPLUGINS_TESTS=all; in CI test_trees.py starts one so.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import EXIT, LOOKUP, SUFFIX_LOOKUP, early_exit, generate, mixed_prompts
from conftest import ALL, DEMO_MODEL, INTERPRETED, NUM_LAYERS, RUNNER, TAPES, spec_metrics
from parts import medusa, with_embeddings, write_head
from recorded import replays, runner
from shortened import more_layers

if not (TAPES and ALL) and not (RUNNER == "v2" and torch.cuda.is_available()):
    pytest.skip("needs a GPU, or the simulated one and SPECPLUGINS_TESTS=all", allow_module_level=True)

from eagle_heads import eagle_head
from families import checkpoint
from test_grammar import SCHEMA
from test_late_drafts import CUSTOM, Oracle
from tree_attention import attend_by_reference
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

ON_GPU = not TAPES
LAYERS = 12 if ON_GPU else NUM_LAYERS
K, N, NUM_TOKENS = 4, 7, 64 if ON_GPU else 9
TREE = {"tree": N, "gate": "off"}
GPU_ARGUMENTS = {
    "dtype": "bfloat16",
    "max_num_seqs": 256,
    "enforce_eager": False,
    "kv_cache_memory_bytes": None,
    "gpu_memory_utilization": 0.8,  # the engine before leaves some memory in this process
}


def without_length(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "num_speculative_tokens"}


def cascade(*stages: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {"method": "cascade", "stages": list(stages), "gate": "off", **other}


def beside_drafter(**stage: Any) -> dict[str, Any]:
    return cascade({**LOOKUP, "min_ngram": 1}, {**stage, "num_speculative_tokens": 3}, num_speculative_tokens=8)


# By name, those that are worth most first: the configuration, of parts in a folder. Exits and jumps of all layers draft
# the target's own tokens.
KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "prompt_lookup": lambda _: LOOKUP if ON_GPU else {**LOOKUP, "num_speculative_tokens": N},  # K = 31 takes minutes
    "lookup and exit": lambda _: cascade(LOOKUP, {**EXIT, "exit_layer": LAYERS}, num_speculative_tokens=K),
    "lookup and eagle3": lambda _: beside_drafter(method="eagle3", model=str(eagle_head("eagle3"))),
    "jump": lambda folder: write_head(folder, LAYERS // 2, LAYERS // 2, 0.0, num_layers=LAYERS),
    "suffix_lookup": lambda _: SUFFIX_LOOKUP if INTERPRETED else {"method": "suffix_lookup"},
    "medusa": medusa,
    "learn": lambda folder: {**write_head(folder, 0, LAYERS, 0.02, num_layers=LAYERS), "learn": True},
    "custom": lambda _: CUSTOM,
    "grammar": lambda _: {"method": "grammar", "num_speculative_tokens": 7},
    "look-ahead": lambda folder: with_embeddings(folder, LAYERS, K),
    "tree": lambda _: {**without_length(early_exit(LAYERS)), **TREE},
    "merged tree": lambda _: cascade(LOOKUP, {**EXIT, "exit_layer": LAYERS}, **TREE),
    "lookup and draft_model": lambda _: beside_drafter(method="draft_model", model=str(checkpoint("llama"))),
}
# The least share of drafted tokens that is accepted; 0: the part knows nothing. Without one, some are.
LEAST = {"merged tree": 0.1, "lookup and exit": 0.5, "look-ahead": 0.2, "tree": 0.2}
LEAST |= dict.fromkeys(("learn", "medusa", "lookup and eagle3"), 0.0)


@pytest.fixture(scope="module")
def model() -> str:
    return str(more_layers(DEMO_MODEL, LAYERS) if ON_GPU else DEMO_MODEL)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """16 on a GPU, and one of them long."""
    prompts = mixed_prompts(str(DEMO_MODEL), 16 if ON_GPU else 6)
    return [*prompts[:-1], (prompts[-1] * 100)[: 900 if ON_GPU else 200]]


def arguments(kind: str, model: str) -> dict[str, Any]:
    is_tiny = "draft_model" in kind or "eagle3" in kind
    own = {"model": str(checkpoint("llama")), "skip_tokenizer_init": True} if is_tiny else {"model": model}
    if kind == "grammar":
        own["structured_outputs_config"] = {"backend": "xgrammar", "disable_any_whitespace": True}
    return {**own, **(GPU_ARGUMENTS if ON_GPU else {"additional_config": {"profiles": True}})}


def told(kind: str, prompts: list[list[int]]) -> list[list[int]]:
    """Prompts of tokens that the kind's target knows."""
    is_tiny = "draft_model" in kind or "eagle3" in kind
    return [[token % 512 for token in prompt] for prompt in prompts] if is_tiny else prompts


def asked(kind: str) -> dict[str, Any]:
    grammar = StructuredOutputsParams(json=SCHEMA) if kind == "grammar" else None
    return {"max_tokens": NUM_TOKENS, "ignore_eos": grammar is None, "structured_outputs": grammar}


@pytest.fixture(scope="module")
def expected(engine: Any, model: str, prompts: list[list[int]]) -> Callable[[str], list[list[int]]]:
    """Outputs without speculation, by kind. In bfloat16 none are compared, and "custom" alone needs them."""
    known: dict[str, list[list[int]]] = {}

    def of(kind: str) -> list[list[int]]:
        if ON_GPU and kind != "custom":
            return []
        own = arguments(kind, model)
        key = repr(own)
        if key not in known:
            known[key] = generate(engine(**own), told(kind, prompts), [16], **asked(kind))
        return known[key]

    return of


@pytest.fixture
def start(engine: Any, model: str, expected: Any, prompts: Any, tmp_path: Path, monkeypatch: Any) -> Any:
    """start(kind, **arguments): its engine, after the outputs that are expected of it."""

    def started(kind: str, **other: Any) -> Any:
        outputs = expected(kind)
        Oracle.texts = [prompt + tokens for prompt, tokens in zip(prompts, outputs, strict=False)]
        if INTERPRETED and "tree" in kind:
            engine.stop()
            attend_by_reference(monkeypatch)
        return engine(KINDS[kind](tmp_path), **{**arguments(kind, model), **other})

    yield started
    engine.stop()


def check(llm: Any, kind: str, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """All but the first request, which is aborted: no fault, as many accepted drafts as the kind can have, and in
    float32 the outputs of no speculation."""
    own = told(kind, prompts)
    params = SamplingParams(temperature=0, **asked(kind))
    llm.llm_engine.add_request("gone", {"prompt_token_ids": own[0]}, params)
    for _ in range(3):
        llm.llm_engine.step()
    llm.llm_engine.abort_request(["gone"])
    before = spec_metrics(llm)
    outputs = generate(llm, own[1:], [16], **asked(kind))
    drafted, accepted = (spec_metrics(llm)[name] - before[name] for name in ("draft_tokens", "accepted_tokens"))
    [stats, *_] = llm.collective_rpc("specplugins_stats")
    assert stats["faults"] == {}
    assert ON_GPU or outputs == expected[1:]
    assert drafted > 0 and accepted >= LEAST.get(kind, 1 / drafted) * drafted, (drafted, accepted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_smoke(start: Any, expected: Any, prompts: Any, kind: str) -> None:
    """A start with vLLM's profile of graphs, then 16 requests. Fails if an engine does not start, if an output differs,
    if little is accepted, or if a draft is not in a graph."""
    llm = start(kind)
    own, speculator = runner(llm), runner(llm).speculator
    managers = getattr(getattr(speculator, "specplugins", speculator), "_graphs_of", {})
    check(llm, kind, prompts, expected(kind))
    if managers:
        assert all(manager.graphs for manager in managers.values())
        assert not TAPES or sum(map(replays, managers.values())) > 0
    assert own.cudagraph_manager.graphs


@pytest.mark.skipif(not ON_GPU, reason="sleep needs a GPU")
@pytest.mark.parametrize("level", [1, 2])
def test_sleep(start: Any, expected: Any, prompts: Any, level: int) -> None:
    """Drafts after a sleep are as good as before. Fails if a part's weights or buffers are lost with the target's."""
    kind = "lookup and exit"
    llm = start(kind, enable_sleep_mode=True)
    check(llm, kind, prompts, expected(kind))
    llm.sleep(level)
    if level == 2:
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
    else:
        llm.wake_up()
    check(llm, kind, prompts, expected(kind))


@pytest.mark.skipif(not ON_GPU or torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["prompt_lookup", "lookup and exit"])
def test_two_ranks(start: Any, expected: Any, prompts: Any, kind: str) -> None:
    """Fails if ranks draft or trim otherwise: they would wait for each other, or accept little."""
    check(start(kind, tensor_parallel_size=2), kind, prompts, expected(kind))
