"""Model Runner V2: runs lookups, a model proposer, or a lookup with a model proposer or a drafter of vLLM, on the
device and without waiting. One CUDA graph per batch size and number of steps records matching, drafting, the choice,
acceptance probabilities and counters. All ranks of a tensor-parallel group draw the same noise, and therefore the same
tokens. R: rows of the batch or of a graph, K: max tokens of a draft."""

import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager

from vllm_specplugins.cascade.on_device import LOOKUP, MODEL, DeviceBatch, DeviceCascade, DeviceModel, DeviceSource
from vllm_specplugins.config import EarlyExitConfig, SpecConfig, rule
from vllm_specplugins.draft import ProposerContext
from vllm_specplugins.engine.adaptive.trimming import trimming_if_it_can
from vllm_specplugins.engine.hooks import wrap
from vllm_specplugins.engine.v2 import memory
from vllm_specplugins.engine.v2.feedback.draft_tracker import DraftTracker
from vllm_specplugins.engine.v2.feedback.report import AsyncCopy
from vllm_specplugins.engine.v2.requests import DraftLimits, Request
from vllm_specplugins.engine.v2.speculators.base import Speculator
from vllm_specplugins.engine.v2.speculators.lookups import Lookups
from vllm_specplugins.engine.v2.speculators.paged import PagedForward
from vllm_specplugins.gate.step_times import lengths_up_to
from vllm_specplugins.methods import build_proposer
from vllm_specplugins.structures.arrays import Floats
from vllm_specplugins.structures.drafts import DraftArrays, of_stage, put_logits
from vllm_specplugins.target import Target


