"""Model Runner V2: chooses the number of draft tokens that a step verifies, in place of vLLM's adaptive verification.
The host chooses the number with the best rate of tokens per ms, from acceptance probabilities that are a step old,
vLLM's tables of step times and the prices of context (measure_prices). The device distributes it by the newest
probabilities in one launch (kernels/budget); if verifying all drafts costs almost nothing, no launch is needed. S:
slots of requests, K: max draft tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm import envs
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu import buffer_utils

from vllm_specplugins.engine.verify import EDITED_ROWS
from vllm_specplugins.gate.budget import UNKNOWN, Prices, StepBudget
from vllm_specplugins.kernels.budget import Layout, share_budget, tiles

LOOKS_EVERY = 16  # steps between two reads of the contexts of batches of the same size


class AcceptProbs(NamedTuple):
    """The acceptance probability of each token of the newest drafts, [S + 1, K] float32: on the device, in memory that
    the host can read, and as the host's view, which may be a step old, or partly newer."""

    newest: torch.Tensor
    mapped: torch.Tensor
    host: np.ndarray


def new_accept_probs(num_slots: int, max_num_draft: int, device: torch.device) -> AcceptProbs | None:
    """Allocates AcceptProbs. Returns None if ranks might read different values and run different graphs; vLLM then
    copies the probabilities after an event."""
    shape = num_slots + 1, max_num_draft
    newest = torch.ones(shape, dtype=torch.float32, device=device)
    if get_tp_group().world_size > 1 or not buffer_utils.is_uva_available():
        return None
    buffer = buffer_utils.UvaBuffer(shape, torch.float32)  # of the runner's platform
    return AcceptProbs(newest, buffer.uva(), buffer.np)


