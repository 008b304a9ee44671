"""Model Runner V1: samples and verifies with kernels/rejection, in place of vLLM's samplers. Steps without drafts also
use it, so a seeded request's output does not depend on drafts. Row i of a request predicts the token after its first i
draft tokens; penalties and bad words include those tokens. N: rows, B: requests, V: vocab_size."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, MinPLogitsProcessor
from vllm.v1.worker import gpu_model_runner

from vllm_specplugins.engine.hooks import replaced
from vllm_specplugins.engine.session import Session
from vllm_specplugins.engine.v1.edits import custom, edit
from vllm_specplugins.engine.v1.rows import Rows
from vllm_specplugins.engine.verify import verifies
from vllm_specplugins.kernels.rejection import Sampling, host, rejection_sample
from vllm_specplugins.kernels.rejection.reference import truncated


@contextmanager
def all_logits_processors(vllm_config: VllmConfig) -> Iterator[None]:
    """Makes vLLM build a runner with all logits processors; with speculation vLLM would use only one."""
    if not verifies():
        yield
        return
    original = gpu_model_runner.build_logitsprocs

    def build_logitsprocs(vllm_config: VllmConfig, *args: Any) -> Any:
        without = copy.copy(vllm_config)
        without.speculative_config = None
        return original(without, *args)

    with replaced(gpu_model_runner, {"build_logitsprocs": build_logitsprocs}):
        yield


class Verifier:
    def __init__(self, runner: Any, seed_of: Callable[[str], int], session: Session):
        self._runner = runner
        self._seed_of = seed_of
        self._draft_logits: torch.Tensor | None = None
        self._drafted_for: Sequence[str] = ()
        self._session = session

    def save_q(self, request_ids: Sequence[str], logits: torch.Tensor | None) -> None:
        """Saves the logits of these requests' drafts, [num_reqs, K, V], for the next step; None if q is one-hot."""
        self._drafted_for, self._draft_logits = request_ids, logits

    def may_draft(self, row: int) -> bool:
        """Returns whether a request can verify more than one position. The state of a thinking budget, or of a user's
        logits processor, advances one step at a time."""
        input_batch = self._runner.input_batch
        request = self._runner.requests[input_batch.req_ids[row]]
        if input_batch.thinking_budget_state_holder is not None:
            params = request.sampling_params
            if params is not None and params.thinking_token_budget is not None:
                return False
        for processor in custom(input_batch.logitsprocs.all):
            if processor.is_argmax_invariant() or not isinstance(processor, AdapterLogitsProcessor):
                return False
            if row in processor.req_info:
                return False
        return True

    def sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> SamplerOutput:
        input_batch = self._runner.input_batch
        metadata = input_batch.sampling_metadata
        has_drafts = spec_decode_metadata is not None and any(spec_decode_metadata.num_draft_tokens)
        if metadata.all_greedy and not has_drafts and metadata.thinking_budget_state_holder is None:
            return self._runner.sampler(logits=logits, sampling_metadata=metadata)  # no number is random
        if spec_decode_metadata is None:
            drafts: tuple[list[int], list[int]] = [0] * input_batch.num_reqs, []
        else:
            drafts = spec_decode_metadata.num_draft_tokens, spec_decode_metadata.draft_token_ids.tolist()
        rows = Rows(*drafts, input_batch.num_tokens_no_spec, logits.device)
        edited, sampler = edit(logits, metadata, input_batch, rows), self._runner.sampler
        sampling, max_num_draft = self.sampling(metadata), max(rows.num_draft)
        verified, q = (edited, sampling), None if metadata.all_greedy else self._q(rows, max_num_draft)
        if not metadata.all_greedy and any(custom(metadata.logitsprocs.argmax_invariant)):
            verified = _scale(edited, metadata, sampling)
        if logits.device.type == "cpu" and q is None:  # without building the operation's tensors
            if metadata.all_greedy:
                token_ids = sampler.greedy_sample(edited.float()).numpy()
            else:
                token_ids = host.draw_rows(verified[0], rows.requests, rows.positions, verified[1])
            shape = len(rows.counts), max_num_draft + 1
            accepted, num_accepted = np.empty(shape, np.int64), np.empty(len(rows.counts), np.int32)
            host.accept(token_ids, rows.starts.astype(np.int32), rows.fed, accepted, num_accepted)
            sampled = torch.from_numpy(accepted)
        else:
            sampled, _ = rejection_sample(verified[0], *rows.layout, verified[1], max_num_draft, q)
        logprobs = None
        if metadata.max_num_logprobs is not None or metadata.logprob_token_ids:
            if not sampler.logprobs_mode.startswith("raw"):
                logits, sampling = verified
            logprobs = self._logprobs(logits, sampling, sampled, metadata, rows)
        return SamplerOutput(sampled_token_ids=sampled.to(torch.int32), logprobs_tensors=logprobs)

    def sampling(self, metadata: Any) -> Sampling:
        input_batch = self._runner.input_batch
        num_reqs, device = input_batch.num_reqs, self._runner.device
        if metadata.all_greedy:
            return Sampling(
                torch.zeros(num_reqs, device=device), torch.zeros(num_reqs, dtype=torch.int64, device=device)
            )
        min_p = None
        for processor in metadata.logitsprocs.argmax_invariant:
            if isinstance(processor, MinPLogitsProcessor) and processor.min_p_count:
                min_p = processor.min_p[:, 0]
        seeds = np.array([self._seed_of(request_id) for request_id in input_batch.req_ids], np.int64)
        return Sampling(metadata.temperature, torch.from_numpy(seeds).to(device), metadata.top_k, metadata.top_p, min_p)

    def _q(self, rows: Rows, max_num_draft: int) -> torch.Tensor | None:
        """Returns logits of q, [B, >= max_num_draft, V]; None: q is one-hot for all. A request that skipped a step has
        lost its logits, and a forced token has none; their q is one-hot, which is exact. The scheduler pads a request
        that begins with one token to compute with ids of -1; these rows stay -inf."""
        if self._draft_logits is None or max_num_draft == 0:
            return None
        request_ids, forced = self._runner.input_batch.req_ids, self._session.forced or {}
        place = {request_id: index for index, request_id in enumerate(self._drafted_for)}
        if list(place) == request_ids and self._draft_logits.shape[1] >= max_num_draft and not forced:
            return self._draft_logits
        logits = self._draft_logits
        result = logits.new_full((len(request_ids), max_num_draft, logits.shape[-1]), -torch.inf)
        for index, (request_id, num_draft) in enumerate(zip(request_ids, rows.num_draft, strict=True)):
            num_drawn, _ = forced.get(request_id, (num_draft, ()))
            # The scheduler may have shortened the draft before its first forced token.
            num_drawn = min(num_drawn, num_draft) if request_id in place else 0
            if num_drawn:
                result[index, :num_drawn] = logits[place[request_id], :num_drawn]
            first = rows.starts[index] + 1
            fed = rows.fed[first : first + num_draft]
            [one_hot] = np.nonzero((fed >= 0) & (np.arange(num_draft) >= num_drawn))
            result[index, one_hot, fed[one_hot]] = 0.0
        return result

    def _logprobs(
        self, logits: torch.Tensor, sampling: Sampling, sampled: torch.Tensor, metadata: Any, rows: Rows
    ) -> LogprobsTensors:
        """Returns logprobs in vLLM's format, with a row for each token of `sampled` [B, max_num_draft + 1]."""
        sampler = self._runner.sampler
        is_token = sampled >= 0
        requests, steps = is_token.nonzero(as_tuple=True)
        scores = logits[rows.as_tensor(rows.starts)[requests] + steps].float()
        if sampler.logprobs_mode.startswith("processed"):
            temperature = torch.where(sampling.temperature == 0, 1.0, sampling.temperature)[requests, None]
            scores = truncated(scores, sampling.at(requests)) / temperature
        if sampler.logprobs_mode.endswith("logprobs"):
            scores = sampler.compute_logprobs(scores)
        token_ids = sampled[is_token]
        if metadata.logprob_token_ids:
            chosen = {
                index: metadata.logprob_token_ids[request]
                for index, request in enumerate(requests.tolist())
                if request in metadata.logprob_token_ids
            }
            logprobs = sampler.gather_specific_token_logprobs(scores, chosen, token_ids)
        else:
            logprobs = sampler.gather_logprobs(scores, metadata.max_num_logprobs, token_ids)
        if sampled.shape[1] == 1:
            return logprobs
        return LogprobsTensors(*(_spread(tensor, is_token.flatten()) for tensor in logprobs[:3]))


