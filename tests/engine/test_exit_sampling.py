"""Sampled drafts of a tiny model: noise, parameters that limit or edit them, and how many of them are accepted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import PROMPT_LOOKUP, generate
from conftest import INTERPRETED, RUNNER, counted
from transformers import LlamaForCausalLM

from vllm_specplugins.tools.lossless.model import VOCAB_SIZE, next_probs, write_checkpoint

WITHOUT_TAPES = "64 requests a step take minutes in Triton's interpreter; test_distribution.py draws on tapes"
PROMPT = [3, 7, 1, 0, 5, 9, 2]
ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "max_num_seqs": 64 if INTERPRETED else 256,
    "enable_prefix_caching": True,
    "block_size": 32,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, seed=0)
    return folder


def early_exit(method: str) -> dict[str, Any]:
    return {"method": "early_exit", "exit_layer": 1, "num_speculative_tokens": 2, "draft_sample_method": method}


def answered(
    llm: Any, asked: list[dict[str, Any]], prompts: list[list[int]] | None = None, **common: Any
) -> list[list[int]]:
    """Outputs of requests with these parameters, seeded by their place; "words" are bad ones."""
    from vllm import SamplingParams

    params = []
    for seed, own in enumerate(asked):
        own = {"seed": seed, "max_tokens": 13, "ignore_eos": True, "detokenize": False, **common, **own}
        words = own.pop("words", None)
        params.append(SamplingParams(**own))
        params[-1]._bad_words_token_ids = words
    tokens = [{"prompt_token_ids": prompt} for prompt in prompts or [PROMPT] * len(params)]
    return [list(result.outputs[0].token_ids) for result in llm.generate(tokens, params, use_tqdm=False)]


@pytest.mark.skipif(not INTERPRETED, reason="elsewhere they are what runs, or cannot run")
def test_kernels(engine: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernels in the engine, as on a GPU, give the results of the reference. Kills: an argument of theirs
    that the engine lays out otherwise."""
    from vllm_specplugins.kernels import implementations

    asked = [{"temperature": heat, "top_p": top_p} for heat, top_p in ((0.0, 1.0), (0.8, 1.0), (1.2, 0.8))]
    llm = engine(early_exit("probabilistic"), model=str(checkpoint), **ARGUMENTS)
    expected, replaced = answered(llm, asked, max_tokens=8), []
    choose = implementations.implementation_of

    def fused(*arguments: Any) -> str:
        replaced.append(choose(*arguments))
        return "fused"

    monkeypatch.setattr(implementations, "implementation_of", fused)
    assert answered(llm, asked, max_tokens=8) == expected
    assert set(replaced) == {"host", "reference"}


@pytest.mark.slow
def test_acceptance(engine: Any, checkpoint: Path) -> None:
    """The share of accepted drafts is the sum of min(p, q). Kills: a temperature or top-p of drafted positions that is
    not the request's (vLLM's CPU build), and drafts that are accepted too rarely, which no distribution shows."""
    from vllm import SamplingParams

    num_samples = 400 if INTERPRETED else 4000
    model, limits = LlamaForCausalLM.from_pretrained(checkpoint).eval(), {"temperature": 0.8, "top_p": 0.9}
    sequences = torch.cat((torch.tensor(PROMPT).expand(VOCAB_SIZE, -1), torch.arange(VOCAB_SIZE)[:, None]), dim=1)
    with torch.inference_mode():
        output = model(sequences, output_hidden_states=True)
        exit_logits = model.lm_head(model.model.norm(output.hidden_states[1][:, -1])).double()
    logits, none = output.logits[:, -2:].double(), sequences[:, :0]
    first, second, q = (
        next_probs(own, PROMPT, none[: len(own)], limits) for own in (logits[:1, 0], logits[:, 1], exit_logits)
    )
    expected = float((first[0] * torch.minimum(second, q).sum(-1)).sum())

    llm = engine({**early_exit("probabilistic"), "num_speculative_tokens": 1}, model=str(checkpoint), **ARGUMENTS)
    params = SamplingParams(**limits, max_tokens=3, n=num_samples // 2, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": PROMPT}] * 2
    before = llm.collective_rpc("specplugins_stats")[0]
    llm.generate(prompts, params, use_tqdm=False)
    after = llm.collective_rpc("specplugins_stats")[0]
    drafted, accepted = (after["whole"][name] - before["whole"][name] for name in ("drafted", "accepted"))
    assert drafted == num_samples, (drafted, accepted, expected)  # one each: a request's last token gets none
    assert abs(accepted / drafted - expected) < 3 * np.sqrt(expected * (1 - expected) / drafted)


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


@pytest.mark.skipif(RUNNER == "v2", reason="V2 has no generators")
def test_seeded_requests_with_chunked_prompts(engine: Any) -> None:
    """Kills: torch's generators in V1's batch, which vLLM winds back in the middle of a prompt: on a CPU it dies of
    that. Fails if a request's output depends on the pieces of its prompt."""
    prompts = [[10 + (7 * i + row) % 90 for i in range(300)] for row in range(3)]
    outputs = []
    for num_tokens in (2048, 128):
        llm = engine(PROMPT_LOOKUP, max_num_batched_tokens=num_tokens, enable_chunked_prefill=True)
        outputs.append(generate(llm, prompts, [3], temperature=1.0, seed=11))
    assert outputs[0] == outputs[1]
    assert len({tuple(output) for output in outputs[0]}) == 3


@pytest.mark.skipif(RUNNER == "v2", reason="mends V1's CPU kernel")
def test_expanded_parameters() -> None:
    """Kills: parameters of another request's rows, and a replaced value that stays."""
    from vllm_specplugins.engine.v1.verify import expand_batch_to_tokens

    x, ends = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert expand_batch_to_tokens(x, ends, 5, 0, 1).tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]
    k = torch.tensor([7, 0, 9], dtype=torch.int32)
    expanded = expand_batch_to_tokens(k, torch.tensor([1, 3, 4], dtype=torch.int32), 4)
    assert expanded.tolist() == [7, 0, 0, 9] and expanded.dtype == torch.int32
