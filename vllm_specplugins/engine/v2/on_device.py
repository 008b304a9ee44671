"""Model Runner V2: an exit, alone or behind a lookup, that drafts on the device. Nothing here waits.

The match, the exit's steps, who is followed, how likely each token is to be accepted, and what is counted are one CUDA
graph for each batch size, layer and depth of the exit; every rank of a tensor-parallel group draws the same. R: rows of
the batch or of a graph, K: most tokens of a draft.
"""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from vllm_specplugins.config import CascadeConfig, EarlyExitConfig, PromptLookupConfig, parts, rule
from vllm_specplugins.draft import DraftBatch, Target
from vllm_specplugins.engine.v2.early import LateChoice
from vllm_specplugins.engine.v2.graphs import graphs_of_rows, record, replayed
from vllm_specplugins.engine.v2.limits import Limits
from vllm_specplugins.engine.v2.outcomes import Outcomes
from vllm_specplugins.engine.v2.paged import PagedForward
from vllm_specplugins.engine.v2.report import LateReport
from vllm_specplugins.engine.v2.target import TargetSpeculator
from vllm_specplugins.engine.v2.texts import DeviceTexts
from vllm_specplugins.proposers.drafted import Drafted, of_stage
from vllm_specplugins.proposers.early_exit import EarlyExit
from vllm_specplugins.proposers.on_device import EXIT, LOOKUP, OnDevice, Parts, keep_logits
from vllm_specplugins.proposers.step_times import lengths_up_to


