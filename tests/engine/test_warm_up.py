"""The warm-up's launches are all that serving makes, over a grid of what requests ask for; none of them is run.

vLLM's sampler and its states are real; what the model would be is a stand-in with logits of its types and strides.
"""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import RUNNER

pytestmark = pytest.mark.skipif(RUNNER == "v1", reason="of V2")
WITHOUT_TAPES = "has a device of its own, that is a CPU"
KERNELS = "vllm_specplugins.kernels"
MAX_NUM_REQS = 17
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What serves so: prompt_lookup, cascades, greedy and coupled exits; exits that sample.
KINDS = ("one-hot", "sampled")
# Of the vocabulary and of drafts. Rows of vLLM's heads are padded to 64; edited ones, and drafts, are not.
SIZES = ((128_256, 5), (151_937, 1))
# Variants of a server: for each type of logits (the model's, and float32 where they are edited) a scan and a draw; one
# that reads tokens where they stand, edits of all rows and of last ones; the same of what has no padding. A dense q has
# one more scan and what weighs drafts.
MOST = {"one-hot": 12, "sampled": 16}


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of our operations are launches, as on a GPU."""
    from vllm_specplugins.kernels import implementations, rejection
    from vllm_specplugins.kernels.rejection import drafts

    for module in (implementations, drafts, rejection):
        monkeypatch.setattr(module, "implementation_of", lambda logits, wanted, *on_cpu: "fused")


def asked() -> list[Any]:
    """Of requests: limits, with edits and without; every kind of edit; logprobs, a grammar, temperature 0."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    limits = [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9, "min_p": 0.05}]
    edits: list[dict[str, Any]] = [
        {},
        {"logit_bias": {3: 2.0}},
        {"allowed_token_ids": [5, 6, 7]},
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.3, "presence_penalty": -0.2},
        {"min_tokens": 4, "stop_token_ids": [9]},
    ]
    params = [SamplingParams(seed=1, **limit, **edit) for limit, edit in itertools.product(limits, edits[:2])]
    params += [SamplingParams(**edit) for edit in edits[2:]]
    words = SamplingParams()
    words._bad_words_token_ids = [[5, 6], [7]]
    grammar = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    return [*params, words, grammar, SamplingParams(temperature=0.0), SamplingParams(logprobs=3)]


