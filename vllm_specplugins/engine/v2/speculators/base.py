"""Model Runner V2: the base class of the plugin's speculators, with the buffers for running the target's layers. No
code here waits for the device. Rows within their prompt also draft; the scheduler drops their tokens, and later steps
overwrite their slots of the KV cache."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_specplugins.config import EarlyExitConfig
from vllm_specplugins.draft import DraftBatch
from vllm_specplugins.engine.messages import DraftLengths
from vllm_specplugins.engine.session import Session
from vllm_specplugins.engine.target.layers import Adapters, FirstLayers, adapters_of, updates_in_place
from vllm_specplugins.engine.v2.feedback.report import DraftReport, SampledTokens
from vllm_specplugins.engine.v2.requests import Request
from vllm_specplugins.engine.v2.speculators.paged import PagedForward
from vllm_specplugins.engine.verify import DRAFT_NOISE, verifies
from vllm_specplugins.kernels.rejection import Sampling as Verified
from vllm_specplugins.kernels.steps import newest
from vllm_specplugins.methods import drafters
from vllm_specplugins.target import Sampling, Target


class Watcher(Protocol):
    """Follows requests, the states that each step reads, and the tokens that it samples."""

    def add(self, requests: list[Request]) -> None: ...
    def remove(self, request_ids: set[str]) -> None: ...
    def on_step(self, input_batch: Any, hidden_states: torch.Tensor, last_rows: torch.Tensor) -> None: ...
    def note(self, sampled: SampledTokens) -> None: ...


class Speculator(DraftModelSpeculator):
    """A draft model without weights and attention layers, from V2's view. `idx_mapping` holds the slots of the rows.
    Drafting reads vLLM's request states from buffers that a graph can read. Sampling parameters are copied once per
    request, since vLLM moves its copies."""

    draft_attn_layer_names: set[str]
    draft_logits: torch.Tensor | None
    report: DraftReport
    session: Session  # set by runner.attach
    runner: Any  # set by `attach`
    reads_tokens = True  # whether the host tracks the tokens of requests
    adapters: Adapters | None = None
    verified: Verified | None = None  # sampling parameters of all slots
    is_off = False  # whether a kernel failed its check, which ends drafting
    num_off: int = 0  # number of steps in a row with drafting switched off; the first one counts the last drafts
    late: Any = None  # drafts of a thread (late.py)
    watchers: list[Watcher]  # objects that watch requests and what steps read
    _last_hidden_states: torch.Tensor | None = None  # by rows; exits begin with only the newest token

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device)
        self.report, self.watchers = DraftReport(), []
        self._req_states, self.runs_target = req_states, vllm_config.speculative_config.runs_target
        self.attn_groups: list[Any] = []
        if self.runs_target:
            self._make_buffers(vllm_config.speculative_config)

    def _make_buffers(self, config: Any) -> None:
        rows, device = self.max_num_reqs, self.device
        self.query_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        kinds = {type(method_config) for row, method_config in drafters(config.plugin_config) if row.runs_target}
        if kinds != {EarlyExitConfig}:
            self._last_hidden_states = torch.zeros(rows, self.hidden_size, dtype=self.dtype, device=device)
        if config.draws and verifies():  # with all sampling parameters
            limits = (torch.zeros(rows, dtype=torch.int32, device=device), *torch.zeros(2, rows, device=device))
            self.verified = Verified(self.temperature, self.seeds, *limits)
        if self.draft_logits is not None:
            # One additional row receives the drafts of padding rows.
            shape, dtype = (rows + 1, *self.draft_logits.shape[1:]), self.draft_logits.dtype
            self.draft_logits = None  # memory may not suffice for both
            self._draft_logits = torch.zeros(shape, dtype=dtype, device=device)
            self.draft_logits = self._draft_logits[:rows]

    def attach(self, runner: Any) -> None:
        """Connects to a runner that has loaded nothing yet, when the session exists."""
        self.runner = runner

    def stop(self) -> None:
        """Ends drafting. A planned token is then 0, with a one-hot q."""
        self.is_off = self.session.barrier.counters.switched_off = True
        self.enable_adaptive_verification = self.vllm_config.speculative_config.enable_adaptive_verification = False
        if self.draft_logits is not None:
            self.draft_logits.fill_(-torch.inf)
            self.draft_logits[..., 0] = 0.0

    def load_model(self, target_model: nn.Module) -> None:
        if self.runs_target:
            super().load_model(target_model)
        else:
            self.model, self.draft_attn_layer_names = nn.Module(), set()

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        self.first_layers = FirstLayers(target_model, self.vllm_config.speculative_config.plugin_config)
        return nn.Module()

    def _configure_decode_metadata_update(self) -> None:
        super()._configure_decode_metadata_update()
        self.supports_decode_metadata_update &= all(updates_in_place(group) for group in chain(*self.attn_groups))

    def set_attn(self, model_state: Any, kv_cache_config: Any, *rest: Any) -> None:
        """Builds metadata for the target's layers and hides them, since the runner must find no layers of the
        speculator."""
        if not self.runs_target:
            return
        no_layers: set[str] = self.draft_attn_layer_names
        self.draft_attn_layer_names = {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names}
        super().set_attn(model_state, kv_cache_config, *rest)
        self.draft_attn_layer_names = no_layers

    def add(self, requests: Sequence[Request]) -> None:
        if not self.runs_target:
            return
        slots = np.array([request.slot for request in requests])
        rows, states = async_tensor_h2d(slots, self.device), self.runner.sampler.sampling_states
        tables: dict[str, Any] = {"temperature": self.temperature, "seeds": self.seeds}
        if self.verified is not None:
            tables |= {name: getattr(self.verified, name) for name in ("top_k", "top_p", "min_p")}
        for name, table in tables.items():
            table[rows] = async_tensor_h2d(getattr(states, name).np[slots], self.device)

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,  # [num_reqs]
        num_rejected: torch.Tensor,  # [num_reqs]
        *states: Any,  # vLLM's states of requests, which are not used
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Returns drafts [num_reqs, K] int64, padded with 0, which is a valid token."""
        num_reqs = input_batch.num_reqs
        if self.is_off:
            self.report.tell(DraftLengths(input_batch.req_ids, [0] * num_reqs))
            return self.draft_tokens[:num_reqs].zero_()  # vLLM 0.33 writes -1 into it
        rehearses = dummy_run or self.session.is_warming_up
        if self.runs_target and self.runner.lora_config is not None:
            self.adapters = adapters_of(self.runner, input_batch, rehearses)
        if rehearses:
            self._rehearse(input_batch, is_profile, skip_attn_for_dummy_run)
            return self.draft_tokens[:num_reqs]
        if self._last_hidden_states is not None or self.watchers:
            last_rows = self._last_rows(input_batch, num_sampled, num_rejected)
        if self._last_hidden_states is not None:
            torch.index_select(last_hidden_states, 0, last_rows, out=self._last_hidden_states[:num_reqs])
        for watcher in self.watchers:
            watcher.on_step(input_batch, last_hidden_states, last_rows)
        length = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        self._draft_step(input_batch, num_sampled, num_rejected, length)
        return self.draft_tokens[:num_reqs]

    def _last_rows(self, input_batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> torch.Tensor:
        """Returns the rows of the states from which the newest tokens were sampled, [num_reqs]."""
        num_reqs = input_batch.num_reqs
        return input_batch.query_start_loc[1 : num_reqs + 1] - 1 - num_rejected[:num_reqs]

    def plan_for(self, seq_lens: torch.Tensor) -> None:
        """Sets the longest context for which attention plans, on the host: these lengths plus a draft. Graphs do not
        use it."""
        max_model_len = self.vllm_config.model_config.max_model_len  # vLLM may have reduced it to fit the memory
        self.draft_max_seq_len = min(int(seq_lens.max()) + self.num_speculative_steps, max_model_len)

    def _edit_of(self, input_batch: Any) -> Any:
        """Returns `draft.Target.edit`. A step that needs it drafts without a graph, since it is rare."""
        sampler = self.runner.rejection_sampler
        if not hasattr(sampler, "editor") or sampler.was_plain(input_batch):  # vLLM's sampler has no editor
            return None
        return sampler.editor.edit_of_drafts(input_batch.idx_mapping.long(), input_batch.idx_mapping_np)

    def _batch_of(self, input_batch: Any, edit: Any = None, attends: bool = True) -> DraftBatch:
        num_reqs, forward = input_batch.num_reqs, None
        if self.runs_target:
            forward = PagedForward(
                self, num_reqs, num_reqs, seq_lens_cpu=input_batch.seq_lens_cpu_upper_bound, attends=attends
            )
        target = self._target(num_reqs, forward, edit) if self.runs_target else None
        max_num_draft = np.full(num_reqs, self.num_speculative_steps, np.int32)
        return DraftBatch(input_batch.req_ids, (), max_num_draft, [{}] * num_reqs, target)

    def _target(self, num_rows: int, forward: Any, edit: Any) -> Target:
        """Returns the target for these rows, from the states of requests; padding rows have no request's token."""
        req_states, verified = self._req_states, self.verified
        limits = () if verified is None else (verified.top_k, verified.top_p, verified.min_p)
        last_token_ids, num_tokens, temperature, seeds, *limits = newest(
            self.idx_mapping[:num_rows],
            req_states.num_computed_tokens.gpu,
            req_states.last_sampled_tokens.view(-1),
            (self.temperature, self.seeds, *limits),
        )
        if verified is not None:
            verified = Verified(temperature, seeds, *limits)
        if self.draft_logits is not None:
            seeds = seeds + DRAFT_NOISE
        last_hidden_states = None if self._last_hidden_states is None else self._last_hidden_states[:num_rows]
        sampling = Sampling(temperature, seeds, verified)
        return Target(forward, last_token_ids, num_tokens, last_hidden_states, sampling, edit)
