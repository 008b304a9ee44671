"""Model Runner V2: lookups, a model proposer, or a lookup beside one or a drafter of vLLM's, on the device.

Nothing here waits. The match, the steps of what runs the target, who is followed, how likely each token is to be
accepted, and what is counted are one CUDA graph for each batch size and depth; every rank of a tensor-parallel group
draws the same, and has the same tokens. R: rows of the batch or of a graph, K: most tokens of a draft.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager

from vllm_specplugins.cascade.built_in import better
from vllm_specplugins.cascade.on_device import EXIT, LOOKUP, OnDevice, Parts, Stages, keep_logits
from vllm_specplugins.config import EarlyExitConfig, SpecConfig, rule, stage_configs
from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.engine.v2.feedback.draft_tracker import DraftTracker
from vllm_specplugins.engine.v2.feedback.report import LateReport
from vllm_specplugins.engine.v2.requests import DraftLimits, Request
from vllm_specplugins.engine.v2.speculators.base import Speculator
from vllm_specplugins.engine.v2.speculators.built_in import DeviceOffer
from vllm_specplugins.engine.v2.speculators.lookups import Lookups
from vllm_specplugins.engine.v2.speculators.paged import PagedForward
from vllm_specplugins.gate.step_times import lengths_up_to
from vllm_specplugins.kernels.acceptance import Other
from vllm_specplugins.methods import build_proposer
from vllm_specplugins.structures.arrays import DraftArrays, of_stage


class DeviceSpeculator(Speculator):
    """See the module. Drafting by another way than a graph is guarded like any proposer."""

    offers: DeviceOffer | None = None  # of a stage that is built into vLLM
    budget_implementation: str | None = None  # of kernels/budget; the reference where the kernel failed its check

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device, req_states)
        speculative_config, max_num_draft = vllm_config.speculative_config, self.num_speculative_steps
        config = speculative_config.plugin_config
        stages = config.stages
        self._policy = rule(config)
        self.limits = DraftLimits(req_states, max_num_draft, device, stages)
        self.lookups = Lookups(vllm_config, req_states, device)
        self.reads_tokens = self.lookups.late is not None
        self._steps_alone = isinstance(config.method_config, EarlyExitConfig)  # each of its steps is seen
        # vLLM's estimator rates an exit that is alone, in fewer launches; it knows of no lookup.
        self.use_acceptance_estimator &= self._steps_alone
        self._steps = torch.arange(max_num_draft, device=device)
        self.outcomes = DraftTracker(max(1, len(stages)), req_states, max_num_draft, device)
        self.draft_token_confidence_probs, self.tally = self.outcomes.accept_probs, self.outcomes.tally
        if self._policy is not None and vllm_config.parallel_config.data_parallel_size == 1:
            self.outcomes.watch_copies()  # others run a drafter's experts together
        self.report = LateReport()
        self._wanted: Any = None  # of the rows that were mapped last: kernels.steps.Wanted
        self._depth = 0  # how many tokens are drafted by what runs the target
        self._depths: tuple[int, ...] = (0,)
        if self.runs_target:
            self._depths = lengths_up_to(self.limits.of_stages[EXIT] if stages else max_num_draft)
        self._graphs: Any = None  # of the newest step
        self._graphs_of: dict[int, Any] = {}  # by depth

    def new_proposer(self, config: SpecConfig, context: ProposerContext) -> Any:
        """What the barrier shall hold."""
        if self._policy is not None:
            stages = config.method_config.stages
            lookup, second = self.lookups.new_proposer(stages[LOOKUP], context), build_proposer(stages[EXIT], context)
            return Stages([stage.method for stage in stages], lookup, second, context)
        return (self.lookups.new_proposer if self.lookups else build_proposer)(config, context)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Called after `set_attn`."""
        if cudagraph_mode.decode_mode() != CUDAGraphMode.FULL:
            return
        exits = stage_configs(self.vllm_config.speculative_config.plugin_config, EarlyExitConfig)
        has_adapters = self.vllm_config.lora_config is not None  # which rows run them the host says at each launch
        if self.runs_target and (has_adapters or not self.supports_decode_metadata_update):
            return
        for depth in self._depths:
            kind = SpeculatorCudaGraphManager if depth else CudaGraphManager
            length = depth if depth and any(part.one_pass for part in exits) else 1  # of a request, in one pass
            mode = CUDAGraphMode.FULL_DECODE_ONLY
            self._graphs_of[depth] = kind(self.vllm_config, self.device, mode, decode_query_len=length)

    def capture(self) -> None:
        """Records one graph for each batch size and depth."""
        title = "Capturing drafting CUDA graphs"
        for depth, graphs in self._graphs_of.items():
            self._depth, self._graphs = depth, graphs
            if depth:  # with attention
                parts = self.model_state, self.input_buffers, self.block_tables, self.attn_groups, self.kv_cache_config
                graphs.capture(self._draft, *parts, progress_bar_desc=title)
            else:
                graphs.capture(lambda batch, warmup: lambda mode: self._draft(batch.num_reqs), title)

    def _draft(self, num_reqs: int, *parts: Any, **others: Any) -> None:
        """What a graph records. vLLM's signature: after the rows, how many tokens; metadata and slots of attention."""
        self._map_rows(num_reqs)
        forward = PagedForward(self, num_reqs, *parts[:3]) if self._depth else None
        self._draft_on_device(self._batch([""] * num_reqs, forward), None, self._depth)

    def _map_rows(self, num_rows: int) -> None:
        """As the tracker has them, to where vLLM's way and the target's layers look; and how much each wants."""
        self._wanted = self.limits.wanted(self.outcomes.step_rows(num_rows), self.idx_mapping[:num_rows])

    def add(self, requests: Sequence[Request]) -> None:
        """Takes requests."""
        super().add(requests)
        for part in (self.limits, self.outcomes, self.lookups):
            part.add(requests)

    def remove(self, request_ids: set[str]) -> None:
        """Drops requests that finished, were aborted or were preempted."""
        self.lookups.remove(request_ids)
        if request_ids and self.runs_target:
            self.barrier.forget(sorted(request_ids))

    def new_offer(self) -> Any:
        return self.offers

    def spares(self, input_batch: Any) -> bool:
        return self.outcomes.copies(input_batch.idx_mapping_np)

    def rests(self, input_batch: Any, most: int) -> bool:
        """Whether nothing is drafted, as in the step before. What is built into vLLM has to see all tokens."""
        rests = self.offers is None and self.tally.rests(input_batch, most)
        if rests:
            self.outcomes.rest()
        return rests

    def _draft_step(self, input_batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor, most: int) -> None:
        """Puts drafts of at most so many tokens into `draft_tokens`, and reports their lengths."""
        num_reqs = input_batch.num_reqs
        if self.lookups.late is not None:
            self.lookups.late.step(most)
        self._begin(num_reqs, most, input_batch.idx_mapping, num_sampled, num_rejected)
        own = 0 if self.offers is None and self.spares(input_batch) else most
        self._depth = next((depth for depth in self._depths if depth >= own), self._depths[-1])
        edit = self._edit_of(input_batch) if self._depth else None
        if edit is not None or not self._replays(num_reqs):
            self._draft_eagerly(input_batch, edit, min(most, self._depth))
        self.report.tell(self.outcomes, input_batch, self.draft_tokens[:num_reqs])

    def _draft_eagerly(self, input_batch: Any, edit: Any, num_steps: int) -> None:
        start, guard = time.perf_counter(), self.barrier.guard
        longest = 1 + int(input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs].max())
        self._map_rows(input_batch.num_reqs)
        batch = self._batch_of(input_batch, edit)
        if not self.runs_target:  # a lookup's kernels, as in graphs
            self._draft_on_device(batch, longest, num_steps)
            return
        guard.begin_step()
        if guard.call(batch, partial(self._draft_on_device, batch, longest, num_steps)) is None:
            self._draft_nothing(input_batch.num_reqs)
        self.barrier.counters.propose_ms += (time.perf_counter() - start) * 1000

    def _rehearse(self, input_batch: Any, is_profile: bool, skip_attn: bool) -> None:
        """A dummy run costs what drafting costs, and belongs to no request. Without attention there is no KV cache."""
        num_reqs, self._depth = input_batch.num_reqs, self._depths[-1]
        self._begin(num_reqs, self.num_speculative_steps)
        if not is_profile and self._replays(num_reqs):
            return
        self._map_rows(num_reqs)
        self._draft_on_device(self._batch_of(input_batch, attends=not skip_attn), None, self._depth)

    def _begin(self, num_reqs: int, most: int, *sampled: torch.Tensor) -> None:
        self.limits.begin(most)
        if self.offers is not None and self.offer is None:
            self.offers.begin(0)
        self.outcomes.begin(num_reqs, *(rows if len(rows) == num_reqs else rows[:num_reqs] for rows in sampled))

    def _replays(self, num_reqs: int) -> bool:
        """Drafts by one graph, if one has this depth and batch size, perhaps with rows of padding."""
        self._graphs = graphs = self._graphs_of.get(self._depth)
        if graphs is None:
            return False
        length = graphs.decode_query_len
        batch = graphs.dispatch(num_reqs, num_reqs * length, length, 0)
        if batch.cg_mode != CUDAGraphMode.FULL:
            return False
        for group in chain(*self.attn_groups) if self._depth else ():
            group.map_to_kernel_block_table(self.block_tables.input_block_tables[group.kv_cache_group_id])
        graphs.run_fullgraph(batch)
        return True

    def _draft_on_device(self, batch: DraftBatch, longest: int | None, num_steps: int) -> bool:
        """Drafts for all rows, so many tokens of what runs the target; see TokenHistories.match for `longest`."""
        num_rows = batch.num_reqs
        if self._rates:
            self.outcomes.observe(num_rows)
        slots, max_draft, _ = self._wanted
        told: Parts | None = None
        if self.offers is not None:
            (drafts, told), logits = self._beside_offer(self.offers, slots, longest), None
        elif self._policy is not None:
            drafts, logits, told = self._cascaded(batch, slots, max_draft, longest, num_steps)
        elif self.lookups:
            drafts, logits = self.lookups.found(slots, max_draft, longest), None
        else:
            drafts, logits = self._drafted(batch, max_draft.clamp(max=num_steps), num_steps)
            self.outcomes.accept_probs[:num_rows].mul_(drafts.is_drafted)
        self.outcomes.keep(drafts, max_draft, self._rates, told)
        self.draft_tokens[:num_rows] = drafts.token_ids
        self._keep_logits(drafts, logits)
        return True

    def _drafted(
        self, batch: DraftBatch, max_draft: torch.Tensor, num_steps: int
    ) -> tuple[DraftArrays, torch.Tensor | None]:
        """By a model proposer that is alone, and what its tokens were drawn from."""
        assert batch.target is not None
        proposer: Any = self.barrier.proposer
        if self._steps_alone:
            drafts, steps, _ = OnDevice(proposer, None, False, self._sees).draft(
                batch.target, None, max_draft, num_steps
            )
            return drafts, None if steps is None else steps.logits
        token_ids = max_draft.new_zeros(len(max_draft), self.num_speculative_steps)
        drafts, logits = of_stage(0, token_ids, max_draft, max_draft * 0.0 + 1), None
        if num_steps:
            most = np.full(batch.num_reqs, num_steps, np.int32)
            own = proposer.propose(replace(batch, max_num_draft=most))
            drafts.token_ids[:, :num_steps], logits = own.token_ids, own.logits
        return drafts, logits

    def _beside_offer(self, offers: DeviceOffer, slots: torch.Tensor, longest: int | None) -> tuple[DraftArrays, Parts]:
        """By a lookup and a drafter built into vLLM, which has drafted; what each did."""
        room, own = self._wanted.of_stages
        found, offered = self.lookups.found(slots, room, longest), offers.drafts(EXIT, own)
        gains = None
        if self._rates:
            gains = self.outcomes.worth(found, offers.max_num_draft).gain, self.outcomes.worth(offered).gain
        told = Parts(found.num_draft, torch.where(own > 0, offered.num_draft, -1), own * 0)
        return better(found, offered, gains), told

    def _cascaded(
        self, batch: DraftBatch, slots: torch.Tensor, max_draft: torch.Tensor, longest: int | None, num_steps: int
    ) -> tuple[DraftArrays, torch.Tensor | None, Parts]:
        """By a lookup and what runs the target; what each did."""
        assert batch.target is not None
        room, own = self._wanted.of_stages
        own = own.clamp(max=num_steps)
        if self._policy == "verify":  # the exit's own choice comes after it
            room = (room - (own > 0).int()).clamp_(min=0)
        kept = found = self.lookups.found(slots, room, longest)
        held: Any = self.barrier.proposer
        exits = OnDevice(held.exit, self._policy, self._rates, implementation=self.rows_implementation)
        if self._policy != "verify" and self._rates:
            # By what is known before the exit has drawn a token: which draft is taken must not go by what was drawn.
            other = Other(EXIT, num_steps, exits.continues, own)
            worth = self.outcomes.worth(found, self.limits.of_stages[EXIT], other)
            kept = found._replace(num_draft=worth.num_kept)
        drafts, steps, told = exits.draft(batch.target, kept, own, num_steps)
        return drafts, None if steps is None else steps.logits, replace(told, looked_up=found.num_draft)

    def _keep_logits(self, drafts: DraftArrays, logits: torch.Tensor | None) -> None:
        if self.draft_logits is not None:
            is_certain = drafts.stage == LOOKUP if self._policy else None
            requests = self.idx_mapping[: len(drafts.num_draft)]
            if logits is not None:
                is_drawn = drafts.is_drafted & (drafts.stage == (EXIT if self._policy else 0))
                self.tally.add_q(logits, requests, is_drawn[:, : logits.shape[1]])
            keep_logits(self._draft_logits, requests, drafts.token_ids, logits, is_certain)

    def _draft_nothing(self, num_reqs: int) -> None:
        """After a fault: tokens that are verified, and certain."""
        none = torch.zeros(num_reqs, dtype=torch.int32, device=self.device)
        self.outcomes.fates = None  # an earlier step's, of other rows
        self.draft_tokens[:num_reqs].zero_()
        self.outcomes.accept_probs[:num_reqs].zero_()
        drafts = of_stage(0, self.draft_tokens[:num_reqs].int(), none, none.float())
        self.outcomes.keep(drafts, none, self._rates, Parts(none - 1, none - 1, none) if self._policy else None)
        self._keep_logits(drafts, None)

    @property
    def _rates(self) -> bool:
        """Whether acceptance probabilities are ours to say, from the stages' records."""
        chooses = self.offers is not None and self._policy == "auto"
        return bool(self.lookups) and (self.enable_adaptive_verification or chooses)

    @property
    def _sees(self) -> Any:
        """vLLM's estimator, which it tells itself what became of the last drafts, where anybody asks it."""

        def estimate(step: int, logits: torch.Tensor) -> None:
            self._maybe_predict_acceptance(logits, self.idx_mapping[: len(logits)], self._steps[step])

        return estimate if self.enable_adaptive_verification else None