def _spread(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the rows of a tensor at the places that `mask` marks, and zeros elsewhere."""
    result = tensor.new_zeros(len(mask), *tensor.shape[1:])
    result[mask] = tensor
    return result


def _scale(logits: torch.Tensor, metadata: Any, sampling: Sampling) -> tuple[torch.Tensor, Sampling]:
    """Returns logits at temperature 1 after the processors that follow the temperature, and the remaining sampling
    parameters. It handles batches with a user's processor, which have one row per request."""
    greedy = sampling.temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, sampling.temperature)[:, None]
    untouched = logits[greedy]
    for processor in metadata.logitsprocs.argmax_invariant:
        scaled = processor.apply(scaled)
    scaled[greedy] = untouched.float()
    return scaled, Sampling(torch.where(greedy, 0.0, 1.0), sampling.seeds, sampling.top_k, sampling.top_p)


def expand_batch_to_tokens(
    x: torch.Tensor,  # [num_reqs]
    cu_num_tokens: torch.Tensor,  # [num_reqs]
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeats a sampling parameter of each request, [num_reqs], for its draft tokens, [num_tokens]. Replaces vLLM's
    function. vLLM's CPU kernel writes to a copy of the output, so temperature, top-k and top-p of draft positions stay
    uninitialised, and samples have a wrong distribution.

    >>> expand_batch_to_tokens(torch.tensor([0.5, 0.0]), torch.tensor([2, 3]), 3, 0, 1)
    tensor([0.5000, 0.5000, 1.0000])
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    return replaced.repeat_interleave(counts, output_size=num_tokens)
