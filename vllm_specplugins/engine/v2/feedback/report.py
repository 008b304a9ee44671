"""Model Runner V2: counts drafts and their outcomes on the device, copies data to the host while no step waits, and
reports the actual lengths of drafts to the scheduler; vLLM's handler reports K for each draft. R: rows of the batch or
of a graph, K: max draft tokens, M: stages."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import DraftTokenIds

from vllm_specplugins.counters import Counters, Ints, StageCounters, count
from vllm_specplugins.draft import Feedback, Int32Array
from vllm_specplugins.engine.messages import DraftLengths
from vllm_specplugins.isolation.faults import NOT_FINITE
from vllm_specplugins.kernels.steps import KINDS, SUMS, Rows, Staged, Totals, tally


class AsyncCopy:
    """Copies a few numbers per row of a step, [num_reqs, any], to the host. Only the reader waits for the copy."""

    def __init__(self, request_ids: Sequence[str], values: torch.Tensor):
        self.request_ids = list(request_ids)
        self._values = values.to("cpu", non_blocking=True)
        # The runner's platform defines this class; the events of vLLM's CPU worker are always complete. A thread that
        # waits for a blocking event sleeps; otherwise it would keep a core busy.
        self._arrived = torch.cuda.Event(blocking=True)
        self._arrived.record()

    def values(self) -> np.ndarray:
        self._arrived.synchronize()
        return self._values.numpy()


class ArrivingLengths(DraftLengths):
    """The numbers of draft tokens of requests, during their copy to the host. Pickling waits for the copy."""

    def __init__(self, arriving: AsyncCopy):
        self._arriving = arriving

    def items(self) -> list[tuple[str, int]]:
        return list(zip(self._arriving.request_ids, self._arriving.values().tolist(), strict=True))

    def __reduce__(self) -> tuple[type, tuple[list[str], list[int]]]:
        return DraftLengths, (self._arriving.request_ids, self._arriving.values().tolist())


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens that a step sampled, complete once `arrived` has happened. Row i of `token_ids` [num_reqs, any],
    vLLM's copy, has `num_sampled[i]` valid tokens."""

    request_ids: Sequence[str]
    arrived: Any
    token_ids: Int32Array
    num_sampled: Int32Array

    @classmethod
    def of(cls, output: Any) -> "SampledTokens":
        request_ids = output.model_runner_output.req_ids
        return cls(request_ids, output.copy_event, output.sampled_token_ids, output.num_sampled_tokens_np)

    def tokens(self) -> Iterator[list[int]]:
        for row, num in enumerate(self.num_sampled.tolist()):
            yield self.token_ids[row, :num].tolist()


class DraftReport:
    """A runner's `draft_tokens_handler`.

    Attributes: trims: whether the device trims drafts. Otherwise all drafts have the planned length, and only
        structured output reads them.
    """

    trims: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self) -> None:
        self._lengths: DraftLengths | None = None
        self._rows: Callable[[], list[list[int]]] | None = None

    def tell(self, lengths: DraftLengths | None, rows: Callable[[], list[list[int]]] | None = None) -> None:
        """Accepts the drafts of the step that ends now. If structured output checks them, `rows` returns their tokens,
        possibly with further tokens after a draft's end. Other drafts stay on the device, and have ids of -1."""
        self._lengths, self._rows = lengths, rows

    def set_draft_tokens(self, input_batch: Any, draft_tokens: Any) -> None:
        """Does nothing, since `tell` already has the drafts."""

    def get_draft_tokens(self) -> DraftTokenIds:
        lengths = dict(self._lengths.items() if self._lengths else ())
        rows = self._rows() if self._rows else [[-1] * num for num in lengths.values()]
        return DraftTokenIds(list(lengths), [row[:num] for row, num in zip(rows, lengths.values(), strict=True)])

    def num_draft(self) -> DraftLengths | None:
        """Returns the lengths of drafts, for a scheduler that plans before the drafts exist. It omits the lengths of
        trimmed drafts, since they would shorten the draft of a later step."""
        return None if self.trims() else self._lengths


