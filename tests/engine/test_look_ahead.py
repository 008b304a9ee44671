"""Look-ahead tokens in the engine: one pass of the exit drafts all tokens, on both runners."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import STRESS, early_exit, generate, mixed_prompts
from conftest import DEMO_MODEL, INTERPRETED, NUM_LAYERS, RUNNER, spec_metrics
from safetensors.torch import load_file
from test_early_exit import engine_config

from vllm_specplugins.config import ConfigError
from vllm_specplugins.proposers.look_ahead import LookAheadConfig, save_look_ahead

NUM_TOKENS = 21


def with_embeddings(folder: Path, layer: int, num_draft: int, **other: int) -> dict[str, Any]:
    """An exit that drafts by one pass, with embeddings of some tokens."""
    table = load_file(DEMO_MODEL / "model.safetensors")["model.embed_tokens.weight"].float()
    sizes = {"exit_layer": layer, "hidden_size": table.shape[1], "num_embeddings": num_draft - 1, **other}
    save_look_ahead(folder, LookAheadConfig(**sizes), torch.zeros(sizes["num_embeddings"], sizes["hidden_size"]) + 0.01)
    return {**early_exit(layer, num_draft), "look_ahead": str(folder)}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return mixed_prompts(str(DEMO_MODEL), 16 if INTERPRETED else 24)


@pytest.fixture(scope="module")
def expected(engine: Any, prompts: list[list[int]]) -> list[list[int]]:
    return generate(engine(), prompts, [8], max_tokens=NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("num_draft", [1, 4])
def test_all_layers(engine: Any, prompts: Any, expected: Any, num_draft: int, tmp_path: Path) -> None:
    """The first token of a draft needs no embedding, and an exit of all layers says what the model says: it is always
    accepted, under preemption and prefix-cache hits, too.

    Fails if the newest token's state is another's, if an embedding is seen by what stands before it, or if drafts write
    past their slots.
    """
    llm = engine(with_embeddings(tmp_path, NUM_LAYERS, num_draft), **STRESS)
    before = spec_metrics(llm)
    assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    after = spec_metrics(llm)
    drafts, drafted, accepted = (after[name] - before[name] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    assert accepted >= drafts >= len(prompts) * 4 and drafted > (num_draft - 1) * drafts
    if num_draft == 1:
        assert accepted == drafted
    assert llm.collective_rpc("specplugins_stats")[0]["faults"] == {}


@pytest.mark.slow
@pytest.mark.skipif(RUNNER == "v2", reason="the same code")
def test_one_pass(engine: Any, prompts: Any, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of one pass are those that the exit says behind a text that ends in the embeddings; one pass a step.

    Fails if the layers run once for each token.
    """
    from vllm_specplugins.engine.target.layers import FirstLayers

    llm = engine(with_embeddings(tmp_path, NUM_LAYERS // 2, 4))
    lengths = []
    of_states = FirstLayers.of_states

    def counted(self: Any, first: int, end: int, states: torch.Tensor, *rest: Any) -> torch.Tensor:
        lengths.append(len(states))
        return of_states(self, first, end, states, *rest)

    monkeypatch.setattr(FirstLayers, "of_states", counted)
    before = llm.collective_rpc("specplugins_stats")[0]["request_steps"]
    assert generate(llm, prompts[:4], [1], max_tokens=NUM_TOKENS) == expected[:4]
    steps = llm.collective_rpc("specplugins_stats")[0]["request_steps"] - before
    assert 0 <= steps - len(lengths) <= 4 and max(lengths) == 4


@pytest.mark.parametrize(
    "other, words",
    [
        ({"num_embeddings": 2}, "a set of embeddings of at least 3, one less than num_speculative_tokens, not of 2"),
        ({"hidden_size": 128}, "a set of embeddings whose hidden_size is 256, not 128"),
        ({"exit_layer": 2}, "a set of embeddings whose exit_layer is 1, not 2"),
    ],
)
def test_refused(other: dict[str, int], words: str, tmp_path: Path) -> None:
    """Before the engine starts, in one sentence. Fails if a size is not compared."""
    config = {**with_embeddings(tmp_path, 1, 4, **other)}
    with pytest.raises(ConfigError, match=rf"^early_exit: look_ahead must be {words} [^\n]*\.$"):
        engine_config(config)
