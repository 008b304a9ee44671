"""What Model Runner V2 decides about drafts, step by step, without an engine: our speculator's own code and vLLM's
manager of adaptive verification on tensors of the host, an exit that says what was recorded (tests/traces/exits.py).
Copies arrive as late as on a device. R: requests of a step, K: most tokens of a draft.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from exits import Said
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from vllm_specplugins.config import CascadeConfig, PromptLookupConfig, stage_configs
from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.engine.adaptive.budget import Budget, Confidences
from vllm_specplugins.engine.v2.feedback import draft_tracker as outcomes
from vllm_specplugins.engine.v2.speculators.device import DeviceSpeculator
from vllm_specplugins.engine.v2.speculators.draft_limits import DraftLimits
from vllm_specplugins.engine.v2.speculators.token_histories import TokenHistories
from vllm_specplugins.methods import build_proposer, parse_config
from vllm_specplugins.target import Sampling, Target

outcomes.new_confidences = lambda *sizes: None  # there is no engine; see DeviceStep._publish
VOCAB_SIZE = 3072  # the demo model's
Ints = npt.NDArray[np.int64]


class Recorded:
    """Layers that say what an exit said; where it was never asked, what it said about the text at that place."""

    def __init__(self, texts: Sequence[Said]):
        self._starts = np.cumsum([0, *(len(said.token_ids) for said in texts)])
        self._tokens = np.concatenate([said.token_ids for said in texts])
        self._drafted = np.concatenate([said.drafted for said in texts])
        self._chances = np.concatenate([said.chances for said in texts]).astype(np.float32)
        self.calls: list[int] = []  # tokens fed in each, since `begin`

    def begin(self, texts: Ints, lengths: Ints) -> None:
        """A step of these texts, by index, of which so much is known."""
        self._base, self._end = self._starts[texts], self._starts[texts + 1] - 1
        self._origin = lengths - 1  # the newest token that is the text's own
        self._own, self._is_text = np.full(len(texts), -1), np.ones(len(texts), bool)
        self.calls = []

    def hidden_states(self, end_layer: int, token_ids: Any, positions: Any, normed: bool = True) -> Any:
        """Logits in place of states."""
        self.calls.append(token_ids.numel())
        fed, places = token_ids.numpy().reshape(len(self._base), -1), positions.numpy().reshape(len(self._base), -1)
        return torch.stack([self._fed(fed[:, k], places[:, k]) for k in range(fed.shape[1])], dim=1).view(
            *token_ids.shape, VOCAB_SIZE
        )

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def argmax(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.argmax(dim=-1)

    def _fed(self, token_ids: Ints, places: Ints) -> torch.Tensor:
        self._is_text &= token_ids == self._tokens[np.minimum(self._base + places, self._end)]
        self._origin = np.where(~self._is_text & (token_ids == self._own), self._origin, places)
        rows = np.minimum(self._base + self._origin, self._end)
        steps = np.minimum(places - self._origin, self._drafted.shape[1] - 1)
        self._own = self._drafted[rows, steps].astype(np.int64)
        accept_probs = torch.from_numpy(self._chances[rows, steps]).clamp(1e-3, 1 - 1e-4)[:, None]
        logits = ((1 - accept_probs) / (VOCAB_SIZE - 1)).log().expand(-1, VOCAB_SIZE).clone()
        return logits.scatter_(1, torch.from_numpy(self._own)[:, None], accept_probs.log())


class DeviceStep:
    """Drafts for requests in slots, and chooses what is verified.

    Args:
        texts: that requests are of.
        tables: vLLM's cost tables.
    """

    def __init__(self, config: dict[str, Any], texts: Sequence[Said], num_slots: int, tables: Any, trims: bool):
        spec, width = parse_config(config), int(config["num_speculative_tokens"])
        longest = max(len(said.token_ids) for said in texts) + width + 1
        self.exit, self.width, self._texts = Recorded(texts), width, texts
        self._states = SimpleNamespace(
            max_num_reqs=num_slots, max_model_len=longest, req_id_to_index={}, device="cpu",
            all_token_ids=SimpleNamespace(gpu=torch.zeros(num_slots, longest, dtype=torch.int32)),
            total_len=SimpleNamespace(gpu=torch.zeros(num_slots, dtype=torch.int32)),
            num_computed_tokens_np=np.zeros(num_slots, np.int32),
            prefill_len=SimpleNamespace(np=np.zeros(num_slots, np.int32)),
        )  # fmt: skip
        cascade = spec.own if isinstance(spec.own, CascadeConfig) else None
        self._own: Any = object.__new__(DeviceSpeculator)
        own, stages = self._own, cascade.stages if cascade else ()
        model_config, device = SimpleNamespace(max_model_len=longest), torch.device("cpu")
        own._limits = DraftLimits(self._states, model_config, width, device, stages)
        own.outcomes = outcomes.DraftTracker(max(1, len(stages)), self._states, width, device)
        own.texts = TokenHistories(self._states, width, stage_configs(spec, PromptLookupConfig)[0], device)
        own.enable_adaptive_verification, own.num_speculative_steps = trims, width
        own.draft_tokens = torch.zeros(num_slots, width, dtype=torch.int64)
        own.draft_logits, own._policy, self._newest = None, cascade and cascade.policy, None
        self._manager: Any = self._new_manager(num_slots, tables)
        self._confidence = np.ones((num_slots, width), np.float32)
        self._stale = np.ones((num_slots + 1, width), np.float32)
        newest = torch.ones(num_slots + 1, width)
        Budget(self._manager, Confidences(newest, newest, self._stale))
        if cascade:
            context = ProposerContext(VOCAB_SIZE, longest, num_slots, width, lambda text: [])
            exits: Any = build_proposer(cascade.stages[1], context)
            exits.set_max_model_len(longest)
            own.barrier = SimpleNamespace(proposer=SimpleNamespace(exit=exits))
        self._depth = own._limits.of_stages[1] if cascade else 0

    def start(self, slot: int, text: int) -> None:
        """A request of a text; its first token has been sampled."""
        said, states = self._texts[text], self._states
        new = [SimpleNamespace(req_id=str(slot), sampling_params=None)]
        states.req_id_to_index[str(slot)] = slot
        states.all_token_ids.gpu[slot, : len(said.token_ids)] = torch.from_numpy(said.token_ids)
        self._own._limits.add(new)
        self._own.outcomes.add(new)
        self._manager.add_request(slot)
        self._confidence[slot] = 1.0
        if self._newest is not None:
            self._newest[slot] = 1.0

    def trimmed(self, slots: Ints, num_draft: Ints) -> Ints:
        """How many tokens of each draft are verified, of so many that are scheduled."""
        manager = self._manager
        if not self._own.enable_adaptive_verification:
            return num_draft
        drafts = {str(slot): [0] * int(count) for slot, count in zip(slots, num_draft, strict=True)}
        budget = manager.get_num_tokens({name: 1 + len(draft) for name, draft in drafts.items()}, drafts) - len(slots)
        capacities = torch.from_numpy(num_draft.astype(np.int32))
        if budget == 0:
            capacities.zero_()
        elif budget < num_draft.sum():
            adaptive_verification._assign_draft_token_budget(
                torch.from_numpy(self._confidence), torch.from_numpy(slots), capacities, budget, self.width
            )
        return capacities.numpy().astype(np.int64)

    def draft(
        self, slots: Ints, texts: Ints, lengths: Ints, num_sampled: Ints, num_rejected: Ints
    ) -> tuple[Ints, Ints]:
        """Drafts [R, K] behind so much of these texts, and their lengths."""
        own, states, num_reqs = self._own, self._states, len(slots)
        states.total_len.gpu[slots] = torch.from_numpy(lengths).int()
        sampled, rejected = (torch.from_numpy(counts).int() for counts in (num_sampled, num_rejected))
        own._limits.begin(self.width)
        own.outcomes.begin(num_reqs, torch.from_numpy(slots), sampled, rejected)
        longest = int(lengths.max())
        target = None
        if self._depth:
            self.exit.begin(texts, lengths)
            last = states.all_token_ids.gpu[slots, lengths - 1]
            sampling = Sampling(torch.zeros(num_reqs), torch.zeros(num_reqs, dtype=torch.int64))
            target = Target(self.exit, last, torch.from_numpy(lengths.copy()), None, sampling)  # type: ignore[arg-type]
        batch = DraftBatch([""] * num_reqs, (), lengths, [{}] * num_reqs, target)
        own._draft_on_device(batch, longest, self._depth)
        self._publish(slots)
        num_draft = own.outcomes._num_draft[:num_reqs].numpy().astype(np.int64)
        return own.draft_tokens[:num_reqs].numpy().copy(), num_draft

    def stop(self, slot: int) -> None:
        """A request is over."""

    def _publish(self, slots: Ints) -> None:
        """The newest confidences stay on the device; a budget sees those of the step before."""
        if self._newest is not None:
            self._stale[:-1] = self._newest
        self._confidence[slots] = self._own.outcomes.probs[: len(slots)].numpy()
        self._newest = self._confidence.copy()

    def _new_manager(self, num_slots: int, tables: Any) -> Any:
        manager: Any = object.__new__(AdaptiveVerificationManager)
        manager.req_states, manager.num_speculative_steps, manager.num_bonus_tokens = self._states, self.width, 1
        manager._max_total_logits, manager.cost_tables = 1 << 20, tables
        manager._stale_confidences = [SimpleNamespace(np=np.ones((num_slots, self.width), np.float32))]
        manager._stale_idx, manager._pending_resets = 0, []
        manager._cu_num_logits, manager.query_start_loc = torch.zeros(2, num_slots + 1, dtype=torch.int32)
        manager._confidence_probs = torch.ones(num_slots, self.width)
        return manager