class Budget:
    """Implements the methods of vLLM's manager.

    Args:
        accept_probs: the shared probabilities; None: vLLM copies them.
        edits_any: whether any of these slots, [R], has edits of its logits, for which a step copies the logits.
        max_model_len: the longest context; 0: only vLLM's table prices contexts.

    Attributes: num_verified: number of verified draft tokens of the newest step.
    """

    def __init__(
        self,
        manager: Any,
        accept_probs: AcceptProbs | None,
        edits_any: Callable[[np.ndarray], bool] = lambda slots: False,
        max_model_len: int = 0,
    ):
        self._edits_any = edits_any
        self._manager, self._probs = manager, accept_probs
        self._req_states, num_slots = manager.req_states, manager.req_states.max_num_reqs
        max_num_draft = manager.num_speculative_steps
        self._rule = StepBudget(num_slots, max_num_draft)
        self._layout = Layout(manager._cu_num_logits, manager.query_start_loc)
        self._newest = manager._confidence_probs if accept_probs is None else accept_probs.newest[:num_slots]
        self._add, self._compact = manager.add_request, manager.compact_batch
        self.num_verified, self._uniform = 0, 0  # the second: draft tokens of each request, or -1
        self._counts: Any = None  # of the batch: draft tokens, all tokens, and where its logits begin
        self._prices, self._context = Prices(), (0, 0, 0.0)  # requests, steps since the last look, mean context
        self._step = 0.0, 0.0, 1, 1  # ms beside the table's, of a draft token, too; tokens without drafts and with all
        self._draft_ms = 0.0  # of these ms
        if max_model_len:
            measure_prices(manager, max_model_len, partial(setattr, self, "_prices"))
        self._uploaded: dict[Any, torch.Tensor] = {}  # of uniform batches
        for tile in tiles(num_slots):  # compiles each variant of the kernel
            num_rows = min(tile, num_slots)
            slots = torch.zeros(num_rows, dtype=torch.int64, device=self._newest.device)
            self._share(slots, 0, self._uniform_counts(num_rows, 0))
        for name in ("add_request", "get_num_tokens", "compact_batch", "reallocate_drafts"):
            setattr(manager, name, getattr(self, name))
        if accept_probs is not None:
            manager.record_confidences = lambda *_: None  # drafting has already written them

    def add_request(self, slot: int) -> None:
        """Marks a new request's first draft as unknown."""
        self._add(slot)
        self._rule.clear(slot)
        if self._probs is not None:
            self._manager._pending_resets.clear()
            self._newest[slot].fill_(UNKNOWN)
            self._probs.host[slot] = UNKNOWN

    def get_num_tokens(self, num_tokens: Mapping[str, int], drafts: Mapping[str, Sequence[int]]) -> int:
        num_reqs, total = len(num_tokens), sum(num_tokens.values())
        num_drafts = [len(drafts.get(request_id, ())) for request_id in num_tokens]
        budget = sum(num_drafts)
        num_fixed, (draft_ms, verify_ms) = total - budget, self._manager.cost_tables
        is_uniform = total == num_reqs + budget and num_drafts.count(num_drafts[0]) == num_reqs
        self._uniform = num_drafts[0] if is_uniform else -1
        max_rows = self._manager._max_total_logits
        if budget + num_reqs > EDITED_ROWS and self._edits_any(self._slots(num_tokens)):
            max_rows = min(max_rows, EDITED_ROWS)
        limit = max(0, max_rows - num_reqs * self._manager.num_bonus_tokens)
        context = self._context_of(num_tokens) if self._prices.read_ms else 0.0
        self._draft_ms = float(draft_ms[num_reqs])
        costs = self._prices.costs(self._draft_ms, verify_ms, num_reqs, context)
        self._step = costs.step_ms, costs.token_ms, num_fixed, total
        budget = self._rule.choose(costs, num_fixed, num_drafts, limit, partial(self._read, num_tokens, num_drafts))
        self.num_verified = budget
        self._manager._batch_budget = None, None, budget
        return num_fixed + budget

    def _context_of(self, num_tokens: Mapping[str, int]) -> float:
        """Returns the mean context per request, in tokens, of this batch or of a recent batch with the same number of
        requests."""
        num_reqs, age, context = self._context
        if num_reqs != len(num_tokens) or age >= LOOKS_EVERY:
            age, context = 0, float(self._req_states.num_computed_tokens_np[self._slots(num_tokens)].mean())
        self._context = len(num_tokens), age + 1, context
        return context

    def costs(self) -> dict[str, float]:
        """Returns the seconds of the newest step without drafts, and of each draft token if the step verifies all
        tokens."""
        (step_ms, token_ms, num_fixed, total), (_, verify_ms) = self._step, self._manager.cost_tables or (None, [0, 0])
        table_ms = (verify_ms[total] - verify_ms[num_fixed]) / max(1, total - num_fixed)
        return {"step": (step_ms + verify_ms[num_fixed]) / 1000, "draft_token": (token_ms + table_ms) / 1000}

    def drafter_length(self, reports: Any, lengths: Sequence[int], num_passes: int) -> int:
        """Returns how many tokens a drafter drafts (StepBudget). Its longest draft takes `num_passes` passes."""
        (step_ms, token_ms, num_fixed, _), (_, verify_ms) = self._step, self._manager.cost_tables
        verifying_ms = float(verify_ms[num_fixed + self.num_verified]) + self.num_verified * token_ms
        step_ms, pass_ms = step_ms - self._draft_ms + verifying_ms, self._draft_ms / num_passes
        times = step_ms + pass_ms * lengths[0], pass_ms * (lengths[-1] - lengths[0])
        return self._rule.drafter_length(reports, lengths, *times)

    def _read(self, num_tokens: Mapping[str, int], num_drafts: Sequence[int]) -> tuple[Any, Any, int]:
        slots, num_sampling = self._slots(num_tokens), len(num_tokens)
        if self._uniform < 0:
            others = np.fromiter(num_tokens.values(), np.int64, num_sampling) - np.array(num_drafts)
            ends = self._req_states.num_computed_tokens_np[slots] + others
            num_sampling = int(np.count_nonzero(ends >= self._req_states.prefill_len.np[slots]))
        if self._probs is None:
            return self._manager._stale_confidences[self._manager._stale_idx].np, slots, num_sampling
        return self._probs.host, slots, num_sampling

    def _slots(self, request_ids: Mapping[str, int]) -> Any:
        return np.fromiter(map(self._req_states.req_id_to_index.__getitem__, request_ids), np.int64, len(request_ids))

    def compact_batch(self, num_drafts: Any, num_tokens: Any, cu_num_logits: Any) -> Any:
        """Returns vLLM's result; `reallocate_drafts` uses the batch's counts."""
        self._counts = num_drafts, num_tokens, cu_num_logits
        return self._compact(num_drafts, num_tokens, cu_num_logits)

    def reallocate_drafts(self, request_ids: list[str], idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        """Returns the indices at which the rows' logits and tokens begin, and the total number of draft tokens."""
        num_reqs, layout, (num_drafts, num_tokens, starts) = len(request_ids), self._layout, self._counts
        # vLLM 0.33 also returns the admitted numbers if sampling is sharded by batch, and then drafts are not trimmed.
        more = (None,) if hasattr(self._manager, "_copy_admitted_drafts_to_host") else ()
        self._manager._batch_budget = None
        cu_num_logits, device = layout.cu_num_logits[: num_reqs + 1], self._newest.device
        if self.num_verified == int(num_drafts.sum()):  # the layout is the one that vLLM has just uploaded
            is_uniform = self._uniform >= 0
            cu_num_logits = self._uniform_starts(num_reqs) if is_uniform else async_tensor_h2d(starts, device)
        elif self._uniform >= 0:
            self._share(idx_mapping, self.num_verified, self._uniform_counts(num_reqs, self._uniform))
        else:
            counts = np.stack((num_drafts, num_tokens - num_drafts)).astype(np.int32)
            self._share(idx_mapping, self.num_verified, async_tensor_h2d(counts, device))
        return cu_num_logits, layout.query_start_loc, self.num_verified, *more

    def _share(self, slots: torch.Tensor, budget: int, counts: torch.Tensor) -> None:
        bonus = self._manager.num_bonus_tokens
        share_budget(self._layout, self._newest, slots, counts, budget, bonus)

    def _uniform_counts(self, num_reqs: int, num_draft: int) -> torch.Tensor:
        """Returns the draft tokens of each request and its one other token, [2, R]."""
        if (num_reqs, num_draft) not in self._uploaded:
            counts = np.repeat(np.array([[num_draft], [1]], np.int32), num_reqs, axis=1)
            self._uploaded[num_reqs, num_draft] = async_tensor_h2d(counts, self._newest.device)
        return self._uploaded[num_reqs, num_draft]

    def _uniform_starts(self, num_reqs: int) -> torch.Tensor:
        width = 1 + self._uniform
        if width not in self._uploaded:
            ends = len(self._rule.was_poor) * width + 1
            self._uploaded[width] = torch.arange(0, ends, width, dtype=torch.int32, device=self._newest.device)
        return self._uploaded[width][: num_reqs + 1]


_CONTEXT_LEN = "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN"
_REPLAYS = 5  # replays of each batch; their median counts


def measure_prices(manager: Any, max_model_len: int, use: Callable[[Prices], None]) -> None:
    """Makes vLLM's profile measure prices, and calls `use` with them; all ranks get the same prices. `manager` is
    vLLM's manager of adaptive verification. vLLM's profile times requests of one token with 8,192 tokens of context
    each. Its table therefore prices a draft token like another request, although the token reads the same keys and
    values as its request. Here the batches of the table have no context, and four more batches measure the cost of
    context. VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN turns this off."""
    theirs, set_theirs = manager.batches_to_profile, manager.set_initial_cost_curves
    width = manager.num_speculative_steps + manager.num_bonus_tokens
    if envs.is_set(_CONTEXT_LEN) or width > manager.req_states.max_num_batched_tokens:  # no step verifies a whole draft
        return
    context_len = min(envs.VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN, max_model_len - width)

    def batches_to_profile(capture_sizes: list[int]) -> Iterator[dict[str, Any]]:
        for batch in theirs(capture_sizes):
            yield {**batch, "context_len": 0}
        req_states = manager.req_states
        limit = min(req_states.max_num_reqs, req_states.max_num_batched_tokens // width)
        num_reqs = max(1, min(limit, max(capture_sizes, default=0) // width + 1))  # no graph pads such a batch
        for size in ({"num_tokens": num_reqs}, {"num_tokens": num_reqs * width, "uniform_decode": True}):
            for length in (0, context_len):
                yield from [{**size, "context_len": length}] * _REPLAYS

    def set_initial_cost_curves(samples: list[Any]) -> None:
        ours = [samples[at : at + _REPLAYS] for at in range(len(samples) - 4 * _REPLAYS, len(samples), _REPLAYS)]
        use(get_tp_group().broadcast_object(_prices(ours, context_len), src=0))
        set_theirs(samples[: -4 * _REPLAYS])

    manager.batches_to_profile, manager.set_initial_cost_curves = batches_to_profile, set_initial_cost_curves


def _prices(samples: Sequence[Sequence[Any]], context_len: int) -> Prices:
    """Fits samples of requests of one token and of requests with drafts, each without a context and with one."""
    one, with_one, drafts, with_drafts = (float(np.median([sample.forward_ms for sample in each])) for each in samples)
    (one_reqs, _), (num_reqs, num_tokens) = ((sample.num_reqs, sample.num_target_tokens) for sample, *_ in samples[::2])
    length = max(1, context_len)
    read_ms = max(0.0, with_one - one) / (length * one_reqs)
    rest_ms = (with_drafts - drafts) / length - num_reqs * read_ms
    return Prices(read_ms, max(0.0, rest_ms) / max(1, num_tokens - num_reqs))
