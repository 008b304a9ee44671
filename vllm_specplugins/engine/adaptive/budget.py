"""Model Runner V2: how many draft tokens a step verifies, in place of the arithmetic of vLLM's manager of adaptive
verification.

The host chooses their number, from confidences that are a step old, vLLM's tables of what steps cost and what contexts
add to them (prices.py), in one compiled function; the device shares it out by the newest ones, in one launch. Where a
step that verifies all drafts costs what one without any does, all are verified, and nothing is launched. S: slots of
requests, K: most tokens of a draft.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu import buffer_utils

from vllm_specplugins.engine.adaptive.prices import Prices, measure_prices
from vllm_specplugins.engine.verify import EDITED_ROWS
from vllm_specplugins.kernels.budget import Layout, share_budget
from vllm_specplugins.kernels.compiled import compiled

FREE = 1.02  # a step that costs at most so much more than one without drafts costs the same
LOOKS_EVERY = 16  # steps, at how long the contexts of a batch of as many requests are
DECAY = 0.8  # of what is known of a request, by step after one in which nothing was found


class Confidences(NamedTuple):
    """How likely each token of the newest drafts is to be accepted if those before it are, [S + 1, K] float32 each: on
    the device, there where the host reads it, and what the host reads, which may be a step older or in part newer."""

    newest: torch.Tensor
    mapped: torch.Tensor
    host: np.ndarray


def new_confidences(num_slots: int, max_num_draft: int, device: torch.device) -> Confidences | None:
    """None where ranks might read different ones, and so run different graphs: vLLM copies them behind an event."""
    shape = num_slots + 1, max_num_draft
    newest = torch.ones(shape, dtype=torch.float32, device=device)
    if get_tp_group().world_size > 1 or not buffer_utils.is_uva_available():
        return None
    buffer = buffer_utils.UvaBuffer(shape, torch.float32)  # of the runner's platform
    return Confidences(newest, buffer.uva(), buffer.np)


@compiled("i8(f4[:, :], f8[:, :], b1[:], i8[:], i8[:], i8, i8, f8, f8[:], f8, i8)")
def best_budget(
    confidences: Any,  # [S, K]
    found: Any,  # [S, K] mean probability of survival after a step in which nothing was found
    had_nothing: Any,  # [S], in the step before
    slots: Any,  # [R]
    num_drafts: Any,  # [R]
    num_fixed: int,
    num_sampling: int,
    draft_ms: float,
    verify_ms: Any,  # by tokens
    token_ms: float,  # of a draft token beside that
    most: int,
) -> int:
    """How many draft tokens promise most tokens a ms, beside so many others.

    Of a request for which nothing was found is expected what that same request had one step later before: a lookup's
    confidence is 0 until something is found, and the first of its drafts would find no budget.
    """
    scores, count = np.empty(num_drafts.sum()), 0
    for slot, num_draft in zip(slots, num_drafts):  # noqa: B905
        survival, had = 1.0, had_nothing[slot]
        for step in range(num_draft):
            survival *= confidences[slot, step]
            if had:
                found[slot, step] += (1 - DECAY) * (survival - found[slot, step])
            score = max(survival, found[slot, step])
            if score > 0:
                scores[count] = score
                count += 1
        if num_draft:
            had_nothing[slot] = confidences[slot, 0] == 0
    scores = np.sort(scores[:count])
    tokens, best = float(num_sampling), 0
    rate = tokens / (draft_ms + verify_ms[num_fixed])
    for budget in range(1, min(count, most) + 1):
        tokens += scores[count - budget]
        own = tokens / (draft_ms + verify_ms[num_fixed + budget] + budget * token_ms)
        if own > rate:
            rate, best = own, budget
    return best


class Budget:
    """Methods of vLLM's manager.

    Args:
        confidences: None: vLLM's.
        implementation: of kernels/budget.
        edits_any: whether one of some slots, [R], asks for edits of its logits, of which a step holds a copy.
        max_model_len: the longest context; 0: contexts cost nothing but what vLLM's table says.
    """

    def __init__(
        self,
        manager: Any,
        confidences: Confidences | None,
        implementation: str | None = None,
        edits_any: Callable[[np.ndarray], bool] = lambda slots: False,
        max_model_len: int = 0,
    ):
        self._edits_any = edits_any
        self._manager, self._confidences, self._implementation = manager, confidences, implementation
        self._req_states, num_slots = manager.req_states, manager.req_states.max_num_reqs
        max_num_draft = manager.num_speculative_steps
        self._found, self._had_nothing = np.zeros((num_slots, max_num_draft)), np.zeros(num_slots, bool)
        self._layout = Layout(manager._cu_num_logits, manager.query_start_loc)
        self._accept_probs = manager._confidence_probs if confidences is None else confidences.newest[:num_slots]
        self._add, self._compact = manager.add_request, manager.compact_batch
        self.num_verified, self._uniform = 0, 0  # draft tokens of the newest step; of each request, or -1
        self._counts: Any = None  # of the batch, in its order: drafts, other tokens; and where its logits begin
        self._prices, self._context = Prices(), (0, 0, 0.0)  # requests, steps since, tokens of context of each
        self._step = 0.0, 0.0, 1, 1  # ms beside the table's, of a draft token, too; tokens without drafts and with all
        if max_model_len:
            measure_prices(manager, max_model_len, partial(setattr, self, "_prices"))
        self._known: dict[Any, torch.Tensor] = {}  # of batches that all drafted as much
        for num_rows in (1, 33, 257):  # each variant of the kernel is compiled here
            if num_rows <= num_slots:
                nobody = torch.zeros(num_rows, dtype=torch.int64, device=self._accept_probs.device)
                self._share(nobody, 0, self._of(num_rows, 0))
        for name in ("add_request", "get_num_tokens", "compact_batch", "reallocate_drafts"):
            setattr(manager, name, getattr(self, name))
        if confidences is not None:
            manager.record_confidences = lambda *_: None  # drafting has left them where they are looked for

    def add_request(self, slot: int) -> None:
        """A new one, of which all is expected."""
        self._add(slot)
        self._found[slot], self._had_nothing[slot] = 0.0, False
        if self._confidences is not None:
            self._manager._pending_resets.clear()
            self._accept_probs[slot].fill_(1.0)
            self._confidences.host[slot] = 1.0

    def get_num_tokens(self, num_tokens: Mapping[str, int], drafts: Mapping[str, Sequence[int]]) -> int:
        """Of a step, by request; how many it runs in all."""
        num_reqs, total = len(num_tokens), sum(num_tokens.values())
        num_drafts = [len(drafts.get(request_id, ())) for request_id in num_tokens]
        most = sum(num_drafts)
        num_fixed, (draft_ms, verify_ms) = total - most, self._manager.cost_tables
        is_uniform = total == num_reqs + most and num_drafts.count(num_drafts[0]) == num_reqs
        self._uniform = num_drafts[0] if is_uniform else -1
        most_rows = self._manager._max_total_logits
        if most + num_reqs > EDITED_ROWS and self._edits_any(self._slots(num_tokens)):
            most_rows = min(most_rows, EDITED_ROWS)
        room = max(0, most_rows - num_reqs * self._manager.num_bonus_tokens)
        context = self._context_of(num_tokens) if self._prices.read_ms else 0.0
        own_ms = float(draft_ms[num_reqs]) + self._prices.read_ms * num_reqs * context
        token_ms = self._prices.attend_ms * context
        self._step = own_ms, token_ms, num_fixed, total
        if most > room or own_ms + verify_ms[total] + most * token_ms > FREE * (own_ms + verify_ms[num_fixed]):
            costs = own_ms, verify_ms, token_ms, min(most, room)
            most = self._chosen(num_tokens, np.array(num_drafts), num_fixed, costs)
        self.num_verified = most
        self._manager._batch_budget = None, None, most
        return num_fixed + most

    def _context_of(self, num_tokens: Mapping[str, int]) -> float:
        """Tokens of context of a request of this batch, in the mean; or of one of as many requests, a few steps ago."""
        num_reqs, age, context = self._context
        if num_reqs != len(num_tokens) or age >= LOOKS_EVERY:
            age, context = 0, float(self._req_states.num_computed_tokens_np[self._slots(num_tokens)].mean())
        self._context = len(num_tokens), age + 1, context
        return context

    def costs(self) -> dict[str, float]:
        """Seconds of the newest step: without drafts, and of each draft token if all of them are verified."""
        (own_ms, token_ms, num_fixed, total), (_, verify_ms) = self._step, self._manager.cost_tables or (None, [0, 0])
        table_ms = (verify_ms[total] - verify_ms[num_fixed]) / max(1, total - num_fixed)
        return {"step": (own_ms + verify_ms[num_fixed]) / 1000, "draft_token": (token_ms + table_ms) / 1000}

    def _chosen(self, num_tokens: Mapping[str, int], num_drafts: Any, num_fixed: int, costs: Any) -> int:
        slots, num_sampling = self._slots(num_tokens), len(num_tokens)
        if self._uniform < 0:
            others = np.fromiter(num_tokens.values(), np.int64, num_sampling) - num_drafts
            ends = self._req_states.num_computed_tokens_np[slots] + others
            num_sampling = int(np.count_nonzero(ends >= self._req_states.prefill_len.np[slots]))
        if self._confidences is None:
            known = self._manager._stale_confidences[self._manager._stale_idx].np
        else:
            known = self._confidences.host
        records = known, self._found, self._had_nothing
        return int(best_budget(*records, slots, num_drafts, num_fixed, num_sampling, *costs))

    def _slots(self, request_ids: Mapping[str, int]) -> Any:
        """[R] int64, in their order."""
        return np.fromiter(map(self._req_states.req_id_to_index.__getitem__, request_ids), np.int64, len(request_ids))

    def compact_batch(self, num_drafts: Any, num_tokens: Any, cu_num_logits: Any) -> Any:
        self._counts = num_drafts, num_tokens, cu_num_logits
        return self._compact(num_drafts, num_tokens, cu_num_logits)

    def reallocate_drafts(self, request_ids: list[str], idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        num_reqs, layout, (num_drafts, num_tokens, starts) = len(request_ids), self._layout, self._counts
        # vLLM 0.33 hands out what was admitted, too, where sampling is sharded by batch: then nothing is trimmed.
        more = (None,) if hasattr(self._manager, "_copy_admitted_drafts_to_host") else ()
        self._manager._batch_budget = None
        if self.num_verified == int(num_drafts.sum()):  # as vLLM has just uploaded it
            if self._uniform < 0:
                return (
                    async_tensor_h2d(starts, self._accept_probs.device),
                    layout.query_start_loc,
                    self.num_verified,
                    *more,
                )
            return self._starts(num_reqs), layout.query_start_loc, self.num_verified, *more
        counts = self._of(num_reqs, self._uniform)
        if self._uniform < 0:
            counts = async_tensor_h2d(np.stack((num_drafts, num_tokens - num_drafts)).astype(np.int32), counts.device)
        self._share(idx_mapping, self.num_verified, counts)
        return layout.cu_num_logits[: num_reqs + 1], layout.query_start_loc, self.num_verified, *more

    def _share(self, slots: torch.Tensor, budget: int, counts: torch.Tensor) -> None:
        bonus = self._manager.num_bonus_tokens
        share_budget(self._layout, self._accept_probs, slots, counts, budget, bonus, self._implementation)

    def _of(self, num_reqs: int, num_draft: int) -> torch.Tensor:
        """[2, R] of a batch of which each request has so many drafts and one token beside them."""
        if (num_reqs, num_draft) not in self._known:
            counts = np.repeat(np.array([[max(0, num_draft)], [1]], np.int32), num_reqs, axis=1)
            self._known[num_reqs, num_draft] = async_tensor_h2d(counts, self._accept_probs.device)
        return self._known[num_reqs, num_draft]

    def _starts(self, num_reqs: int) -> torch.Tensor:
        """[R + 1], where the logits of each begin."""
        if (None, self._uniform) not in self._known:
            device, width = self._accept_probs.device, 1 + self._uniform
            starts = torch.arange(0, len(self._found) * width + 1, width, dtype=torch.int32, device=device)
            self._known[None, self._uniform] = starts
        return self._known[None, self._uniform][: num_reqs + 1]
