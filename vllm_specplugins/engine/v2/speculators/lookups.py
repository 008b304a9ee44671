"""Model Runner V2: what a draft that copies is found in, on the device: a request's own text and reference, and what a
proposer on the host sends."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.config import VllmConfig

from vllm_specplugins.cascade.on_device import LOOKUP
from vllm_specplugins.config import PromptLookupConfig, SpecConfig, StageConfig, stage_configs
from vllm_specplugins.draft import ProposerContext
from vllm_specplugins.engine.v2.requests import Request
from vllm_specplugins.engine.v2.speculators.late import LateDrafts, late_length
from vllm_specplugins.engine.v2.speculators.token_histories import TokenHistories
from vllm_specplugins.methods import build_proposer, method_of
from vllm_specplugins.structures.arrays import DraftArrays, either, of_stage


class Lookups:
    """See the module. What the proposer sends goes first: it has looked where the device cannot.

    Args:
        req_states: vLLM's states of requests.
    """

    def __init__(self, vllm_config: VllmConfig, req_states: Any, device: torch.device):
        config, self.texts, self.late = vllm_config.speculative_config, None, None
        lookups = stage_configs(config.plugin_config, PromptLookupConfig)
        row = method_of(config.plugin_config.parts[0].method)
        if lookups or (row.is_lookup and row.is_late):
            own = lookups[0] if lookups else PromptLookupConfig()
            self.texts = TokenHistories(req_states, config.num_speculative_tokens, own, device)
        if config.plan.is_late:
            vocab_size = vllm_config.model_config.get_vocab_size()
            self.late = LateDrafts(req_states, config.num_speculative_tokens, vocab_size, device)
        self._parts = [part for part in (self.texts, self.late) if part is not None]

    def __bool__(self) -> bool:
        return bool(self._parts)

    def new_proposer(self, config: SpecConfig | StageConfig, context: ProposerContext) -> Any:
        """What the barrier shall hold, or a stage."""
        if self.late is None:
            return self.texts
        proposer: Any = build_proposer(config, replace(context, max_num_draft=late_length(context.max_num_draft)))
        if self.texts is not None:
            proposer.searches_requests = False
        return proposer

    def add(self, requests: Sequence[Request]) -> None:
        """Takes requests."""
        for part in self._parts:
            part.add(requests)

    def remove(self, request_ids: set[str]) -> None:
        """Drops requests that finished, were aborted or were preempted."""
        for part in self._parts:
            part.remove(request_ids)

    def found(self, slots: torch.Tensor, max_draft: torch.Tensor, longest: int | None) -> DraftArrays:
        """The drafts of rows, [R] both; see TokenHistories.match for `longest`."""
        matches = [] if self.late is None else [self.late.match(slots, max_draft)]
        if self.texts is not None:
            matches.append(self.texts.match(slots, max_draft, longest))
        first, *others = (of_stage(LOOKUP, found.token_ids, found.num_draft, found.match_length) for found in matches)
        return either(first.num_draft > 0, first, others[0]) if others else first
