"""Sampled drafts of early exit, replayed: three tokens of a tiny vocabulary against their exact distribution."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import early_exit
from conftest import ALL, INTERPRETED, counted, graphs, verify_by_reference
from parts import learner_of, swaps_weights, with_embeddings, write_head
from recorded import replays, runner
from small_vocabulary import VOCAB_SIZE, exact_probs, sampled, write_checkpoint

from vllm_specplugins.tools.lossless.report import chi_squared

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from simulated_device.device import Device

K = 2
BATCHES = [*range(1, 9), *[8] * (70 if ALL else 5)]
ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "enable_prefix_caching": True,
    **graphs((1, 3, 6, 8, 12, 24)),
}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    verify_by_reference(monkeypatch)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> np.ndarray:
    return exact_probs(checkpoint, top_p=1.0).reshape([VOCAB_SIZE] * 3)


def start(engine: Any, checkpoint: Path, layer: int, ahead: Path | None = None) -> Any:
    own = early_exit(layer, K) if ahead is None else with_embeddings(ahead, layer, K, hidden_size=64)
    config = {**own, "draft_sample_method": "probabilistic"}
    return engine(config, model=str(checkpoint), **ARGUMENTS)


def rate(llm: Any, batches: list[int]) -> tuple[np.ndarray, float]:
    """Counts of the outcomes of all batches, all of which were replayed, and the share of drafts accepted."""
    speculator, target = runner(llm).speculator, runner(llm).cudagraph_manager
    graphs_before = replays(speculator._graphs), replays(target)
    counts, drafted, accepted = counted(llm, lambda: sampled(llm, *batches, top_p=1.0).reshape([VOCAB_SIZE] * 3))
    assert replays(speculator._graphs) >= graphs_before[0] + len(batches)
    assert replays(target) >= graphs_before[1] + len(batches)
    assert drafted >= K * sum(batches) and llm.collective_rpc("specplugins_stats")[0]["faults"] == {}
    return counts, accepted / drafted


@pytest.mark.slow
@pytest.mark.parametrize("layer", [2, 1])
def test_distribution(engine: Any, device: Device, checkpoint: Path, expected: np.ndarray, layer: int) -> None:
    """Batches of 1 to 8, most with padding rows; from all layers every draft is accepted. Fails if verification reads a
    q that the graph did not write, if a padding row writes into a request's q, or if a graph keeps the noise that it
    was recorded with: then all drafts of all layers are accepted, and not by chance.
    """
    counts, accepted = rate(start(engine, checkpoint, layer), BATCHES)
    assert accepted == 1 if layer == 2 else 0.1 < accepted < 0.9
    assert chi_squared([(counts, expected, expected)]).p_value > 1e-4


@pytest.mark.slow
def test_distribution_while_weights_change(
    engine: Any, device: Device, checkpoint: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a jump that learns, with other weights before every other step. Fails if verification reads a q of other
    weights than the draft was drawn with."""
    config = write_head(tmp_path, 0, 2, 0.05, num_layers=2, hidden_size=64)
    config |= {"num_speculative_tokens": K, "draft_sample_method": "probabilistic", "learn": True}
    llm = engine(config, model=str(checkpoint), **ARGUMENTS)
    learner_of(llm)
    num_steps = swaps_weights(monkeypatch, scale=0.1)
    counts, accepted = rate(llm, BATCHES)
    assert num_steps[0] > 2 * len(BATCHES) and 0.05 < accepted < 0.9
    assert chi_squared([(counts, expected, expected)]).p_value > 1e-4


@pytest.mark.long
def test_one_pass(engine: Any, device: Device, checkpoint: Path, expected: np.ndarray, tmp_path: Path) -> None:
    """The same of look-ahead tokens through all layers: each first token is accepted, each other hardly ever. Fails if
    the q of a pass's tokens change places."""
    counts, accepted = rate(start(engine, checkpoint, 2, tmp_path), BATCHES)
    assert 0.5 < accepted < 0.9
    assert chi_squared([(counts, expected, expected)]).p_value > 1e-4