def make_server(kind: str, dtype: torch.dtype, vocab_size: int, num_draft: int) -> tuple[Any, Any]:
    """A runner and its speculator: as much of them as the warm-up and a step's sampling look at."""
    import vllm.v1.worker.cpu.shm  # noqa: F401  (buffers without pinned memory)
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    from vllm_specplugins.engine.v2.verification.verify import FusedRejectionSampler

    device = torch.device("cpu")
    states = RequestState(MAX_NUM_REQS, 64, 64, num_draft, vocab_size, device)
    sampler = Sampler(SimpleNamespace(reasoning_config=None), MAX_NUM_REQS, vocab_size, device, states)
    config = SimpleNamespace(
        num_speculative_tokens=num_draft,
        enable_adaptive_verification=False,
        rejection_sample_method="standard",
        fly_entropy_threshold=None,  # of vLLM 0.33
        fly_entropy_top_k=None,
    )
    head = torch.empty(MAX_NUM_REQS * (num_draft + 1), -(-vocab_size // 64) * 64, dtype=dtype)[:, :vocab_size]
    runner = SimpleNamespace(
        num_speculative_steps=num_draft,
        device=device,
        max_num_reqs=MAX_NUM_REQS,
        max_num_tokens=1024,
        vocab_size=vocab_size,
        model_config=SimpleNamespace(get_hidden_size=lambda: 8, dtype=dtype),
        model=SimpleNamespace(compute_logits=lambda hidden_states: head[: len(hidden_states)]),
        sampler=sampler,
        rejection_sampler=FusedRejectionSampler(sampler, config, device),
        speculative_config=SimpleNamespace(runs_target=True, draws=True),
    )
    samples = kind != "one-hot"
    speculator = SimpleNamespace(
        enable_adaptive_verification=False,
        draft_logits=torch.empty(MAX_NUM_REQS, num_draft, vocab_size, dtype=dtype) if samples else None,
        barrier=SimpleNamespace(counters=SimpleNamespace(switched_off=False)),
    )
    return runner, speculator


def serve(runner: Any, speculator: Any, params: Any, num_reqs: int) -> None:
    """A step without drafts and one with some, of requests that ask for the same; and a draft's token of each."""
    sampler, states = runner.sampler, runner.sampler.req_states
    for index in range(num_reqs):
        states.add_request(str(index), 2, [7, 8, 7], 3, 50)
        sampler.add_request(states.req_id_to_index[str(index)], params)
    states.apply_staged_writes()
    sampler.apply_staged_writes()
    # Slices of larger arrays, as of a batch that vLLM verifies in pieces.
    requests = torch.tensor([0, *(states.req_id_to_index[str(index)] for index in range(num_reqs))])[1:]
    for num_draft in (0, runner.num_speculative_steps):
        width = num_draft + 1
        logits = runner.model.compute_logits(torch.empty(num_reqs * width))
        expanded = requests.repeat_interleave(width)
        pos, ids = (torch.arange(num_reqs * width + 1, dtype=dtype)[1:] for dtype in (torch.int64, torch.int32))
        batch = expanded, requests, requests.numpy(), pos, ids, ids % width, pos.numpy()
        bounds = torch.arange(-width, num_reqs * width + 1, width, dtype=torch.int32)[1:]
        if num_draft:
            expanded, requests, requests_np, pos, ids, local, lengths = batch
            runner.rejection_sampler._verify(
                logits, speculator.draft_logits, ids, pos, bounds, requests, requests_np, expanded, local, lengths, ids
            )
        else:
            sampler.sample(logits, *batch)
        step = SimpleNamespace(
            req_ids=[str(num_reqs)], idx_mapping_np=requests.numpy(), cu_num_logits=bounds, input_ids=ids,
            positions=pos, idx_mapping=requests, logits_indices=pos, seq_lens=bounds[:-1],
            expanded_idx_mapping=expanded, expanded_local_pos=ids % width,
        )  # fmt: skip
        runner.rejection_sampler.plain(logits, step, num_draft)
    draft(runner, requests, speculator.draft_logits is None)
    for index in range(num_reqs):
        states.remove_request(str(index))


def draft(runner: Any, requests: torch.Tensor, is_coupled: bool) -> None:
    """Two steps of a draft, as proposers/draft_sampler.py makes them: edited where a request asks for it."""
    from vllm_specplugins.kernels.rejection import Sampling
    from vllm_specplugins.kernels.rejection.drafts import coupled_sample, sample_with_q

    sampler, states, num_reqs = runner.rejection_sampler, runner.sampler.sampling_states, len(requests)
    names = ("temperature", "seeds", "top_k", "top_p", "min_p")
    sampling = Sampling(*(getattr(states, name).gpu[requests] for name in names))
    positions, head = torch.arange(num_reqs), runner.model.compute_logits(requests)
    edit = sampler.editor.edit_of_drafts(requests.int(), requests.numpy())
    for num_drafts, logits in itertools.product((0, 1), (head, head.contiguous())):
        edited = logits
        if edit is not None:
            edited = edit(logits, torch.zeros(num_reqs, 5, dtype=torch.int32)[:, :num_drafts], positions)
        choose = coupled_sample if is_coupled else sample_with_q
        choose(edited.to(logits.dtype), positions, sampling)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_new(kind: str) -> None:
    """Kills: a variant left out of the warm-up; one that a batch's size adds, an array that is a slice, or one that is
    not given; a self-check of what never serves. Fails if the warm-up leaves out edited logits, or has requests of
    another type than serving.
    """
    from launch_keys import recorded
    from vllm_specplugins.kernels.self_check import Shapes, check_device

    from vllm_specplugins.engine.v2.verification.self_check import warm_up

    for dtype, (vocab_size, num_draft) in itertools.product(DTYPES, SIZES):
        runner, speculator = make_server(kind, dtype, vocab_size, num_draft)
        with recorded(KERNELS, runs=False) as warmed:
            warm_up(runner, speculator)
        with recorded(KERNELS, runs=False) as served:
            for params, num_reqs in zip(asked(), itertools.cycle((1, 3, 17)), strict=False):
                serve(runner, speculator, params, num_reqs)
        assert len(warmed) <= MOST[kind], sorted(warmed)
        assert served == warmed, (dtype, vocab_size, sorted(served ^ warmed))
        shapes = Shapes(vocab_size, dtype, num_draft, samples=kind != "one-hot")
        with recorded(KERNELS, runs=False) as checked:
            list(check_device(torch.device("cpu"), shapes))
        # Those of kernels/steps are compiled where drafting is recorded.
        of_steps = "_limit_kernel", "_tally_kernel", "_newest_kernel", "_join_kernel"
        checked = {key for key in checked if key[0] not in of_steps}
        assert checked <= warmed, (dtype, vocab_size, sorted(checked - warmed))


def test_trees_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the warm-up does not verify drafts by a speculator's operation, of whole trees and by its draft logits:
    vLLM's memory profile would lack what rounds allocate."""
    from launch_keys import recorded

    from vllm_specplugins.engine.v2.verification.self_check import warm_up

    num_draft, sampled = SIZES[0][1], list[int]()
    runner, speculator = make_server("sampled", torch.bfloat16, *SIZES[0])

    def verify_drafts(slots: Any, nodes: Any, logits: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert len(slots) == len(nodes) == len(logits) and nodes.max() == given[5] == num_draft
        num_reqs = int(slots.max()) + 1
        if len(given) > 6 and given[6] is speculator.draft_logits:
            sampled.append(num_reqs)
        return torch.zeros(num_reqs, num_draft + 1).long(), torch.ones(num_reqs).int()

    runner.rejection_sampler.verify_drafts = verify_drafts
    with recorded(KERNELS, runs=False):
        warm_up(runner, speculator)
    assert MAX_NUM_REQS in sampled
