"""Model Runner V2: a speculator for model proposers.

Nothing here waits for the device. Rows in the middle of their prompt are drafted for like all others: their
tokens are thrown away by the scheduler, and what they write to the KV cache lies in slots that are written again.
Where the attention backends can update their metadata in place, a whole draft is one CUDA graph.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager

from vllm_specplugins.config import EarlyExitConfig, parts
from vllm_specplugins.draft import Draft, DraftBatch, Early, Feedback, Sampling, Target
from vllm_specplugins.engine.options import request_options
from vllm_specplugins.engine.target.adapters import Adapters
from vllm_specplugins.engine.target.layers import FirstLayers
from vllm_specplugins.engine.target.metadata import updates_in_place
from vllm_specplugins.engine.v2.built_in import DeviceOffer
from vllm_specplugins.engine.v2.early import early_of
from vllm_specplugins.engine.v2.graphs import graph_for
from vllm_specplugins.engine.v2.history import Histories
from vllm_specplugins.engine.v2.paged import PagedForward
from vllm_specplugins.engine.v2.report import DraftReport, warms_up
from vllm_specplugins.engine.v2.tally import Tally
from vllm_specplugins.engine.v2.verify import likeliest_of
from vllm_specplugins.engine.verify import draft_seeds
from vllm_specplugins.kernels.rejection import Sampling as Verified
from vllm_specplugins.proposers.barrier import FaultBarrier
from vllm_specplugins.proposers.read_only import Views, view
from vllm_specplugins.request_options import Options, draft_limit

_NO_TOKENS = view(np.zeros(1, np.int32))  # of a row that wants no draft
_NOT_TOLD = Feedback((), np.zeros(0, np.int32), np.zeros(0, np.int32))  # what became of drafts the device counts


class TargetSpeculator(DraftModelSpeculator):
    """To V2 a draft model without weights and without attention layers of its own.

    The inputs of a draft stand in buffers of max_num_reqs rows, where a recorded graph finds them.
    """

    draft_attn_layer_names: set[str]
    draft_logits: torch.Tensor | None
    barrier: FaultBarrier  # set by runner.attach
    offer: DeviceOffer | None = None  # of a cascade's stage that is built into vLLM
    rejection_sampler: Callable[[], Any]  # the runner's, and what its sampler knows of requests; set by runner.attach
    sampling_states: Callable[[], Any]
    adapters_of: Callable[[Any, bool], Adapters] | None = None  # of a batch; set by runner.attach where there are any
    adapters: Adapters | None = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device)
        rows, self._req_states = self.max_num_reqs, req_states
        self._histories = None
        if vllm_config.speculative_config.reads_on_host:
            self._histories = Histories(req_states, self.max_model_len, self.num_speculative_steps, device)
        self._rejection = vllm_config.speculative_config.plugin_config.common.rejection
        self.report: Any = DraftReport()
        self.tally = Tally(rows, self.num_speculative_steps, 0, device)
        self._options: dict[str, Options] = {}  # of requests that have any, where there are no histories
        self._drafted_at = 0.0  # when the last drafting from histories ended
        self._graphs: SpeculatorCudaGraphManager | None = None
        self._early: Callable[[], Early] | None = None  # of this step
        self.query_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._last_token_ids = torch.zeros(rows, dtype=torch.int32, device=device)
        self._num_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._num_rows = 0  # of the step before
        self._last_hidden_states = torch.zeros(rows, self.hidden_size, dtype=self.dtype, device=device)
        self._temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self._seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self._verified: Verified | None = None
        if vllm_config.speculative_config.is_coupled:
            limits = (torch.zeros(rows, dtype=torch.int32, device=device), *torch.zeros(2, rows, device=device))
            self._verified = Verified(self._temperature, torch.zeros_like(self._seeds), *limits)
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

    def add(self, new_requests: Any) -> None:
        """Starts the histories of requests that are new, or back after a preemption."""
        if self._histories is not None:
            self._histories.add(new_requests)
            return
        if new_requests:
            self.tally.start({new.req_id: self._req_states.req_id_to_index[new.req_id] for new in new_requests})
        self._options |= {new.req_id: found for new in new_requests if (found := request_options(new.sampling_params))}

    def remove(self, request_ids: set[str]) -> None:
        """Tells the proposer which requests are gone."""
        if self._histories is not None:
            self._histories.remove(request_ids)
        for request_id in request_ids:
            self._options.pop(request_id, None)
        if request_ids:
            self.barrier.forget(sorted(request_ids))

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
        none_of_our_own: set[str] = self.draft_attn_layer_names
        self.draft_attn_layer_names = {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names}
        super().set_attn(model_state, kv_cache_config, *rest)
        self.draft_attn_layer_names = none_of_our_own

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Called after `set_attn`."""
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        exits = parts(self.vllm_config.speculative_config.plugin_config, EarlyExitConfig)
        full &= not any(part.look_ahead for part in exits)  # a graph's metadata is that of one token a request
        full &= self.vllm_config.lora_config is None  # which rows run adapters the host says at each launch
        if full and self.supports_decode_metadata_update and self._histories is None:
            self._graphs = self._new_graphs()

    def _new_graphs(self) -> SpeculatorCudaGraphManager:
        """None recorded yet."""
        mode = CUDAGraphMode.FULL_DECODE_ONLY
        return SpeculatorCudaGraphManager(self.vllm_config, self.device, mode, decode_query_len=1)

    def capture(self) -> None:
        """Records one graph of all K steps for each batch size."""
        if self._graphs is None:
            return
        self.idx_mapping.fill_(-1)
        self._graphs.capture(
            self._draft,
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
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """vLLM's signature; returns [num_reqs, K] int64."""
        num_reqs = input_batch.num_reqs
        drafts = self.draft_tokens[:num_reqs]
        if num_speculative_tokens is None:
            num_speculative_tokens = self.num_speculative_steps
        rehearses = dummy_run or warms_up(input_batch.req_ids)
        if self._histories is None and not rehearses and self.tally.rests(input_batch, num_speculative_tokens):
            self._rest()
            return drafts
        self._copy_request_inputs(num_reqs, input_batch.idx_mapping, temperature, seeds, dummy_run)
        if self.adapters_of is not None:
            self.adapters = self.adapters_of(input_batch, rehearses)
        if rehearses:
            self._rehearse(input_batch, is_profile, skip_attn_for_dummy_run)
            return drafts
        self._take_inputs(input_batch, last_hidden_states, num_rejected, last_sampled, temperature, seeds)
        if self.first_layers.early and aux_hidden_states is not None:
            states = dict(zip(self.first_layers.early, aux_hidden_states, strict=True))
            self._early = partial(early_of, input_batch, states, num_sampled, num_rejected, last_sampled, drafts)
        self._draft_step(input_batch, num_sampled, num_rejected, num_speculative_tokens)
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
        self.idx_mapping[rows:].fill_(-1)

    def _rest(self) -> None:
        """A step in which nothing is drafted, as in the one before."""

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
        if num_reqs < self._num_rows:  # behind the rows of the step before all is padding
            self._num_tokens[num_reqs : self._num_rows].zero_()
        self._num_rows = num_reqs
        self._last_token_ids[:num_reqs].copy_(last_sampled.view(-1)[requests])
        torch.index_select(last_hidden_states, 0, last_rows, out=self._last_hidden_states[:num_reqs])
        torch.index_select(temperature, 0, requests, out=self._temperature[:num_reqs])
        self._seeds[:num_reqs].copy_(draft_seeds(seeds[requests], self._num_tokens[:num_reqs], self._rejection))
        if self._verified is not None:
            states = self.sampling_states()
            for name in ("seeds", "top_k", "top_p", "min_p"):
                getattr(self._verified, name)[:num_reqs].copy_(getattr(states, name).gpu[requests])

    def _draft_step(self, input_batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor, most: int) -> None:
        """Puts drafts of at most so many tokens into `draft_tokens`, and reports their lengths."""
        num_reqs = input_batch.num_reqs
        if self._histories is not None:
            with gpu_sync_allowed():
                num_draft = self._draft_from_histories(input_batch, num_sampled, num_rejected, most)
        else:
            self.tally.add_fates(self.idx_mapping[:num_reqs], num_sampled[:num_reqs], num_rejected[:num_reqs])
            num_draft = self._draft_for_all(input_batch, most)
        if input_batch.has_structured_output_reqs:  # a grammar has to see the tokens
            with gpu_sync_allowed():
                rows = self.draft_tokens[:num_reqs].tolist()
        else:
            rows = [[-1] * self.num_speculative_steps] * num_reqs
        self.report.tell(input_batch.req_ids, [row[:n] for row, n in zip(rows, num_draft, strict=True)])

    def _rehearse(self, input_batch: Any, is_profile: bool, skip_attn: bool) -> None:
        """A dummy run: costs in memory and time what drafting costs, and belongs to no request.

        Without attention there is no KV cache yet.
        """
        self._early = None
        num_reqs = input_batch.num_reqs
        for buffer in (self._last_token_ids, self._num_tokens, self._last_hidden_states, self._temperature):
            buffer.zero_()
        if not is_profile and self._replays(num_reqs):
            return
        forward = PagedForward(
            self, num_reqs, num_reqs, seq_lens_cpu=input_batch.seq_lens_cpu_upper_bound, attends=not skip_attn
        )
        proposer: Any = self.barrier.proposer
        rehearse = getattr(proposer, "rehearse", proposer.propose)
        self._keep(rehearse(self._batch(input_batch.req_ids, forward)))

    def _draft_for_all(self, input_batch: Any, most: int) -> list[int]:
        """Without a look at any token; the drafts' lengths."""
        num_reqs = input_batch.num_reqs
        edit = self._edit_of(input_batch)
        if most == 0 or (edit is None and self._replays(num_reqs)):
            num_draft = [most] * num_reqs
            self.barrier.counters.add_drafts(num_reqs, np.array(num_draft, np.int32))
        else:
            num_draft = self._draft_eagerly(input_batch, edit)
        return self._limited([min(num, most) for num in num_draft], input_batch)

    def _limited(self, num_draft: list[int], input_batch: Any) -> list[int]:
        """All are drafted for at once; what a request's options do not allow is not verified.

        Its length is an upper bound here: the drafts of the last step count as if all had been accepted.
        """
        if not self._options:
            return num_draft
        lengths = input_batch.seq_lens_cpu_upper_bound.tolist()
        return [
            draft_limit(self._options.get(request_id, {}), length, num, self._most_tokens)
            for request_id, length, num in zip(input_batch.req_ids, lengths, num_draft, strict=False)
        ]

    def _replays(self, num_reqs: int) -> bool:
        """Drafts by one graph, if one has this batch size."""
        if self._graphs is None or (graph := graph_for(self._graphs, num_reqs)) is None:
            return False
        for groups in self.attn_groups:
            for group in groups:
                group.map_to_kernel_block_table(self.block_tables.input_block_tables[group.kv_cache_group_id])
        self._graphs.run_fullgraph(graph)
        return True

    def _edit_of(self, input_batch: Any) -> Any:
        """`draft.Target.edit`: rare, so that graphs do without and a step that needs it is drafted for eagerly."""
        editor = getattr(self.rejection_sampler(), "editor", None)  # vLLM's own has none
        if editor is None:
            return None
        return editor.edit_of_drafts(self.idx_mapping[: input_batch.num_reqs], input_batch.idx_mapping_np)

    def _draft_eagerly(self, input_batch: Any, edit: Any) -> list[int]:
        num_reqs = input_batch.num_reqs
        forward = PagedForward(self, num_reqs, num_reqs, seq_lens_cpu=input_batch.seq_lens_cpu_upper_bound)
        batch = self._batch(input_batch.req_ids, forward, edit)
        draft = self.barrier.propose(batch, _NOT_TOLD)
        self._keep(draft)
        lengths: list[int] = draft.num_draft.tolist()
        return lengths

    def _draft_from_histories(
        self, input_batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor, most: int
    ) -> list[int]:
        """For proposers that read tokens, too: waits for them, and knows what became of the last drafts."""
        assert self._histories is not None
        num_reqs = input_batch.num_reqs
        rows, accepted, rejected = self._histories.extend(input_batch, num_sampled, num_rejected)
        max_num_draft = np.zeros(num_reqs, np.int32)  # rows in the middle of their prompt want nothing
        token_ids = [_NO_TOKENS] * num_reqs
        options: list[Any] = [{}] * num_reqs
        for row in rows:
            request = self._histories[input_batch.req_ids[row]]
            token_ids[row], options[row] = request.token_ids, request.options
            max_num_draft[row] = draft_limit(request.options, request.num_tokens, most, self._most_tokens)
        forward = PagedForward(self, num_reqs, num_reqs, seq_lens_cpu=input_batch.seq_lens_cpu_upper_bound)
        batch = replace(
            self._batch(input_batch.req_ids, forward, self._edit_of(input_batch)),
            token_ids=Views(token_ids),
            options=options,
            max_num_draft=max_num_draft,
            offer=None if self.offer is None else self.offer.of(range(num_reqs)),
            likeliest=likeliest_of(self.rejection_sampler(), input_batch, {row: row for row in rows}),
        )
        only_decoded = len(rows) == num_reqs and input_batch.num_tokens == int((1 + accepted + rejected).sum())
        feedback = Feedback(
            request_ids=[input_batch.req_ids[row] for row in rows],
            num_draft=accepted + rejected,
            num_accepted=accepted,
            step_ms=(time.perf_counter() - self._drafted_at) * 1000 if only_decoded else None,
        )
        draft = self.barrier.propose(batch, feedback)
        self._drafted_at = time.perf_counter()
        self.draft_tokens[:num_reqs].zero_()  # what stands behind a draft's end must be a token
        self._keep(draft)
        lengths: list[int] = draft.num_draft.tolist()
        return lengths

    def _draft(
        self,
        num_reqs: int,
        num_tokens: int,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        num_tokens_across_dp: Any,
        cudagraph_runtime_mode: CUDAGraphMode,
        num_speculative_steps: int,
    ) -> None:
        """What a graph records; vLLM's signature."""
        forward = PagedForward(self, num_reqs, num_tokens, attn_metadata, slot_mappings)
        self._draft_rows(self._batch([""] * num_reqs, forward))

    def _draft_rows(self, batch: DraftBatch) -> None:
        self._keep(self.barrier.proposer.propose(batch))

    def _batch(self, request_ids: list[str], forward: Any, edit: Any = None) -> DraftBatch:
        rows = slice(len(request_ids))
        target = Target(
            forward=forward,
            last_token_ids=self._last_token_ids[rows],
            num_tokens=self._num_tokens[rows],
            last_hidden_states=self._last_hidden_states[rows],
            sampling=Sampling(
                self._temperature[rows], self._seeds[rows], None if self._verified is None else self._verified.at(rows)
            ),
            edit=edit,
            early=self._early,
        )
        max_num_draft = np.full(len(request_ids), self.num_speculative_steps, np.int32)
        return DraftBatch(request_ids, (), max_num_draft, [{}] * len(request_ids), target)

    def _keep(self, draft: Draft) -> None:
        """Copies a draft to where vLLM's verification looks for it.

        A draft may be shorter than the scheduler has planned. Behind its end stand tokens that are verified like any
        others, and certain: without a q of their own, what stands in that row is another step's, or nobody's.
        """
        num_reqs, width = draft.token_ids.shape
        tokens = self.draft_tokens[:num_reqs]
        tokens[:, :width] = torch.as_tensor(draft.token_ids, device=self.device)
        tokens[:, width:].zero_()  # vLLM 0.33 may have written -1
        if self.draft_logits is None:
            return
        requests = self.idx_mapping[:num_reqs].long()
        sampled = 0
        if draft.logits is not None:
            sampled = draft.logits.shape[1]
            self._draft_logits[requests, :sampled] = draft.logits.to(self._draft_logits.dtype)
        is_certain = np.arange(self.num_speculative_steps) >= np.minimum(draft.num_draft, sampled)[:, None]
        if is_certain.any():
            with gpu_sync_allowed():  # of histories' proposers, which wait anyway, or after a fault
                rows, columns = (torch.from_numpy(index).to(self.device) for index in np.nonzero(is_certain))
            one_hot = self._draft_logits.new_full((len(rows), self._draft_logits.shape[-1]), -torch.inf)
            one_hot.scatter_(1, tokens[rows, columns, None], 0.0)
            self._draft_logits[requests[rows], columns] = one_hot
