"""Look-ahead tokens in the engine: one pass of the exit drafts all tokens, on both runners."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import NUM_TOKENS, generate
from conftest import NUM_LAYERS, RUNNER
from parts import with_embeddings
from test_early_exit import engine_config

from vllm_specplugins.config import ConfigError


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
