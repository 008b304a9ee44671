"""Model Runner V2: implements the first source on the device. Its drafts are copies from requests' texts and
references, late drafts of a proposer on the host, or drafts of another package's proposer on the device."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.config import VllmConfig

from vllm_specplugins.cascade.on_device import LOOKUP, DeviceBatch
from vllm_specplugins.config import PromptLookupConfig, SpecConfig, StageConfig, stage_configs
from vllm_specplugins.draft import ProposerContext
from vllm_specplugins.engine.v2.requests import Request
from vllm_specplugins.engine.v2.speculators.custom import CustomDrafts
from vllm_specplugins.engine.v2.speculators.late import LateDrafts, late_length
from vllm_specplugins.engine.v2.speculators.token_histories import TokenHistories
from vllm_specplugins.methods import build_proposer, is_custom_on_device, method_of
from vllm_specplugins.structures.drafts import DraftArrays, join, of_stage, to_beat


class Lookups:
    """Prefers the drafts of a proposer on the host. A lookup on the host also searches texts that the device does not
    have; its drafts are preferred only if their match is longer (`to_beat`)."""

    def __init__(self, vllm_config: VllmConfig, req_states: Any, device: torch.device):
        config, self.texts, self.late = vllm_config.speculative_config, None, None
        lookups = stage_configs(config.plugin_config, PromptLookupConfig)
        row = method_of(config.plugin_config.parts[0].method)
        self._compares = row.is_lookup
        if lookups or (row.is_lookup and row.is_late):
            lookup = lookups[0] if lookups else PromptLookupConfig()
            self.texts = TokenHistories(req_states, config.num_speculative_tokens, lookup, device)
        if config.plan.is_late:
            vocab_size = vllm_config.model_config.get_vocab_size()
            self.late = LateDrafts(req_states, config.num_speculative_tokens, vocab_size, device)
        self.custom = None
        if is_custom_on_device(config.plugin_config):
            vocab_size = vllm_config.model_config.get_vocab_size()
            self.custom = CustomDrafts(req_states, config.num_speculative_tokens, vocab_size)
        self._parts = [part for part in (self.late, self.texts, self.custom) if part is not None]

    def __bool__(self) -> bool:
        return bool(self._parts)

    def new_proposer(self, config: SpecConfig | StageConfig, context: ProposerContext) -> Any:
        if self.custom is not None:
            self.custom.proposer, self.custom.num_ranks = build_proposer(config, context), context.num_ranks
            return self.custom.proposer
        if self.late is None:
            return self.texts
        proposer: Any = build_proposer(config, replace(context, max_num_draft=late_length(context.max_num_draft)))
        if self.texts is not None:
            proposer.searches_requests = False
        return proposer

    def add(self, requests: Sequence[Request]) -> None:
        for part in self._parts:
            part.add(requests)

    def remove(self, request_ids: set[str]) -> None:
        for part in self._parts:
            part.remove(request_ids)

    def draft(self, batch: DeviceBatch, prefix: DraftArrays | None, limits: torch.Tensor) -> DraftArrays:
        """Drafts as the first source, without a prefix."""
        match, *others = (part.match(batch.slots, limits, batch.longest) for part in self._parts)
        if others:
            is_first = match[2] > (to_beat(*others[0][1:]) if self._compares else 0)
            pairs = zip((is_first[:, None], is_first, is_first), match, others[0], strict=True)
            return of_stage(LOOKUP, *(torch.where(*pair) for pair in pairs))
        return of_stage(LOOKUP, *match)

    def continued(self, batch: DeviceBatch, drafts: DraftArrays) -> DraftArrays:
        """Returns drafts of another stage, followed by tokens from the requests' texts."""
        if self.texts is None:
            return drafts
        limits = (batch.max_lookup - drafts.num_draft).clamp(min=0)
        return join(drafts, of_stage(LOOKUP, *self.texts.match(batch.slots, limits, batch.longest, drafts)))
