"""Parts that learn during serving: their training data, the weights that they serve with, and outputs that do not
depend on them."""

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import NUM_TOKENS, STRESS, generate
from conftest import DEMO_MODEL, INTERPRETED, NUM_LAYERS, RUNNER, SOME, long, long_on_v2, spec_metrics
from parts import HIDDEN, learner_of, learning, swaps_weights, write_head
from test_early_exit import engine_config

from vllm_specplugins.config import ConfigError
from vllm_specplugins.proposers.learning import windows
from vllm_specplugins.proposers.learning.learner import Learner
from vllm_specplugins.tools.base_model import BaseModel

PROMPTS = SOME if INTERPRETED else slice(0, 50, 2)  # fewer teach too little
EXITS = {"early_exit": 0, "last layer": NUM_LAYERS - 1}  # and the layer that drafts


@pytest.fixture(autouse=True)
def all_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a test has it read."""
    if RUNNER == "v1":
        monkeypatch.setattr("vllm_specplugins.engine.v1.learning._MAX_UNREAD", 100_000)


def rounds(llm: Any, prompts: Any, num: int) -> Learner:
    """Learning in the engine's next step: elsewhere the simulated device does not know its tensors."""
    learner = learner_of(llm)

    def learns() -> None:
        del learner.step
        with torch.inference_mode(False):
            learner._take_in()
            for _ in range(num):
                learner.trainer.round()
        learner.step()

    learner.step = learns
    generate(llm, prompts[:1], [1], max_tokens=2)
    return learner  # type: ignore[no-any-return]


def left(base: BaseModel, text: list[int], layer: int) -> torch.Tensor:
    """The states that a layer alone leaves of a text's tokens, each after the keys and values of the whole model."""
    with torch.no_grad():
        states = base.model.get_input_embeddings()(torch.tensor(text))
        return base.passes_beside([layer], base.text_cache(states), normed=False)(states, 1)


@pytest.mark.parametrize("method", [long_on_v2("jump"), long("early_exit"), long_on_v2("last layer")])
def test_examples(engine: Any, prompts: Any, method: str, tmp_path: Path) -> None:
    """States from which the target says what stands next, at places whose tokens stay, under preemption and chunked
    prefill; of an exit what its layers left there, too. Kills: a rejected draft's state, one of another request, place
    or layer, a request that asked for none.
    """
    config = learning(tmp_path, method)
    if method == "last layer":  # a longer draft reads the keys that it left for its first token
        config["num_speculative_tokens"] = 1
    llm = engine(config, **STRESS)
    learner = learner_of(llm)
    plain = generate(llm, prompts, [8], max_tokens=48)
    learner._take_in()
    target = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    kept = learner._windows
    found = [window for held in (True, False) for window in kept.sample(held, 999, np.random.default_rng(0))]
    assert len(found) > len(prompts) // 2
    base = BaseModel.load(str(DEMO_MODEL), "cpu")
    said = {tuple(tokens[at : at + length]) for tokens in plain for at in range(len(tokens)) for length in (2, 3, 4)}
    for window in found:
        with torch.inference_mode():
            assert torch.equal(target.compute_logits(window.states[:, -HIDDEN:]).argmax(-1), window.next_ids)
        assert torch.equal(window.token_ids[1:], window.next_ids[:-1])
        assert tuple(window.next_ids[:4].tolist()) in said
    texts = [prompt + tokens for prompt, tokens in zip(prompts, plain, strict=True)]
    read = [left(base, text, EXITS[method]) for text in texts] if method in EXITS else []
    for window in found if read else ():
        own, length = window.token_ids.tolist(), len(window.token_ids)
        assert any(
            text[at : at + length] == own
            and torch.allclose(window.states[:, :HIDDEN], states[at : at + length], 1e-2, 1e-2)
            for text, states in zip(texts, read, strict=True)
            for at in range(len(text) - length)
        )
    before = learner.counts()["examples"]
    generate(llm, prompts[:4], [4], max_tokens=24, extra_args={"specplugins": {"learn": False}})
    learner._take_in()
    assert learner.counts()["examples"] == before > 0