class DeviceSpeculator(TargetSpeculator):
    """See the module. Drafting by another way than a graph is guarded like any proposer."""

    texts: DeviceTexts | None = None
    budget_implementation: str | None = None  # of kernels/budget; the reference where the kernel failed its check
    _layers: LateChoice | None = None  # of the exit, where they are chosen

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device, req_states)
        config, width = vllm_config.speculative_config.plugin_config, self.num_speculative_steps
        cascade = config.own if isinstance(config.own, CascadeConfig) else None
        stages = cascade.stages if cascade else ()
        self._policy = rule(config)
        self._limits = Limits(req_states, vllm_config.model_config, width, device, stages)
        for lookup in parts(config, PromptLookupConfig):
            self.texts = DeviceTexts(req_states, width, lookup, device)
        # vLLM's estimator rates an exit that is alone, in fewer launches; it knows of no stages.
        self.use_acceptance_estimator &= self._policy is None
        self._steps = torch.arange(width, device=device)
        self.outcomes = Outcomes(max(1, len(stages)), req_states, width, device)
        self.draft_token_confidence_probs, self.tally = self.outcomes.probs, self.outcomes.tally
        self.report = LateReport()
        self._depth = 0  # how many tokens of the exit are drafted
        self._graphs_of: dict[tuple[int, int], CudaGraphManager] = {}  # by the exit's layer and depth

    @property
    def _depths(self) -> tuple[int, ...]:
        """That there are graphs of."""
        return lengths_up_to(self._cascade.most)

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        none = super().load_draft_model(target_model, target_attn_layer_names)
        if self._exit.chosen is not None:
            self._layers = LateChoice(self._exit.chosen, self.first_layers.share)
        return none

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        super().init_cudagraph_manager(cudagraph_mode)
        if self._graphs is not None:
            [own] = parts(self.vllm_config.speculative_config.plugin_config, EarlyExitConfig)
            exits = {(layer, depth): self._new_graphs() for layer in own.candidates for depth in self._depths[1:]}
            self._graphs_of = {(0, 0): graphs_of_rows(self.vllm_config, self.device), **exits}

    def capture(self) -> None:
        """Records, for each batch size, one graph of each layer and depth of the exit, and one without it."""
        first = self._exit.exit_layer
        for (layer, depth), graphs in self._graphs_of.items():
            self._depth, self._graphs = depth, graphs
            if depth:
                self._exit.exit_layer = layer
                super().capture()
            else:
                record(graphs, lambda num_rows: self._draft_rows(self._batch([""] * num_rows, None)))
        self._exit.exit_layer = first

    def add(self, new_requests: Any) -> None:
        """Takes requests that are new, or back after a preemption."""
        self._limits.add(new_requests)
        self.outcomes.add(new_requests)
        if self.texts is not None:
            self.texts.add(new_requests)

    def remove(self, request_ids: set[str]) -> None:
        """Drops requests that finished, were aborted or were preempted."""
        super().remove(request_ids)
        if self.texts is not None:
            self.texts.remove(request_ids)

    def _rest(self) -> None:
        self.outcomes.rest()

    def _draft_step(self, input_batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor, most: int) -> None:
        num_reqs = input_batch.num_reqs
        self._begin(input_batch, num_sampled, num_rejected, most, rehearses=False)
        if self._layers is not None:
            self._exit.exit_layer = self._layers.layer(self._target(input_batch), self.idx_mapping[:num_reqs])
        self._depth = max(depth for depth in self._depths if depth <= most)
        edit = self._edit_of(input_batch) if self._depth else None
        if edit is not None or not self._replays(num_reqs):
            self._draft_eagerly_on_device(input_batch, edit, min(most, self._depth))
        self.report.tell(self.outcomes, input_batch, self.draft_tokens[:num_reqs])

    def _draft_eagerly_on_device(self, input_batch: Any, edit: Any, num_steps: int) -> None:
        start, num_reqs, guard = time.perf_counter(), input_batch.num_reqs, self.barrier.guard
        longest = 1 + int(input_batch.seq_lens_cpu_upper_bound[:num_reqs].max())
        forward = PagedForward(self, num_reqs, num_reqs, seq_lens_cpu=input_batch.seq_lens_cpu_upper_bound)
        batch = self._batch(input_batch.req_ids, forward, edit)
        guard.begin_step()
        if guard.call(batch, partial(self._draft_on_device, batch, longest, num_steps)) is None:
            self._draft_nothing(num_reqs)
        self.barrier.counters.propose_ms += (time.perf_counter() - start) * 1000

    def _rehearse(self, input_batch: Any, is_profile: bool, skip_attn: bool) -> None:
        """As that of TargetSpeculator, of all that a step does."""
        num_reqs, self._depth = input_batch.num_reqs, self._depths[-1]
        once = torch.ones(num_reqs, dtype=torch.int32, device=self.device)
        self._begin(input_batch, once, torch.zeros_like(once), self.num_speculative_steps, rehearses=True)
        for buffer in (self._last_token_ids, self._num_tokens, self._last_hidden_states, self._temperature):
            buffer.zero_()
        if not is_profile and self._replays(num_reqs):
            return
        seq_lens = input_batch.seq_lens_cpu_upper_bound
        forward = PagedForward(self, num_reqs, num_reqs, seq_lens_cpu=seq_lens, attends=not skip_attn)
        longest = 1 + int(seq_lens[:num_reqs].max())
        self._draft_on_device(self._batch(input_batch.req_ids, forward), longest, self._depth)

    def _begin(
        self, input_batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor, most: int, rehearses: bool
    ) -> None:
        self._limits.most = most
        rows = slice(input_batch.num_reqs)
        self.outcomes.begin(input_batch.idx_mapping[rows], num_sampled[rows], num_rejected[rows], rehearses)

    def _draft_rows(self, batch: DraftBatch) -> None:
        self._draft_on_device(batch, None, self._depth)

    def _replays(self, num_reqs: int) -> bool:
        self._graphs = self._graphs_of.get((self._exit.exit_layer if self._depth else 0, self._depth))
        return super()._replays(num_reqs) if self._depth else replayed(self._graphs, num_reqs)

    def _target(self, input_batch: Any) -> Target:
        """As proposers see it, and what it has left behind early layers."""
        num_reqs = input_batch.num_reqs
        forward = PagedForward(self, num_reqs, num_reqs, seq_lens_cpu=input_batch.seq_lens_cpu_upper_bound)
        target = self._batch(input_batch.req_ids, forward).target
        assert target is not None
        return target

    def _draft_on_device(self, batch: DraftBatch, longest: int | None, num_steps: int) -> bool:
        """Drafts for all rows, with so many tokens of the exit; see DeviceTexts.match for `longest`."""
        assert batch.target is not None
        num_rows = batch.num_reqs
        if self._rates:
            self.outcomes.learn(num_rows)
        slots, num_sampled = self.outcomes.rows(num_rows)
        wanted = self._limits.wanted(slots, num_sampled)
        own = self._limits.of_stage(wanted, slots, EXIT if self._policy else 0).clamp_(max=num_steps)
        found = None if self.texts is None else self._found(slots, wanted, own, longest)
        kept = found if found is None else self._worth(found, own, num_steps)
        drafts, steps, told = self._cascade.draft(batch.target, kept, own, num_steps)
        if self._policy is None:
            self.outcomes.probs[:num_rows].mul_(drafts.is_drafted)
        if found is not None:
            told = replace(told, looked_up=found.num_draft)
        self.outcomes.keep(drafts, wanted, self._rates, told if self._policy else None)
        self.draft_tokens[:num_rows] = drafts.token_ids
        self._keep_logits(drafts, None if steps is None else steps.logits)
        return True

    def _found(self, slots: torch.Tensor, wanted: torch.Tensor, own: torch.Tensor, longest: int | None) -> Drafted:
        assert self.texts is not None
        wanted = self._limits.of_stage(wanted, slots, LOOKUP).clamp_(max=self._limits.of_stages[LOOKUP])
        if self._policy == "verify":  # the exit's own choice comes behind it
            wanted = (wanted - (own > 0).int()).clamp_(min=0)
        match = self.texts.match(slots, wanted, longest)
        return of_stage(LOOKUP, match.token_ids, match.num_draft, match.match_length)

    def _worth(self, found: Drafted, own: torch.Tensor, num_steps: int) -> Drafted:
        """What is kept of matches where the exit drafts, too."""
        if self._policy == "verify" or not (self._rates and num_steps):
            return found
        # By what is known before the exit has drawn a token: which draft is taken must not go by what was drawn.
        num_worth = self.outcomes.num_worth(found, EXIT, num_steps, in_part=True)
        return found._replace(num_draft=torch.where(own > 0, num_worth, found.num_draft))

    def _keep_logits(self, drafts: Drafted, logits: torch.Tensor | None) -> None:
        if self.draft_logits is not None:
            is_certain = drafts.stage == LOOKUP if self._policy else None
            requests = self.idx_mapping[: len(drafts.num_draft)].long()
            keep_logits(self._draft_logits, requests, drafts, logits, is_certain)

    def _draft_nothing(self, num_reqs: int) -> None:
        """After a fault: tokens that are verified, and certain."""
        none = torch.zeros(num_reqs, dtype=torch.int32, device=self.device)
        self.draft_tokens[:num_reqs].zero_()
        self.outcomes.probs[:num_reqs].zero_()
        drafts = of_stage(0, self.draft_tokens[:num_reqs].int(), none, none.float())
        self.outcomes.keep(drafts, none, self._rates, Parts(none - 1, none - 1, none) if self._policy else None)
        self._keep_logits(drafts, None)

    @property
    def _rates(self) -> bool:
        """Whether chances are ours to say, from the stages' records."""
        return self.enable_adaptive_verification and self._policy is not None

    def _estimate(self, step: int, logits: torch.Tensor) -> None:
        """By vLLM's estimator, which it tells itself what became of the last drafts."""
        self._maybe_predict_acceptance(logits, self.idx_mapping[: len(logits)], self._steps[step])

    @property
    def _exit(self) -> EarlyExit:
        proposer: Any = self.barrier.proposer
        stage: EarlyExit = proposer if self._policy is None else proposer.named_stages()[EXIT][1]
        return stage

    @property
    def _cascade(self) -> OnDevice:
        proposer: Any = self.barrier.proposer
        if self._policy is None:
            sees = self._estimate if self.enable_adaptive_verification else None
            return OnDevice(proposer, None, False, self.num_speculative_steps, sees)
        return OnDevice(self._exit, self._policy, self._rates, self._limits.of_stages[EXIT])
