"""Model Runner V2: searches token histories for prompt lookup on the device. With `use_dense_all_token_ids` vLLM stores
all tokens of requests there: max_num_seqs x max_model_len x 4 bytes. A request's reference is copied once, when the
request is added."""

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_specplugins.config import PromptLookupConfig
from vllm_specplugins.engine.v2.requests import Request
from vllm_specplugins.kernels.history_match import NO_MATCH, Match, References, Texts, history_match
from vllm_specplugins.request_options import REFERENCE
from vllm_specplugins.stage import Series, StageProposer
from vllm_specplugins.structures.drafts import DraftArrays, columns

_ALIGNED = 16  # tokens; a reference begins at a multiple


class SpanAllocator:
    """Allocates spans of `size` places, all of which are free at first. It chooses the first free span that is large
    enough.

    >>> spans = SpanAllocator(10)
    >>> spans.take(4), spans.take(4), spans.take(4)
    (0, 4, None)
    >>> spans.give_back(0, 4); spans.take(3)
    0
    """

    def __init__(self, size: int):
        self._free = [(0, size)]  # (start, end), in order, none adjacent to another

    @property
    def num_free(self) -> int:
        return sum(end - start for start, end in self._free)

    def take(self, size: int) -> int | None:
        """Allocates a free span of this size and returns its start, or None if there is none."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[index : index + 1] = [(start + size, end)] if end - start > size else []
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        insort(self._free, (start, start + size))
        joined: list[tuple[int, int]] = []
        for begin, end in self._free:
            if joined and joined[-1][1] == begin:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((begin, end))
        self._free = joined


class TokenHistories(StageProposer):
    """The histories and references of all slots."""

    def __init__(self, req_states: Any, max_num_draft: int, config: PromptLookupConfig, device: torch.device):
        self._req_states, self._max_num_draft, self._config = req_states, max_num_draft, config
        num_slots, self._max_model_len = req_states.max_num_reqs, req_states.max_model_len
        distances = torch.full((num_slots, 2), NO_MATCH, dtype=torch.int32, device=device)
        self.histories = Texts(req_states.all_token_ids.gpu, req_states.total_len.gpu, distances)
        room = min(config.max_index_bytes // 4, num_slots * (self._max_model_len + _ALIGNED))
        # The tokens of all references; each request has a span of them.
        self.references = torch.zeros(room // _ALIGNED * _ALIGNED, dtype=torch.int32, device=device)
        self._spans = SpanAllocator(len(self.references))
        self._taken: dict[str, tuple[int, int]] = {}  # start and size of each request's span
        # By slot. Graphs read them, since vLLM's buffers would change places.
        starts, sizes = (torch.zeros(num_slots, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32))
        self._by_slot = References(self.references, starts, sizes)

    def num_bytes(self) -> int:
        return 4 * (len(self.references) - self._spans.num_free)

    def series(self) -> Iterator[Series]:
        yield "store_bytes", (), self.num_bytes()

    def add(self, requests: Sequence[Request]) -> None:
        self.remove(request.request_id for request in requests)
        rows = [(request.slot, *self._entered(request)) for request in requests]
        slots, starts, sizes = async_tensor_h2d(np.array(rows, np.int64), self.references.device).T
        self._by_slot.starts[slots], self._by_slot.lengths[slots] = starts, sizes.int()
        self.histories.distances.index_fill_(0, slots, NO_MATCH)

    def remove(self, request_ids: Iterable[str]) -> None:
        """Drops finished, aborted and preempted requests. Running steps may still read their slots."""
        for request_id in request_ids:
            if request_id in self._taken:
                self._spans.give_back(*self._taken.pop(request_id))

    def match(
        self, slots: torch.Tensor, limits: torch.Tensor, longest: int | None, prefix: DraftArrays | None = None
    ) -> Match:
        """Returns the match of each row, after the tokens of a prefix. `longest` is an upper bound of a text's length;
        None while a graph is recorded, which must handle any text."""
        texts = self.histories if prefix is None else self._followed(slots, prefix)
        if longest is not None:
            longest += 0 if prefix is None else prefix.token_ids.shape[1]
            longest = max(longest, *(size for _, size in self._taken.values()), 1)
        ngrams = self._config.min_ngram, self._config.max_ngram
        return history_match(texts, slots, limits, self._max_num_draft, *ngrams, self._by_slot, longest)

    def _followed(self, slots: torch.Tensor, prefix: DraftArrays) -> Texts:
        """Returns the texts with a prefix after their ends, where vLLM writes the next tokens; a draft leaves room for
        one more token. The copy positions do not change."""
        token_ids, lengths, distances = self.histories
        rows, last = slots[:, None], token_ids.shape[1] - 1
        places = torch.where(prefix.is_drafted, lengths[rows] + columns(prefix.token_ids), last)
        token_ids[rows, places] = torch.where(prefix.is_drafted, prefix.token_ids, token_ids[rows, places])
        return Texts(token_ids, lengths.index_add(0, slots, prefix.num_draft.int()), distances.clone())

    def _entered(self, request: Request) -> tuple[int, int]:
        """Returns the start and the length of a request's reference; the length is 0 without a reference or without
        room."""
        text = np.array(request.limits.options.get(REFERENCE, ()), np.int32)[: self._max_model_len]
        size = -(-len(text) // _ALIGNED) * _ALIGNED
        start = self._spans.take(size) if size else None
        if start is None:
            return 0, 0
        async_tensor_h2d(text, out=self.references[start : start + len(text)])
        self._taken[request.request_id] = start, size
        return start, len(text)
