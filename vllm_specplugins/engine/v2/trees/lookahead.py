"""Model Runner V2: runs lookahead decoding, alone or in the nodes of a tree that a lookup does not use. R: rows, K:
nodes of a tree without its root."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_specplugins.cascade.on_device import LOOKUP, DeviceBatch
from vllm_specplugins.engine.hooks import wrap
from vllm_specplugins.engine.v2.requests import Request
from vllm_specplugins.engine.v2.trees.speculator import TreeSpeculator
from vllm_specplugins.proposers.lookahead import num_copied
from vllm_specplugins.structures.drafts import DraftArrays, of_stage


class LookaheadSpeculator(TreeSpeculator):
    """Drafts trees with windows. A row that wants fewer tokens than a tree, or may not have one, gets the lookup's
    chain or the newest guess."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device, req_states)
        self._step_counts, self.reads_tokens = (0,), True  # runs no layers; requests begin with their prompt's n-grams
        # By slot, with one more for padding rows: the number of nodes before the window in the newest tree.
        self._begin_of_window = torch.full((self.max_num_reqs + 1,), self.num_speculative_steps, device=device)
        wrap(self.trees, "follow", self._follow)

    def add(self, requests: Sequence[Request]) -> None:
        super().add(requests)
        for request in requests:
            self._proposer.start(request.slot, async_tensor_h2d(request.token_ids.astype(np.int64), self.device))

    def _draft_on_device(self, target: Any, num_steps: int, longest: int | None = None) -> bool:
        return super()._draft_on_device(target, self.num_speculative_steps, longest)

    def _grown(
        self, batch: DeviceBatch, rows: torch.Tensor, may_branch: Any = True, prefix: Any = None, *_: Any
    ) -> DraftArrays:
        proposer, wanted, slots = self._proposer, self._wanted.num_tokens, self.trees.table_rows(rows)
        if prefix is not None:
            prefix = prefix.cut(num_copied(prefix.num_draft, prefix.confidence[:, 0]))
        newest = self._extend(slots, len(rows))
        tree, begin = proposer.tree(slots, newest, None if prefix is None else (prefix.token_ids, prefix.num_draft))
        is_tree = self.trees.branches(rows) & may_branch & (wanted >= self.num_speculative_steps)
        token_ids, length = torch.zeros_like(tree.token_ids), proposer.ngram - 1
        token_ids[:, :length], has_guess = proposer.newest_guess(slots, newest)
        num_draft = has_guess * length
        if prefix is not None:
            copies = prefix.num_draft > 0
            token_ids = torch.where(copies[:, None], prefix.token_ids, token_ids)
            num_draft = torch.where(copies, prefix.num_draft, num_draft * may_branch)
        num_draft = torch.where(is_tree, self.num_speculative_steps, num_draft.minimum(wanted)).to(wanted.dtype)
        token_ids = torch.where(is_tree[:, None], tree.token_ids, token_ids).int()
        self.trees.put(rows, torch.where(is_tree[:, None], tree.parents, self.trees.chain))
        self._begin_of_window[slots] = torch.where(is_tree, begin, self.num_speculative_steps)
        drafts = of_stage(self._model_stage, token_ids, num_draft, num_draft * 0.0 + 1)
        if prefix is None:
            return drafts
        return drafts._replace(stage=drafts.stage.masked_fill(tree.is_other, LOOKUP))

    def _extend(self, slots: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Adds n-grams of the newest tokens to the pools, and returns each row's newest token, [R] int64."""
        there, num_new = self.outcomes.rows(num_rows)
        lengths = self._req_states.total_len.gpu[there].long()
        places = lengths[:, None] + torch.arange(1 - 2 * self._proposer.ngram, 0, device=slots.device)
        newest = self._req_states.all_token_ids.gpu[there[:, None], places.clamp(min=0)].long()
        self._proposer.extend(slots, newest, lengths, num_new)
        return newest[:, -1]

    def _follow(self, follow: Any, slots: torch.Tensor, tokens: torch.Tensor, drawn: torch.Tensor) -> Any:
        """Reads the tokens after the window's last level. No accepted path enters the window."""
        num_window, width = self._proposer.num_window, self._proposer.width
        begin, nodes = self._begin_of_window[slots, None], torch.arange(tokens.shape[1], device=tokens.device)
        end = (begin + num_window).clamp(max=tokens.shape[1] - 1)
        is_read = (begin < self.num_speculative_steps) & (tokens.gather(1, end) >= 0)
        last = drawn.gather(1, end - width + 1 + torch.arange(width, device=tokens.device))
        self._proposer.read(slots, last, is_read[:, 0])
        return follow(slots, tokens.masked_fill((nodes > begin) & (nodes <= begin + num_window), -1), drawn)
