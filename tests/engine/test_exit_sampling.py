"""Early exit at temperatures other than 0: three tokens of a tiny vocabulary against their exact distribution."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ALL, INTERPRETED, counted, spec_metrics
from small_vocabulary import (
    PROMPT,
    TEMPERATURE,
    TOP_P,
    VOCAB_SIZE,
    answered,
    exact_probs,
    kept_probs,
    p_value,
    sampled,
    write_checkpoint,
)
from transformers import LlamaForCausalLM

WITHOUT_TAPES = "64 samples a step take minutes in Triton's interpreter; test_simulated_sampling.py draws on tapes"
NUM_SAMPLES = 400 if INTERPRETED else 12_000
HALVES = [NUM_SAMPLES // 2] * 2  # vLLM draws no more at once
ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "max_num_seqs": 64 if INTERPRETED else 256,
    "enable_prefix_caching": True,
    "block_size": 32,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> np.ndarray:
    return exact_probs(checkpoint)


def early_exit(method: str) -> dict[str, Any]:
    return {"method": "early_exit", "exit_layer": 1, "num_speculative_tokens": 2, "draft_sample_method": method}


@pytest.fixture(params=["probabilistic"] if INTERPRETED else ["greedy", "probabilistic", "coupled"])
def drafting(request: pytest.FixtureRequest, engine: Any, checkpoint: Path) -> Iterator[Any]:
    yield engine(early_exit(request.param), model=str(checkpoint), **ARGUMENTS)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="test_simulated_sampling.py, in graphs")
def test_distribution(drafting: Any, expected: np.ndarray) -> None:
    """Kills: a q that is not the one that was drawn from; drafted positions at another temperature or top-p; drafts
    whose noise an earlier step has used, where a whole draft decides."""
    assert p_value(sampled(drafting, *HALVES), expected) > 1e-4
    metrics = spec_metrics(drafting)
    rate = metrics["accepted_tokens"] / metrics["draft_tokens"]
    assert 0.1 < rate < 0.9, "both branches of the acceptance rule must matter"
    assert drafting.collective_rpc("specplugins_stats")[0]["faults"] == {}


@pytest.mark.skipif(not INTERPRETED, reason="elsewhere they are what runs, or cannot run")
def test_kernels(drafting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernels in the engine, as on a GPU, say what the reference says. Kills: an argument of theirs that
    the engine lays out otherwise."""
    from vllm_specplugins.kernels import implementations

    asked = [{"temperature": heat, "top_p": top_p} for heat, top_p in ((0.0, 1.0), (0.8, 1.0), (1.2, 0.8))]
    expected, replaced = answered(drafting, asked, max_tokens=8), []
    choose = implementations.implementation_of

    def fused(*arguments: Any) -> str:
        replaced.append(choose(*arguments))
        return "fused"

    monkeypatch.setattr(implementations, "implementation_of", fused)
    assert answered(drafting, asked, max_tokens=8) == expected
    assert set(replaced) == {"host", "reference"}