class DeviceSpeculator(Speculator):
    """Drafts on the device. Outside of a graph, a guard protects drafting as for any proposer."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device, req_states)
        speculative_config, max_num_draft = vllm_config.speculative_config, self.num_speculative_steps
        config = speculative_config.plugin_config
        stages = config.stages
        self._policy = rule(config)
        self._model_stage = MODEL if stages else 0
        self._sources: list[DeviceSource] = []
        self.limits = DraftLimits(req_states, max_num_draft, device, stages)
        self.lookups = Lookups(vllm_config, req_states, device)
        self.late = self.lookups.late
        self.reads_tokens = self.late is not None
        self._steps_alone = isinstance(config.method_config, EarlyExitConfig)
        # vLLM's estimator rates a single exit in fewer launches; it does not support lookups.
        self.use_acceptance_estimator &= self._steps_alone
        self._steps = torch.arange(max_num_draft, device=device)
        self.outcomes = DraftTracker(max(1, len(stages)), req_states, max_num_draft, device)
        self.draft_token_confidence_probs, self.tally = self.outcomes.accept_probs, self.outcomes.tally
        if self._policy is not None and vllm_config.parallel_config.data_parallel_size == 1:
            self.outcomes.watch_worth()  # data-parallel engines run the experts of a drafter together
        self._wanted: Any = None  # kernels.steps.Wanted of the rows that were mapped last
        self._num_steps = 0  # number of steps that a model drafts
        self._step_counts: tuple[int, ...] = (0,)
        if self.runs_target:
            self._step_counts = lengths_up_to(self.limits.of_stages[MODEL] if stages else max_num_draft)
        self._model: Any = None  # the proposer that runs a part of the target
        self._graphs: Any = None  # graphs of the newest step
        self._graphs_of: dict[int, Any] = {}  # by number of steps

    def attach(self, runner: Any) -> None:
        super().attach(runner)
        self.session.rates, self.session.late = self.tally, self.late
        if self.lookups.custom is not None:
            self.lookups.custom.stop = self.stop
        if self.late is not None:
            barrier = self.session.barrier
            held: Any = barrier.proposer
            guards: Any = held.stages if isinstance(held, DeviceCascade) else [barrier]
            self.late.guard = guards[LOOKUP].guard
        wrap(runner, "initialize_kv_cache", partial(trimming_if_it_can, runner, self))
        memory.attach(runner, self)
        is_async = runner.vllm_config.scheduler_config.async_scheduling
        self.report.trims = lambda: is_async and not self.is_off and runner.adaptive_verification is not None

    def new_proposer(self, config: SpecConfig, context: ProposerContext) -> Any:
        """Builds the proposer for the barrier, and the sources of the speculator's drafts."""
        if self._policy is None and self.lookups:
            self._sources = [self.lookups]
            return self.lookups.new_proposer(config, context)
        if self._policy is None:
            proposer: Any = build_proposer(config, context)
            self._sources = [self._model_source(proposer)]
            return proposer
        first, second = config.stages
        proposers = self.lookups.new_proposer(first, context), build_proposer(second, context)
        self._sources = [self.lookups, self._model_source(proposers[MODEL])]
        return DeviceCascade(config.stages, proposers, context)

    def _model_source(self, proposer: Any) -> DeviceSource:
        self._model = proposer
        if self._policy == "verify":
            from vllm_specplugins.cascade.verify import CheckedOnDevice

            return CheckedOnDevice(proposer)
        return DeviceModel(proposer, self.outcomes)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Prepares the graphs; vLLM calls it after `set_attn`."""
        records = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        if records and not self.is_off and self.lookups.custom is not None:
            self.lookups.custom.probe()
        if self.is_off or not records:
            return
        has_adapters = self.vllm_config.lora_config is not None  # the host sets the rows that use them at each launch
        if self.runs_target and (has_adapters or not self.supports_decode_metadata_update):
            return
        for num_steps in self._step_counts:
            kind = SpeculatorCudaGraphManager if num_steps else CudaGraphManager
            length = self._model.num_fed(num_steps) if num_steps else 1
            mode = CUDAGraphMode.FULL_DECODE_ONLY
            self._graphs_of[num_steps] = kind(self.vllm_config, self.device, mode, decode_query_len=length)

    def capture(self) -> None:
        title = "Capturing drafting CUDA graphs"
        for num_steps, graphs in self._graphs_of.items():
            self._num_steps, self._graphs = num_steps, graphs
            if num_steps:  # with attention
                parts = self.model_state, self.input_buffers, self.block_tables, self.attn_groups, self.kv_cache_config
                graphs.capture(self._draft, *parts, progress_bar_desc=title)
            else:
                graphs.capture(lambda batch, warmup: lambda mode: self._draft(batch.num_reqs), title)

    def _draft(self, num_reqs: int, *parts: Any, **others: Any) -> None:
        """Runs as graphs record it. `parts`, by vLLM's signature: number of tokens, attention metadata, slots."""
        self._map_rows(num_reqs)
        forward = PagedForward(self, num_reqs, *parts[:3]) if self._num_steps else None
        target = self._target(num_reqs, forward, None) if self.runs_target else None
        self._draft_on_device(target, self._num_steps)

    def _map_rows(self, num_rows: int) -> None:
        self._wanted = self.limits.wanted(self.outcomes.step_rows(num_rows), self.idx_mapping[:num_rows])

    def release(self) -> None:
        """Drops references to the KV cache of vLLM's profile."""

    def add(self, requests: Sequence[Request]) -> None:
        super().add(requests)
        for part in (self.limits, self.outcomes, self.lookups):
            part.add(requests)

    def remove(self, request_ids: set[str]) -> None:
        self.lookups.remove(request_ids)
        if request_ids and self.runs_target:
            self.session.barrier.forget(sorted(request_ids))

    def drafter_length(self, input_batch: Any, lengths: Sequence[int]) -> int:
        """Returns the number of tokens that the second stage drafts for each request: one of these rising numbers,
        chosen by the device's reports."""
        reports = self.outcomes.reports(input_batch.idx_mapping_np)
        return lengths[-1] if reports is None or len(lengths) < 2 else self._paying_length(reports, lengths)

    def _paying_length(self, reports: Floats, lengths: Sequence[int]) -> int:
        """Returns the largest of these lengths, or the smallest one while every lookup gains as many tokens."""
        return lengths[0 if (reports[:, 0] >= self.limits.of_stages[MODEL]).all() else -1]

    def rests(self, input_batch: Any, length: int) -> bool:
        """Returns whether this step and the last one draft nothing."""
        return self.tally.rests(input_batch, length)

    def note(self, input_batch: Any, length: int, rests: bool) -> None:
        self.tally.note(length, input_batch.num_reqs if rests else 0)
        if rests:
            self.outcomes.rest()

    def _draft_step(self, input_batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor, length: int) -> None:
        """Drafts for one step of the engine into `draft_tokens`, and begins to report the lengths."""
        num_reqs = input_batch.num_reqs
        if self.late is not None:
            self.late.step(length)
        self._begin(num_reqs, length, input_batch.idx_mapping, num_sampled, num_rejected)
        least = length
        if self.runs_target and self._policy is not None:
            least = self.drafter_length(input_batch, (0, length))
        self._num_steps = next((number for number in self._step_counts if number >= least), self._step_counts[-1])
        edit = self._edit_of(input_batch) if self._num_steps else None
        if edit is not None or not self._replays(num_reqs):
            self._draft_eagerly(input_batch, edit, min(length, self._num_steps))
        if input_batch.has_structured_output_reqs:  # vLLM checks the tokens
            tokens = AsyncCopy(input_batch.req_ids, self.draft_tokens[:num_reqs])
            self.report.tell(self.outcomes.lengths(input_batch.req_ids), lambda: tokens.values().tolist())
        else:
            self.report.tell(None if self.report.trims() else self.outcomes.lengths(input_batch.req_ids))

    def _draft_eagerly(self, input_batch: Any, edit: Any, num_steps: int) -> None:
        start, guard = time.perf_counter(), self.session.barrier.guard
        longest = 1 + int(input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs].max())
        self._map_rows(input_batch.num_reqs)
        batch = self._batch_of(input_batch, edit)
        if not self.runs_target:  # the kernels of a lookup, as in graphs
            self._draft_on_device(batch.target, num_steps, longest)
            return
        guard.begin_step()
        if guard.call(batch, partial(self._draft_on_device, batch.target, num_steps, longest)) is None:
            self._draft_nothing(input_batch.num_reqs)
        self.session.barrier.counters.propose_ms += (time.perf_counter() - start) * 1000

    def _rehearse(self, input_batch: Any, is_profile: bool, skip_attn: bool) -> None:
        """Runs a dummy run, which costs as much as drafting and belongs to no request. Without attention there is no KV
        cache."""
        num_reqs, self._num_steps = input_batch.num_reqs, self._step_counts[-1]
        self._begin(num_reqs, self.num_speculative_steps)
        if not is_profile and self._replays(num_reqs):
            return
        self._map_rows(num_reqs)
        self._draft_on_device(self._batch_of(input_batch, attends=not skip_attn).target, self._num_steps)

    def _begin(self, num_reqs: int, length: int, *sampled: torch.Tensor) -> None:
        self.limits.begin(length)
        self.outcomes.begin(num_reqs, *(rows if len(rows) == num_reqs else rows[:num_reqs] for rows in sampled))

    def _replays(self, num_reqs: int) -> bool:
        """Drafts with a graph of this number of steps and batch size, possibly with padding rows. Returns whether there
        is one."""
        self._graphs = graphs = self._graphs_of.get(self._num_steps)
        if graphs is None:
            return False
        length = graphs.decode_query_len
        batch = graphs.dispatch(num_reqs, num_reqs * length, length, 0)
        if batch.cg_mode != CUDAGraphMode.FULL:
            return False
        for group in chain(*self.attn_groups) if self._num_steps else ():
            group.map_to_kernel_block_table(self.block_tables.input_block_tables[group.kv_cache_group_id])
        graphs.run_fullgraph(batch)
        return True

    def _draft_on_device(self, target: Target | None, num_steps: int, longest: int | None = None) -> bool:
        slots, wanted, of_stages = self._wanted
        if self._rates:
            self.outcomes.observe(len(slots))
        on_logits = self._estimate if self._steps_alone else None
        max_lookup = of_stages[LOOKUP] if of_stages else None
        batch = DeviceBatch(slots, num_steps, target, longest, self._rates, on_logits, max_lookup)
        drafts: DraftArrays | None = None
        for source, limits in zip(self._sources, of_stages or (wanted,), strict=True):
            drafts = source.draft(batch, drafts, limits)
        assert drafts is not None
        if not self.lookups:
            self.outcomes.accept_probs[: len(slots)].mul_(drafts.is_drafted)
        self._keep(drafts, wanted)
        return True

    def _keep(self, drafts: DraftArrays, wanted: torch.Tensor) -> None:
        """Counts drafts, and writes them and their logits to the tensors that vLLM's verification reads."""
        self.outcomes.keep(drafts, wanted, self._rates)
        requests = self.idx_mapping[: len(wanted)]
        self.draft_tokens[: len(wanted)] = drafts.token_ids
        if self.draft_logits is None:
            return
        if drafts.logits is not None:
            is_drawn = drafts.is_drafted & (drafts.stage == self._model_stage)
            self.tally.add_q(drafts.logits, requests, is_drawn[:, : drafts.logits.shape[1]])
        is_certain = drafts.stage == LOOKUP if self._policy else None
        put_logits(self._draft_logits, requests, drafts.token_ids, drafts.logits, is_certain)

    def _draft_nothing(self, num_reqs: int) -> None:
        """Replaces drafts by deterministic tokens after a fault, since vLLM verifies planned tokens."""
        none = torch.zeros(num_reqs, dtype=torch.int32, device=self.device)
        self.outcomes.fates = self.outcomes.learned = None  # values of an earlier step with other rows
        self.outcomes.accept_probs[:num_reqs].zero_()
        drafts = of_stage(0, none[:, None].repeat(1, self.num_speculative_steps), none, none.float())
        self._keep(drafts._replace(by_stage=(none - 1, none - 1) if self._policy else ()), none)

    @property
    def _rates(self) -> bool:
        """Returns whether the stages' records estimate acceptance probabilities."""
        return bool(self.lookups) and self.enable_adaptive_verification

    @property
    def _estimate(self) -> Any:
        """Returns a callback (step, logits) with which vLLM's estimator rates each token; None if no draft is
        trimmed."""

        def estimate(step: int, logits: torch.Tensor) -> None:
            self._maybe_predict_acceptance(logits, self.idx_mapping[: len(logits)], self._steps[step])

        return estimate if self.enable_adaptive_verification else None