@pytest.mark.parametrize(
    ("method", "temperature"), [("jump", 0.0), ("jump", 0.8), long_on_v2("early_exit", 0.8), long_on_v2("medusa", 0.8)]
)
def test_outputs_while_weights_change(
    engine: Any, prompts: Any, method: str, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New weights, some of them noise, before every other step: the same tokens as without learning. Kills: a draft
    whose q is told by other weights than it was drawn by.
    """
    own = {"max_tokens": NUM_TOKENS, "temperature": temperature, "seed": 7}
    config = learning(tmp_path, method)
    plain = engine() if temperature == 0 else engine({**config, "learn": False})
    expected = generate(plain, prompts[:8], [4], **own)
    llm = engine(config)
    learner, num_steps = learner_of(llm), swaps_weights(monkeypatch)
    assert generate(llm, prompts[:8], [4], **own) == expected
    learner._take_in()
    assert num_steps[0] > 10 and learner.counts()["examples"] > 0


@pytest.mark.long
@pytest.mark.parametrize("method", ["jump", "early_exit"])
def test_preempted_on_a_full_disk(
    engine: Any, prompts: Any, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New weights before every other step, in an engine that preempts, whose saves end within a file: the same tokens
    as without speculation, and the next save is whole. Kills: weights of half a file; a save that ends learning."""
    expected = generate(engine(None, **STRESS), prompts, [8], max_tokens=48)
    llm = engine(learning(tmp_path / "head", method, path=str(tmp_path / "learned")), **STRESS)
    learner, num_steps = learner_of(llm), swaps_weights(monkeypatch)
    assert generate(llm, prompts, [8], max_tokens=48) == expected
    assert num_steps[0] > 10 and llm.collective_rpc("specplugins_stats")[0]["faults"] == {}
    assert spec_metrics(llm)["preemptions"] > 0
    limit, learner._is_saved = resource.getrlimit(resource.RLIMIT_FSIZE), False
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    learner._save()
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not learner._is_saved and list((tmp_path / "learned").iterdir()) == []
    learner._save()
    assert learner._is_saved
    again = learner.trainer.serving.load(tmp_path / "learned")
    assert all(map(torch.equal, again.parameters(), learner.trainer.serving.parameters()))


@pytest.mark.parametrize(
    ("method", "num_rounds"), [long_on_v2("jump", 3), *(long(method, 3) for method in EXITS), long("medusa", 6)]
)
def test_learns_in_an_engine(
    engine: Any, prompts: Any, method: str, num_rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part learns from the served traffic; the engine drafts with the new weights, reports and saves them, and loads
    them at the next start. Kills: weights that never reach the drafts, metrics that stay zero, a shutdown that saves
    nothing.
    """
    monkeypatch.setattr(windows, "HELD_OUT", 2)  # few requests are enough
    folder = tmp_path / "learned"
    config = learning(tmp_path / "head", method, path=str(folder))
    llm = engine(config)
    learner_of(llm)
    for _ in range(3):
        outputs = generate(llm, prompts, [8], max_tokens=64)
    before = llm.collective_rpc("specplugins_stats")[0]
    learner = rounds(llm, prompts, num_rounds)
    assert learner.counts()["promotions"] > 0
    assert generate(llm, prompts, [8], max_tokens=64) == outputs
    after = llm.collective_rpc("specplugins_stats")[0]
    assert after["faults"] == {}
    worker = llm.llm_engine.model_executor.driver_worker.worker
    shown = worker._reporter._report(worker._session.totals()) | worker._reporter._shown
    name = config["method"]
    assert shown[f"learned_length\t0 {name}\tserving"] > shown[f"learned_length\t0 {name}\tloaded"] >= 1
    assert worker._reporter._sent[f"learned\t0 {name}\tpromotions"] > 0 < shown[f"store_bytes\t0 {name}"]
    lengths = [before["accepted_tokens"] / before["drafts"]]
    lengths.append((after["accepted_tokens"] - before["accepted_tokens"]) / (after["drafts"] - before["drafts"]))
    assert lengths[1] > lengths[0] + 0.3, lengths
    serving = learner.lengths()["serving"]
    # Drafts that end with their request are shorter than those that the windows play.
    assert -0.4 <= serving - (1 + lengths[1]) <= 0.7, "what was expected"
    engine.stop()
    llm = engine({**config, "learn": {**config["learn"], "memory_bytes": 1 << 22}})
    assert learner_of(llm).num_bytes < 1 << 26
    assert all(map(torch.equal, learner_of(llm)._part.parameters(), learner._part.parameters()))


def test_refused(tmp_path: Path) -> None:
    """Where nothing can be learned. Kills: an engine that starts and does not learn."""
    config = learning(tmp_path / "whole")
    if RUNNER == "v2":
        with pytest.raises(ConfigError, match=r"^jump: remove learn: it is untested with tree"):
            engine_config({**config, "tree": 4})
    with pytest.raises(ConfigError, match=r"^jump: learn must be false with tensor_parallel_size 2, not true\.$"):
        engine_config(config, tensor_parallel_size=2)
    exit_head = learning(tmp_path / "exit", "early_exit")
    with pytest.raises(ConfigError, match=r"^early_exit: learn must be false without exit_head, not true"):
        engine_config({**exit_head, "exit_head": None})
    with pytest.raises(ConfigError, match=r"^cascade: learn must be false for early_exit in a cascade, not true\.$"):
        engine_config({"method": "cascade", "stages": [{"method": "prompt_lookup"}, exit_head]})
    layers = {**write_head(tmp_path / "layers", 1, NUM_LAYERS, 0.0), "learn": True}
    with pytest.raises(ConfigError, match=r"^jump: learn must be false for a head that runs layers, not true: "):
        engine_config(layers)
