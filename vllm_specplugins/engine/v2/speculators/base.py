"""Model Runner V2: what a speculator of ours is to the runner, and what one that runs the target's layers needs.

Nothing here waits for the device. Rows in the middle of their prompt are drafted for like all others: their tokens are
thrown away by the scheduler, and what they write to the KV cache lies in slots that are written again. Where the
attention backends can update their metadata in place, a whole draft is one CUDA graph.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager

from vllm_specplugins.config import EarlyExitConfig, stage_configs
from vllm_specplugins.draft import DraftBatch
from vllm_specplugins.engine.target.adapters import Adapters
from vllm_specplugins.engine.target.layers import FirstLayers
from vllm_specplugins.engine.target.metadata import updates_in_place
from vllm_specplugins.engine.v2.feedback.report import warms_up
from vllm_specplugins.engine.v2.speculators.built_in import DeviceOffer
from vllm_specplugins.engine.v2.speculators.graphs import graph_for
from vllm_specplugins.engine.v2.speculators.paged import PagedForward
from vllm_specplugins.engine.verify import draft_seeds
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.kernels.rejection import Sampling as Verified
from vllm_specplugins.target import Sampling, Target


class Speculator(DraftModelSpeculator):
    """To V2 a draft model without weights and without attention layers of its own.

    The inputs of a draft stand in buffers of max_num_reqs rows, where a recorded graph finds them; of one that reads
    tokens alone, only that of its tokens is there.
    """

    draft_attn_layer_names: set[str]
    draft_logits: torch.Tensor | None
    report: Any
    barrier: FaultBarrier  # set by runner.attach
    offer: DeviceOffer | None = None  # of a cascade's stage that is built into vLLM
    rejection_sampler: Callable[[], Any]  # the runner's, and what its sampler knows of requests; set by runner.attach
    sampling_states: Callable[[], Any]
    adapters_of: Callable[[Any, bool], Adapters] | None = None  # of a batch; set by runner.attach where there are any
    adapters: Adapters | None = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device)
        self._req_states, self.runs_target = req_states, vllm_config.speculative_config.runs_target
        self.attn_groups: list[Any] = []
        self._graphs: Any = None
        self._num_rows = self.max_num_reqs  # of the step before
        if self.runs_target:
            self._make_buffers(vllm_config.speculative_config)

    def _make_buffers(self, config: Any) -> None:
        rows, device = self.max_num_reqs, self.device
        self._rejection = config.plugin_config.common.rejection
        self.query_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._last_token_ids = torch.zeros(rows, dtype=torch.int32, device=device)
        self._num_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._last_hidden_states = torch.zeros(rows, self.hidden_size, dtype=self.dtype, device=device)
        self._temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self._seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.verified: Verified | None = None
        if config.draws_as_verified:
            limits = (torch.zeros(rows, dtype=torch.int32, device=device), *torch.zeros(2, rows, device=device))
            self.verified = Verified(self._temperature, torch.zeros_like(self._seeds), *limits)
        if self.draft_logits is not None:
            # A graph's padding rows are request -1: one row more takes what is drafted for them.
            shape, dtype = (rows + 1, *self.draft_logits.shape[1:]), self.draft_logits.dtype
            self.draft_logits = None  # there may not be room for both
            self._draft_logits = torch.zeros(shape, dtype=dtype, device=device)
            self.draft_logits = self._draft_logits[:rows]

    @property
    def _most_tokens(self) -> int:
        """Of a request; less than at first where vLLM fits it to the memory."""
        return self.vllm_config.model_config.max_model_len

    def load_model(self, target_model: nn.Module) -> None:
        if self.runs_target:
            super().load_model(target_model)
        else:
            self.model, self.draft_attn_layer_names = nn.Module(), set()

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        self.first_layers = FirstLayers(target_model, self.vllm_config.speculative_config.plugin_config)
        return nn.Module()

    def compile_exits(self, randomize_inputs: bool = False) -> None:
        """Behind vLLM's own compilation of the target, and with its signature; before graphs are recorded."""
        self.first_layers.compile(self.vllm_config.speculative_config.plugin_config)

    def _configure_decode_metadata_update(self) -> None:
        super()._configure_decode_metadata_update()
        self.supports_decode_metadata_update &= all(updates_in_place(group) for group in chain(*self.attn_groups))

    def set_attn(self, model_state: Any, kv_cache_config: Any, *rest: Any) -> None:
        """The metadata builders need the names of the target's layers; the runner must go on seeing none of ours."""
        if not self.runs_target:
            return
        none_of_our_own: set[str] = self.draft_attn_layer_names
        self.draft_attn_layer_names = {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names}
        super().set_attn(model_state, kv_cache_config, *rest)
        self.draft_attn_layer_names = none_of_our_own

    def _records(self, cudagraph_mode: CUDAGraphMode) -> bool:
        """Whether a draft is a graph; asked after `set_attn`."""
        if cudagraph_mode.decode_mode() != CUDAGraphMode.FULL or not self.runs_target:
            return cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        exits = stage_configs(self.vllm_config.speculative_config.plugin_config, EarlyExitConfig)
        full = not any(part.look_ahead for part in exits)  # a graph's metadata is that of one token a request
        full &= self.vllm_config.lora_config is None  # which rows run adapters the host says at each launch
        return full and self.supports_decode_metadata_update

    def _new_graphs(self) -> SpeculatorCudaGraphManager:
        """None recorded yet."""
        mode = CUDAGraphMode.FULL_DECODE_ONLY
        return SpeculatorCudaGraphManager(self.vllm_config, self.device, mode, decode_query_len=1)

    def _record(self, draft: Callable[..., None]) -> None:
        """One graph for each batch size."""
        self.idx_mapping.fill_(-1)
        self._graphs.capture(
            draft,
            self.model_state,
            self.input_buffers,
            self.block_tables,
            self.attn_groups,
            self.kv_cache_config,
            progress_bar_desc="Capturing drafting CUDA graphs",
        )

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,  # [num_reqs]
        num_rejected: torch.Tensor,  # [num_reqs]
        last_sampled: torch.Tensor,  # [max_num_reqs, 1]
        next_prefill_tokens: Any,
        temperature: torch.Tensor,  # [max_num_reqs]
        seeds: torch.Tensor,  # [max_num_reqs]
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Called by vLLM; returns [num_reqs, K] int64, padded with 0, which is a token that can be verified."""
        num_reqs = input_batch.num_reqs
        drafts = self.draft_tokens[:num_reqs]
        most = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        rehearses = dummy_run or warms_up(input_batch.req_ids)
        if not rehearses and self._rests(input_batch, most):
            return drafts
        if self.runs_target:
            self._copy_request_inputs(num_reqs, input_batch.idx_mapping, temperature, seeds, dummy_run)
            if self.adapters_of is not None:
                self.adapters = self.adapters_of(input_batch, rehearses)
        if rehearses:
            self._rehearse(input_batch, is_profile, skip_attn_for_dummy_run)
            return drafts
        if self.runs_target:
            self._take_inputs(input_batch, last_hidden_states, num_rejected, last_sampled, temperature, seeds)
        self._draft_step(input_batch, num_sampled, num_rejected, most)
        return drafts

    def plan_for(self, seq_lens: torch.Tensor) -> None:
        """Says what attention plans for, where a draft is not a graph: these lengths, on the host, and a draft."""
        self.draft_max_seq_len = min(int(seq_lens.max()) + self.num_speculative_steps, self._most_tokens)

    def _copy_request_inputs(
        self, num_reqs: int, idx_mapping: torch.Tensor, temperature: Any, seeds: Any, dummy_run: bool = False
    ) -> None:
        """vLLM's, less what only its own drafts read: temperatures and seeds of all requests."""
        rows = 0 if dummy_run else num_reqs
        self.idx_mapping[:rows].copy_(idx_mapping[:rows])
        if rows < self._num_rows:  # after the rows of the step before all is padding
            self.idx_mapping[rows:].fill_(-1)
            self._num_tokens[rows:].zero_()
        self._num_rows = rows

    def _take_inputs(
        self,
        input_batch: Any,
        last_hidden_states: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
    ) -> None:
        """Copies what drafting begins with to where a graph finds it."""
        num_reqs = input_batch.num_reqs
        requests = self.idx_mapping[:num_reqs]
        last_rows = input_batch.query_start_loc[1 : num_reqs + 1] - 1 - num_rejected[:num_reqs]
        torch.sub(input_batch.seq_lens[:num_reqs], num_rejected[:num_reqs], out=self._num_tokens[:num_reqs])
        self._num_tokens[:num_reqs].add_(1)
        self._last_token_ids[:num_reqs].copy_(last_sampled.view(-1)[requests])
        torch.index_select(last_hidden_states, 0, last_rows, out=self._last_hidden_states[:num_reqs])
        torch.index_select(temperature, 0, requests, out=self._temperature[:num_reqs])
        if self.draft_logits is not None:  # drafts have noise of their own
            self._seeds[:num_reqs].copy_(draft_seeds(seeds[requests], self._num_tokens[:num_reqs], self._rejection))
        if self.verified is not None:
            states = self.sampling_states()
            for name in ("seeds", "top_k", "top_p", "min_p"):
                out = getattr(self.verified, name)[:num_reqs]
                torch.index_select(getattr(states, name).gpu, 0, requests, out=out)

    def _replays(self, num_reqs: int) -> bool:
        """Drafts by one graph, if one has this batch size."""
        if self._graphs is None or (graph := graph_for(self._graphs, num_reqs)) is None:
            return False
        for group in chain(*self.attn_groups):
            group.map_to_kernel_block_table(self.block_tables.input_block_tables[group.kv_cache_group_id])
        self._graphs.run_fullgraph(graph)
        return True

    def _edit_of(self, input_batch: Any) -> Any:
        """`draft.Target.edit`: rare, so that graphs do without and a step that needs it is drafted for eagerly."""
        sampler = self.rejection_sampler()
        if not hasattr(sampler, "editor") or sampler.was_plain(input_batch):  # vLLM's own has none
            return None
        return sampler.editor.edit_of_drafts(self.idx_mapping[: input_batch.num_reqs], input_batch.idx_mapping_np)

    def _batch_of(self, input_batch: Any, edit: Any = None, attends: bool = True) -> DraftBatch:
        """A step's, outside of graphs."""
        num_reqs, lengths = input_batch.num_reqs, input_batch.seq_lens_cpu_upper_bound
        forward = None
        if self.runs_target:
            forward = PagedForward(self, num_reqs, num_reqs, seq_lens_cpu=lengths, attends=attends)
        return self._batch(input_batch.req_ids, forward, edit)

    def _batch(self, request_ids: list[str], forward: Any, edit: Any = None) -> DraftBatch:
        rows = slice(len(request_ids))
        target = None
        if self.runs_target:
            target = Target(
                forward=forward,
                last_token_ids=self._last_token_ids[rows],
                num_tokens=self._num_tokens[rows],
                last_hidden_states=self._last_hidden_states[rows],
                sampling=Sampling(
                    self._temperature[rows],
                    self._seeds[rows],
                    None if self.verified is None else self.verified.at(rows),
                ),
                edit=edit,
            )
        max_num_draft = np.full(len(request_ids), self.num_speculative_steps, np.int32)
        return DraftBatch(request_ids, (), max_num_draft, [{}] * len(request_ids), target)
