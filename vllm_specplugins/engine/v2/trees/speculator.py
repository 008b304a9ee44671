"""Model Runner V2: drafts trees with a model proposer; a tree may contain a lookup's chain. The scheduler plans a whole
tree, a chain, or no draft. The acceptance probabilities of a lookup come from a comparison of its chain with the
emitted tokens, for any accepted path of the tree. R: rows, K: nodes of a tree."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig

from vllm_specplugins.cascade.on_device import LOOKUP, MODEL, DeviceBatch, DeviceSource
from vllm_specplugins.engine import trees
from vllm_specplugins.engine.v2.requests import Request
from vllm_specplugins.engine.v2.speculators.device import DeviceSpeculator
from vllm_specplugins.engine.v2.trees.state import Trees
from vllm_specplugins.gate.step_times import lengths_up_to
from vllm_specplugins.proposers.tree import draft_tree
from vllm_specplugins.structures.drafts import DraftArrays, of_stage
from vllm_specplugins.target import Target

trees.register()  # the worker imports this before it builds layers


class TreeSpeculator(DeviceSpeculator):
    """Drafts trees. It is also a source of trees, and of a model's chains in shorter steps."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device, req_states)
        max_num_draft, chain = self.num_speculative_steps, vllm_config.speculative_config.plugin_config.longest_chain
        self._steps_alone, self._step_counts = False, lengths_up_to(max_num_draft, chain)
        self.trees = Trees(vllm_config, max_num_draft, device)
        self.verify_drafts = self.trees.verify
        self._texts: Any = self.lookups.texts
        # By slot, with one more for padding rows: the chain for learning, and the length of the text before it.
        self._learned = torch.zeros(self.max_num_reqs + 1, max_num_draft + 1, dtype=torch.int32, device=device)

    def attach(self, runner: Any) -> None:
        super().attach(runner)
        is_async = runner.vllm_config.scheduler_config.async_scheduling
        self.report.trims = lambda: is_async and not self.is_off
        self.trees.attach(runner)

    def stop(self) -> None:
        super().stop()
        self.trees.is_off = True

    def _model_source(self, proposer: Any) -> DeviceSource:
        self._proposer, self._chains = proposer, super()._model_source(proposer)
        return self

    def release(self) -> None:
        self.trees.release()

    def add(self, requests: Sequence[Request]) -> None:
        super().add(requests)
        self.trees.add([request.slot for request in requests], [self._may_branch(request) for request in requests])

    def _may_branch(self, request: Request) -> bool:
        params, editor = request.sampling_params, self.runner.rejection_sampler.editor
        asks = params.logprobs, params.logprob_token_ids, params.structured_outputs
        return all(value is None for value in asks) and not editor.edits_any(np.array([request.slot]))

    @property
    def _rates(self) -> bool:
        return bool(self.lookups)

    def _draft_on_device(self, target: Target | None, num_steps: int, longest: int | None = None) -> bool:
        if self._rates:
            self.outcomes.fates = self._fates(len(self._wanted.slots))
        return super()._draft_on_device(target, num_steps, longest)

    def _fates(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the fates of the last chains (see DraftTracker); a chain of an earlier step counts as not tried."""
        slots, num_sampled = self.outcomes.rows(num_rows)
        texts, learned = self._texts.histories, self._learned[slots]
        places = (texts.lengths[slots] - num_sampled)[:, None] + self._steps
        emitted = texts.token_ids[slots[:, None], places.clamp(max=texts.token_ids.shape[1] - 1)]
        is_right = (emitted == learned[:, :-1]) & (self._steps < num_sampled[:, None])
        num_right = is_right.int().cumprod(dim=1).sum(dim=1, dtype=torch.int32)
        is_newest = (places[:, 0] == learned[:, -1]) & (num_sampled > 0)
        return (num_right + 1) * is_newest, (num_right < num_sampled).int() * is_newest

    def draft(self, batch: DeviceBatch, prefix: DraftArrays | None, limits: torch.Tensor) -> DraftArrays:
        """Drafts a tree that contains the prefix if there are enough steps, otherwise a chain."""
        rows = self.idx_mapping[: len(batch.slots)]
        if batch.num_steps < self.num_speculative_steps:
            self.trees.put(rows, self.trees.chain)
            drafts = self._chains.draft(batch, prefix, limits)
            learned, self.outcomes.learned = drafts, None
        elif prefix is None:
            return self._grown(batch, rows)
        else:
            is_asked, longest = limits > 0, self.limits.of_stages[MODEL]
            self.outcomes.note_worth(prefix)
            # A request that does not allow the model gets the lookup's chain.
            survival = self.outcomes.survivals(prefix).log().float().masked_fill(~is_asked[:, None], 0.0)
            drafts = self._grown(batch, rows, is_asked, prefix, survival)
            drafts = drafts._replace(by_stage=(prefix.num_draft, torch.where(is_asked, longest, -1)))
            learned = self.outcomes.learned = prefix
        if prefix is not None:
            lengths = self._texts.histories.lengths[batch.slots, None]
            self._learned[self.trees.table_rows(rows)] = torch.cat((learned.token_ids, lengths), dim=1)
        return drafts

    def _grown(
        self, batch: DeviceBatch, rows: torch.Tensor, may_branch: Any = True, prefix: Any = None, survival: Any = None
    ) -> DraftArrays:
        assert batch.target is not None
        other = None if prefix is None else (prefix.token_ids, survival)
        may_branch = self.trees.branches(rows) & may_branch
        tree = draft_tree(self._proposer, batch.target, self.num_speculative_steps, may_branch, other)
        self.trees.put(rows, tree.parents)
        num_draft = self._wanted.num_tokens
        drafts = of_stage(self._model_stage, tree.token_ids, num_draft, num_draft * 0.0 + 1)
        return drafts._replace(stage=drafts.stage.masked_fill(tree.is_other, LOOKUP), logits=tree.logits)

    def _last_rows(self, input_batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> torch.Tensor:
        return self.trees.last_rows(input_batch, num_sampled, num_rejected)
