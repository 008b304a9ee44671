"""Compares V2's edits in one launch with vLLM's logits processors on the same states."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import edit_params
from conftest import INTERPRETED, RUNNER

pytestmark = pytest.mark.skipif(RUNNER == "v1", reason="of V2")
VOCAB_SIZE, NUM_DRAFT = 100, [3, 0, 2, 4, 1, 2]


def make_sampler(params: list[Any]) -> tuple[Any, Any]:
    """vLLM's sampler of V2 with a request each, and our editor, which watches it; half of a text is output."""
    if INTERPRETED:
        import vllm.v1.worker.cpu.shm  # noqa: F401  (buffers without pinned memory)
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    from vllm_specplugins.engine.v2.verification.edits import LogitsEditor

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    states = RequestState(8, 64, 64, max(NUM_DRAFT), VOCAB_SIZE, device)
    sampler = Sampler(SimpleNamespace(reasoning_config=None), 8, VOCAB_SIZE, device, states)
    editor = LogitsEditor(sampler)
    rng = np.random.default_rng(1)
    for index, own in enumerate(params):
        length = 2 * int(rng.integers(1, 5))
        states.add_request(str(index), length // 2, rng.integers(7, 9, length).tolist(), length - 1, 50)
        sampler.add_request(states.req_id_to_index[str(index)], own)
    states.apply_staged_writes()
    sampler.apply_staged_writes()
    return sampler, editor


def make_step(sampler: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], Any]:
    """Logits, layout and context of a step with ragged drafts, requests in another order than states."""
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

    states, rng = sampler.req_states, torch.Generator().manual_seed(2)
    idx_mapping = torch.tensor([states.req_id_to_index[str(index)] for index in range(len(NUM_DRAFT))])
    num_rows = torch.tensor(NUM_DRAFT) + 1
    cu_num_logits = torch.nn.functional.pad(num_rows.cumsum(0), (1, 0)).int()
    local = torch.arange(int(num_rows.sum())) - cu_num_logits[:-1].repeat_interleave(num_rows)
    expanded = idx_mapping.repeat_interleave(num_rows)
    token_ids = torch.randint(7, 9, local.shape, generator=rng)
    pos = states.total_len.gpu.cpu()[expanded] - 1 + local
    logits = torch.randn(len(local), VOCAB_SIZE, generator=rng).to(torch.bfloat16)
    context = LogitsContext(
        expanded_idx_mapping=expanded.int().to(states.device),
        idx_mapping=idx_mapping.int().to(states.device),
        idx_mapping_np=idx_mapping.numpy(),
        expanded_local_pos=local.int().to(states.device),
        input_ids=token_ids.to(states.device),
        pos=pos.to(states.device),
        seq_lens_upper_bound_np=pos.numpy(),
    )
    layout = cu_num_logits.to(states.device), context.input_ids, context.pos + 1, context.idx_mapping
    return logits.to(states.device), layout, context


def of_vllm(sampler: Any, logits: torch.Tensor, context: Any) -> torch.Tensor:
    expected = logits.float()
    for processor in sampler.logits_processors:
        expected = processor.apply(expected, context)
    return expected


@pytest.mark.parametrize("implementation", ["reference", "fused"])
def test_equals_processors(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit. Kills: an array that means something else; positions off by one; another order of edits."""
    from vllm_specplugins.engine.v2.verification import edits

    monkeypatch.setattr(edits, "adjust", partial(edits.adjust, implementation=implementation))
    for seed in range(3):
        sampler, editor = make_sampler(edit_params(np.random.default_rng(seed), VOCAB_SIZE))
        logits, layout, context = make_step(sampler)
        before = logits.clone()
        edited = editor.edit(logits, layout, max(NUM_DRAFT), context)
        expected = of_vllm(sampler, logits, context)
        assert torch.equal(edited, expected) and torch.equal(logits, before)
        changed = (expected != logits.float()).any(1)
        assert set(context.expanded_idx_mapping[~changed].tolist()) >= {int(context.idx_mapping[-1])}
        assert changed.sum() > len(logits) // 2


def test_stop_tokens_that_a_grammar_leaves() -> None:
    """Kills: a row of -inf alone where vLLM keeps the stop tokens; a restoration for other requests."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    own = {"min_tokens": 9, "stop_token_ids": [5, 6]}
    params = [SamplingParams(**own) for _ in NUM_DRAFT]
    params[3].structured_outputs = StructuredOutputsParams(regex="a")
    sampler, editor = make_sampler(params)
    logits, layout, context = make_step(sampler)
    logits[:, 7:] = logits[:, :5] = -torch.inf
    edited = editor.edit(logits, layout, max(NUM_DRAFT), context)
    assert torch.equal(edited, of_vllm(sampler, logits, context))
    assert (edited > -torch.inf).any(1).sum() == NUM_DRAFT[3] + 1


def test_nothing_to_do() -> None:
    """Kills: a copy of the logits for parameters that the operation has itself."""
    from vllm import SamplingParams

    sampler, editor = make_sampler([SamplingParams(temperature=0.7, top_k=3) for _ in NUM_DRAFT])
    logits, layout, context = make_step(sampler)
    assert editor.edit(logits, layout, max(NUM_DRAFT), context) is logits