@pytest.mark.slow
def test_acceptance(engine: Any, checkpoint: Path) -> None:
    """The share of accepted drafts is the sum of min(p, q). Kills: a temperature or top-p of drafted positions that is
    not the request's (vLLM's CPU build), and drafts that are accepted too rarely, which no distribution shows."""
    from vllm import SamplingParams

    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    sequences = torch.cat((torch.tensor(PROMPT).expand(VOCAB_SIZE, -1), torch.arange(VOCAB_SIZE)[:, None]), dim=1)
    with torch.inference_mode():
        output = model(sequences, output_hidden_states=True)
        exit_logits = model.lm_head(model.model.norm(output.hidden_states[1][:, -1])).double()
    logits = output.logits[:, -2:].double()
    first, second = (kept_probs(torch.softmax(part / TEMPERATURE, dim=-1)) for part in (logits[0, 0], logits[:, 1]))
    q = kept_probs(torch.softmax(exit_logits / TEMPERATURE, dim=-1))
    expected = float((first * torch.minimum(second, q).sum(-1)).sum())

    llm = engine({**early_exit("probabilistic"), "num_speculative_tokens": 1}, model=str(checkpoint), **ARGUMENTS)
    params = SamplingParams(
        temperature=TEMPERATURE, top_p=TOP_P, max_tokens=3, n=NUM_SAMPLES // 2, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": PROMPT}] * 2
    before = llm.collective_rpc("specplugins_stats")[0]
    llm.generate(prompts, params, use_tqdm=False)
    after = llm.collective_rpc("specplugins_stats")[0]
    drafted, accepted = (after["whole"][name] - before["whole"][name] for name in ("drafted", "accepted"))
    assert drafted == NUM_SAMPLES, (drafted, accepted, expected)  # one each: a request's last token gets none
    assert abs(accepted / drafted - expected) < 3 * np.sqrt(expected * (1 - expected) / drafted)


@pytest.mark.slow
def test_one_token_left(drafting: Any, checkpoint: Path) -> None:
    """A prompt whose blocks are all cached, but for its last token. Kills: drafts of a step that computes so little
    verified with another's q; the scheduler's padding, ids of -1, verified as the last token of the vocabulary."""
    block_size = drafting.llm_engine.vllm_config.cache_config.block_size
    prompt = (PROMPT * 40)[: min(48 // block_size, 2) * block_size + 1]
    counts = sampled(drafting, 1, *HALVES, prompt=prompt)
    assert p_value(counts, exact_probs(checkpoint, prompt=prompt)) > 1e-4
    [cached] = [m.value for m in drafting.get_metrics() if m.name == "vllm:prefix_cache_hits"]
    assert len(prompt) > 1 and cached >= (NUM_SAMPLES - 1) * (len(prompt) - 1)


@pytest.mark.slow
def test_drafts_of_no_distribution(engine: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is drawn from logits with NaN; 12,000 tokens of verification at temperature 1 (SPECPLUGINS_TESTS=all
    on V2, where CI draws 480). Kills: a token of such a draft that comes out; a fault that is not counted."""
    from vllm_specplugins.isolation import faults as switch
    from vllm_specplugins.proposers import draft_sampler

    draw = draft_sampler.sample_with_q

    def broken(logits: torch.Tensor, positions: torch.Tensor, own: Any) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids, q = draw(logits, positions, own)
        return token_ids, torch.where(torch.arange(VOCAB_SIZE) == 3, torch.nan, q)

    engine.stop()
    monkeypatch.setattr(draft_sampler, "sample_with_q", broken)
    monkeypatch.setattr(switch.CircuitBreaker, "add_fault", lambda self: None)  # it goes on
    llm = engine(early_exit("probabilistic"), model=str(checkpoint), **ARGUMENTS)
    num_samples = 160 if INTERPRETED and not ALL else 4000
    before = spec_metrics(llm)
    counts = sampled(llm, *[num_samples // 2] * 2, temperature=1.0)
    after = spec_metrics(llm)
    assert after["accepted_tokens"] == before["accepted_tokens"]
    assert p_value(counts, exact_probs(checkpoint, temperature=1.0)) > 1e-4
    llm.collective_rpc("specplugins_stats")  # what is counted on a device is read when the next report is due
    [stats] = llm.collective_rpc("specplugins_stats")
    assert stats["faults"]["drew from logits that are not finite"] >= 2 * num_samples
    engine.stop()


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="half a minute, for noise that is the same on both runners")
def test_seeds(engine: Any, checkpoint: Path) -> None:
    """The same seed gives the same tokens, whatever else runs. Kills: draft noise by row or by step."""
    llm = engine(early_exit("probabilistic"), model=str(checkpoint), **ARGUMENTS)
    own, others = {"temperature": 1.5, "max_tokens": 12, "seed": 11}, [{"temperature": 1.0, "max_tokens": 20}] * 5
    [alone] = answered(llm, [own])
    assert answered(llm, [own]) == [alone]
    assert answered(llm, [*others, own])[-1] == alone


WORDS = {"words": [[5], [3, 7], [7, 3], [1, 1], [2, 2], [2, 9, 2]]}
EDITS: list[dict[str, Any]] = [
    {"logit_bias": {2: 4.0, 7: -3.0, 9: 2.5}},
    {"allowed_token_ids": [0, 2, 3, 5, 6, 8]},
    {"min_tokens": 9, "stop_token_ids": [0, 6, 7], "temperature": 1.9},
    {"repetition_penalty": 1.9, "presence_penalty": 1.8, "frequency_penalty": 1.6, **WORDS},
    {"repetition_penalty": 1.9, "logit_bias": {2: 4.0, 7: -3.0}, "min_p": 0.1, "temperature": 0.8, **WORDS},
]


@pytest.mark.parametrize("method", ["coupled", "greedy", "probabilistic", "probabilistic, limits planted"])
def test_all_layers_are_always_right(
    method: str, engine: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exit of all layers drafts what verification says, or has its law, under every parameter: at any temperature,
    if it draws. And what a seeded request says does not depend on drafts that are certain. Kills: noise of another
    position or seed; a limit or an edit that drafting leaves out, or takes from another row; penalties that do not
    count the drafts before, or count what the step has said twice.
    """
    from vllm_specplugins.kernels.rejection import Sampling

    from vllm_specplugins.proposers import draft_sampler

    method, *planted = method.split(", ")
    if planted:  # drafts are drawn without limits
        draw = draft_sampler.sample_with_q
        monkeypatch.setattr(
            draft_sampler,
            "sample_with_q",
            lambda logits, positions, own: draw(logits, positions, Sampling(own.temperature, own.seeds)),
        )
    llm = engine({**early_exit(method), "exit_layer": 2}, model=str(checkpoint), **ARGUMENTS)
    limits = [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"temperature": 1.9, "top_k": 7}]
    asked = [*limits, *EDITS]
    if method == "greedy":
        asked = [{**own, "temperature": 0.0} for own in asked]

    drafted, num_drafted, num_accepted = counted(llm, lambda: answered(llm, asked))
    # Each says its first token undrafted and then three a step; stop tokens end some early.
    assert num_drafted >= len(asked) * 5
    assert (num_accepted == num_drafted) == (not planted)
    if method != "probabilistic":
        assert drafted == answered(llm, asked, extra_args={"specplugins": {"max_draft": 0}})


@pytest.mark.slow
@pytest.mark.parametrize("method", ["coupled", "probabilistic"])
def test_edits_behind_lookups(method: str, engine: Any, checkpoint: Path) -> None:
    """All drafts of a cascade that verifies are its last stage's, also where a lookup's tokens stand before: of all
    layers, every one is accepted. Kills: a penalty that does not know those."""
    stages = [{"method": "prompt_lookup"}, {**early_exit(method), "exit_layer": 2}]
    stages[1].pop("num_speculative_tokens")
    config = {"method": "cascade", "policy": "verify", "gate": "off", "num_speculative_tokens": 4, "stages": stages}
    llm = engine(config, model=str(checkpoint), **ARGUMENTS)
    asked = [{}, {"temperature": 0.0}, *EDITS]
    _, num_drafted, num_accepted = counted(llm, lambda: answered(llm, asked))
    assert num_drafted >= len(asked) * 5 and num_accepted == num_drafted
    [stats] = llm.collective_rpc("specplugins_stats")
    assert stats["faults"] == {}
