"""Compares V1's edits row by row with vLLM's sampler without speculation."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import edit_params
from conftest import RUNNER

pytestmark = pytest.mark.skipif(RUNNER == "v2", reason="of V1")
VOCAB_SIZE, CPU = 100, torch.device("cpu")


class Doubles:
    """A processor of the user's own, which does not commute with penalties."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * 2


def make_metadata(params: list[Any], prompts: list[list[int]], outputs: list[list[int]], customs: list[Any]) -> Any:
    """vLLM's, of a batch."""
    from vllm.v1.sample.logits_processor import (
        BatchUpdate,
        LogitBiasLogitsProcessor,
        LogitsProcessors,
        MinTokensLogitsProcessor,
    )

    added = [(i, *entry) for i, entry in enumerate(zip(params, prompts, outputs, strict=True))]
    processors = [kind(None, CPU, False) for kind in (MinTokensLogitsProcessor, LogitBiasLogitsProcessor)]
    for processor in processors:
        processor.update_state(BatchUpdate(len(params), [], added, []))
    logitsprocs = LogitsProcessors()
    logitsprocs.non_argmax_invariant = [*processors, *customs]
    allowed = torch.zeros(len(params), VOCAB_SIZE, dtype=torch.bool)
    for mask, own in zip(allowed, params, strict=True):
        mask[[t for t in range(VOCAB_SIZE) if own.allowed_token_ids and t not in own.allowed_token_ids]] = True
    padded = [prompt + [VOCAB_SIZE] * (max(map(len, prompts)) - len(prompt)) for prompt in prompts]
    return SimpleNamespace(
        logitsprocs=logitsprocs,
        allowed_token_ids_mask=allowed if allowed.any() else None,
        bad_words_token_ids={i: own.bad_words_token_ids for i, own in enumerate(params) if own.bad_words_token_ids},
        no_penalties=all(own.repetition_penalty == 1 for own in params),
        prompt_token_ids=torch.tensor(padded),
        output_token_ids=outputs,
        thinking_budget_state_holder=None,
        **{
            f"{name}_penalties": torch.tensor([getattr(own, f"{name}_penalty") for own in params])
            for name in ("repetition", "frequency", "presence")
        },
    )


def edited_and_expected(
    logits: torch.Tensor, params: list[Any], num_draft: list[int], rng: np.random.Generator, customs: list[Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.v1.sample.sampler import Sampler

    from vllm_specplugins.engine.v1.edits import edit
    from vllm_specplugins.engine.v1.rows import Rows

    prompts, outputs = ([rng.integers(7, 9, rng.integers(1, 5)).tolist() for _ in params] for _ in range(2))
    drafts = [rng.integers(7, 9, number).tolist() for number in num_draft]
    token_ids = np.full((len(params), 40), 8, np.int32)
    for row, prompt, output in zip(token_ids, prompts, outputs, strict=True):
        row[: len(prompt) + len(output)] = prompt + output
    lengths = [np.array([len(entry) for entry in entries], np.int32) for entries in (prompts, outputs)]
    input_batch = SimpleNamespace(
        num_reqs=len(params),
        num_prompt_tokens=lengths[0],
        num_tokens_no_spec=lengths[0] + lengths[1],
        token_ids_cpu=token_ids,
    )
    rows = Rows(num_draft, [token for own in drafts for token in own], input_batch.num_tokens_no_spec, CPU)
    expected = []
    for request, step in zip(rows.requests, rows.steps, strict=True):
        own = [params[request]], [prompts[request]], [outputs[request] + drafts[request][:step]]
        row = logits[len(expected)][None].float()
        expected.append(Sampler().apply_logits_processors(row, make_metadata(*own, customs), False)[0])
    edited = edit(logits, make_metadata(params, prompts, outputs, customs), input_batch, rows)
    return edited, torch.stack(expected)


@pytest.mark.parametrize("customs", [[], [Doubles()]], ids=["own", "custom"])
def test_equals_sampler(customs: list[Any]) -> None:
    """The results are equal to the last bit. Fails if a position is off by one, if a row uses lists of another request,
    or if penalties come before the user's processor."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        num_draft = [0] * 6 if customs else [3, 0, 2, 4, 1, 2]
        logits = torch.randn(sum(num_draft) + 6, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
        before = logits.to(torch.bfloat16).clone()
        edited, expected = edited_and_expected(before, edit_params(rng, VOCAB_SIZE), num_draft, rng, customs)
        assert torch.equal(edited, expected) and torch.equal(before, logits.to(torch.bfloat16))


def test_stop_tokens_that_a_grammar_leaves() -> None:
    """Kills: a row of -inf alone where vLLM keeps the stop tokens; a restoration for other requests."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    rng, num_draft = np.random.default_rng(1), [2, 1, 3]
    params = [SamplingParams(min_tokens=15, stop_token_ids=[5, 6], presence_penalty=0.3) for _ in num_draft]
    params[1].structured_outputs = StructuredOutputsParams(regex="a")
    logits = torch.randn(9, VOCAB_SIZE)
    logits[:, 7:] = logits[:, :5] = -torch.inf
    edited, expected = edited_and_expected(logits, params, num_draft, rng, [])
    assert torch.equal(edited, expected)
    assert (edited > -torch.inf).any(1).sum() == num_draft[1] + 1


def test_nothing_to_do() -> None:
    """Kills: a copy of the logits for parameters that the operation has itself."""
    from vllm import SamplingParams

    from vllm_specplugins.engine.v1.edits import edit
    from vllm_specplugins.engine.v1.rows import Rows

    logits, lengths = torch.randn(1, VOCAB_SIZE), np.array([2])
    input_batch = SimpleNamespace(num_reqs=1, num_prompt_tokens=lengths, num_tokens_no_spec=lengths)
    metadata = make_metadata([SamplingParams(temperature=0.7)], [[1, 2]], [[]], [])
    assert edit(logits, metadata, input_batch, Rows([0], [], lengths, CPU)) is logits


@pytest.mark.parametrize("drafts", [[0], [0, 0, 0], [0, 2, 0]])
def test_metadata_of_a_step(drafts: list[int]) -> None:
    """vLLM's own, to the types. Kills: a row of another request's; drafts that are not seen."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_specplugins.engine.v1.rows import metadata_of

    every = np.arange(64)
    runner: Any = SimpleNamespace(_arange_scratch=every.copy(), arange_np=every, device=CPU)
    runner.input_ids = SimpleNamespace(gpu=torch.arange(64, dtype=torch.int32))
    runner._get_cumsum_and_arange = partial(GPUModelRunner._get_cumsum_and_arange, runner)
    step = np.array(drafts, np.int32), np.array([7, 19, 23][: len(drafts)], np.int32)
    own = partial(GPUModelRunner._calc_spec_decode_metadata, runner)
    for name, expected in vars(own(*step)).items():
        found = getattr(metadata_of(CPU, own, *step), name)
        assert repr(found) == repr(expected) and getattr(found, "dtype", None) == getattr(expected, "dtype", None)