class Tally:
    """The totals of all requests, and of each request for its acceptance rate. Each report starts a copy to the host,
    which the next report reads.

    Args:
        num_stages: M; 0: one total for all stages.
    """

    def __init__(self, num_slots: int, max_num_draft: int, num_stages: int, device: torch.device):
        width = max_num_draft + 2
        # The cells of kernels/steps, and then the number of tokens that were drawn from logits that are not finite.
        of_stages = (num_stages, len(KINDS), max_num_draft), (num_stages, len(SUMS))
        self._shapes = (width, width), (2, width), *of_stages, (1,)
        sizes = [int(np.prod(shape)) for shape in self._shapes]
        self._totals = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._starts, self._width = np.cumsum([0, *sizes]).tolist(), width
        self._once = torch.ones(num_slots, dtype=torch.int64, device=device)  # a row's weight
        self._by_slot = torch.zeros(num_slots + 1, 2, dtype=torch.int64, device=device)  # verified, accepted
        self._counts_now, self._drafted, self._rests = True, max_num_draft, 0
        self._slots: dict[str, int] = {}
        self._over: list[AsyncCopy] = []  # copies for ended requests
        self._arriving: AsyncCopy | None = None
        self._moved = np.zeros(len(self._totals), np.int64)

    def begin(self, counts: bool) -> None:
        if counts != self._counts_now:
            self._counts_now = counts
            self._once.fill_(counts)

    def rests(self, input_batch: Any, length: int) -> bool:
        """Returns whether this step and the last one draft nothing, and this step verifies no draft of a request that
        the last step had no room for."""
        return not (length or self._drafted or input_batch.has_prefill or input_batch.num_draft_tokens)

    def note(self, length: int, num_rests: int) -> None:
        """Counts a step that drafts up to `length` tokens, and the requests that draft nothing in it."""
        self._drafted, self._rests = length, self._rests + num_rests

    def start(self, slots: dict[str, int]) -> None:
        """Clears the slots of requests that are new, or that resume after a preemption."""
        self._slots |= slots
        self._by_slot.index_fill_(0, async_tensor_h2d(np.array(list(slots.values())), self._by_slot.device), 0)

    def add(self, feedback: Feedback) -> None:
        """Does nothing, since the device counts."""

    def take(self, request_ids: Sequence[str]) -> list[float]:
        """Returns the acceptance rates of requests that ended before the last call, and starts a copy for requests that
        ended since."""
        pairs = np.concatenate([np.zeros((0, 2), np.int64), *(arriving.values() for arriving in self._over)])
        slots = [slot for request_id in request_ids if (slot := self._slots.pop(request_id, None)) is not None]
        self._over.clear()
        if slots:
            rows = async_tensor_h2d(np.array(slots), self._by_slot.device)
            self._over.append(AsyncCopy((), self._by_slot[rows]))
        return [accepted / verified for verified, accepted in pairs.tolist() if verified]

    def add_rows(self, rows: Rows, wanted: torch.Tensor, num_draft: torch.Tensor, staged: Staged | None = None) -> None:
        """Counts new drafts and the outcome of the last ones (kernels/steps)."""
        totals = Totals(self._totals, self._by_slot, self._once)
        tally(totals, rows, wanted, num_draft, self._width - 2, staged)

    def add_q(
        self,
        q_logits: torch.Tensor,  # [R, T, vocab_size]
        slots: torch.Tensor,  # [R], -1: padding
        is_drawn: torch.Tensor | None = None,  # [R, T] bool, tokens that count; None: all
    ) -> None:
        """Counts tokens drawn from logits that form no distribution."""
        is_broken = ~q_logits.amax(dim=-1).isfinite() & (slots >= 0)[:, None]
        if is_drawn is not None:
            is_broken &= is_drawn
        start = self._starts[4]
        self._totals[start : start + 1] += (is_broken.sum(dim=1) * self._once[: len(slots)]).sum()

    def move_to(self, counters: Counters, stages: Sequence[StageCounters]) -> None:
        """Adds the counts of the copy that the last call started, and starts the next copy."""
        if self._rests:
            counters.add_fates({(0, 0): self._rests})
            count(counters.draft_lengths, 0, self._rests)
        self._rests = 0
        arriving, self._arriving = self._arriving, AsyncCopy((), self._totals)
        if arriving is None:
            return
        totals = arriving.values()
        more, self._moved = totals - self._moved, totals.copy()
        fates, drafts, by_place, by_stage, broken = (
            more[start:end].reshape(shape)
            for start, end, shape in zip(self._starts, self._starts[1:], self._shapes, strict=False)
        )
        drafts[0, 0] += fates[1:].sum() - drafts.sum()  # rows within a prompt and padding rows do not count
        counters.add_fates(_histogram(fates[1:, 1:]))
        counters.add_drafts(int(drafts[1].sum()), {at: num for (at,), num in _histogram(drafts.sum(axis=0)).items()})
        if num_broken := int(broken[0]):
            counters.faults[NOT_FINITE] = counters.faults.get(NOT_FINITE, 0) + num_broken
        for stage, kinds, sums in zip(stages, by_place, by_stage, strict=False):
            stage.add(kinds, sums)


def _histogram(counts: Ints) -> dict[Any, int]:
    return {tuple(place): int(counts[tuple(place)]) for place in np.argwhere(counts).tolist()}
