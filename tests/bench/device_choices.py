"""Who drafts, and what of it is verified: nobody, the device's code, or the host's cascade.

See bench_device_gate.py. R: requests of a step, K: most tokens of a draft.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from device_step import VOCAB_SIZE, DeviceStep, Ints, Recorded
from exits import Said

from vllm_specplugins.draft import DraftBatch, Feedback, ProposerContext
from vllm_specplugins.methods import build_proposer, parse_config
from vllm_specplugins.target import Sampling, Target

LOOKUP = {"method": "prompt_lookup"}


class Costs(Protocol):
    """ms of steps: what is verified and how much context there is; passes of an exit, by the tokens in each."""

    tables: Any

    def verify_ms(self, num_tokens: int, num_context: int) -> float: ...

    def exit_ms(self, calls: Sequence[int], num_context: int) -> float: ...


class Nothing:
    """Nobody drafts."""

    calls: Sequence[int] = ()  # of the exit in the last step, by tokens

    def trimmed(self, slots: Ints, num_draft: Ints) -> Ints:
        """How much of each draft is verified, [R]."""
        return num_draft

    def start(self, slot: int, text: int) -> None:
        """A request of this text, by index."""

    def stop(self, slot: int) -> None:
        """It is over."""

    def draft(
        self, slots: Ints, texts: Ints, lengths: Ints, num_sampled: Ints, num_rejected: Ints, step_ms: float | None
    ) -> tuple[Ints, Ints]:
        """[R, K] and [R]: drafts behind so much of these texts, and their lengths.

        Args:
            num_sampled, num_rejected: [R], of the last step, which took so long; None: it held a prompt.
        """
        return np.zeros((len(slots), 1), np.int64), slots * 0


class OnDevice(Nothing):
    """The device's own code; with `trims` adaptive verification and the gate, else all that is found."""

    def __init__(self, config: dict[str, Any], texts: Sequence[Said], batch: int, costs: Costs, trims: bool = True):
        self._own, self._trims = DeviceStep(config, texts, batch, costs.tables, trims), trims

    def start(self, slot: int, text: int) -> None:
        self._own.start(slot, text)

    def stop(self, slot: int) -> None:
        self._own.stop(slot)

    def trimmed(self, slots: Ints, num_draft: Ints) -> Ints:
        return self._own.trimmed(slots, num_draft * 0 + self._own.width) if self._trims else num_draft

    def draft(
        self, slots: Ints, texts: Ints, lengths: Ints, num_sampled: Ints, num_rejected: Ints, step_ms: float | None
    ) -> tuple[Ints, Ints]:
        found = self._own.draft(slots, texts, lengths, num_sampled, num_rejected)
        self.calls = self._own.exit.calls
        return found


class OnHost(Nothing):
    """The cascade of the host, whose drafting takes the time of the exit's passes."""

    def __init__(self, config: dict[str, Any], texts: Sequence[Said], batch: int, costs: Costs):
        config = config if "stages" in config else {**config, "method": "cascade", "stages": [LOOKUP]}
        longest = max(len(said.token_ids) for said in texts) + 8
        self._exit, self._texts, self._costs = Recorded(texts), texts, costs
        self._width = config["num_speculative_tokens"]
        context = ProposerContext(VOCAB_SIZE, longest, batch, self._width, lambda text: [], agreed=self._told)
        self._own: Any = build_proposer(parse_config(config), context)
        self._own.set_max_model_len(longest)
        self._drafting_ms, self._num_started = 0.0, 0
        self._names: dict[int, str] = {}

    def start(self, slot: int, text: int) -> None:
        self._num_started += 1
        self._names[slot] = str(self._num_started)

    def stop(self, slot: int) -> None:
        self._own.forget([self._names[slot]])

    def draft(
        self, slots: Ints, texts: Ints, lengths: Ints, num_sampled: Ints, num_rejected: Ints, step_ms: float | None
    ) -> tuple[Ints, Ints]:
        names, room = [self._names[slot] for slot in slots.tolist()], np.full(len(slots), self._width, np.int32)
        fates = num_sampled - 1 + num_rejected, num_sampled - 1
        self._own.observe(Feedback(names, *(counts.astype(np.int32) for counts in fates), step_ms))
        histories = [self._texts[text].token_ids[:length] for text, length in zip(texts, lengths, strict=True)]
        last = torch.tensor([int(history[-1]) for history in histories], dtype=torch.int32)
        sampling = Sampling(torch.zeros(len(names)), torch.zeros(len(names), dtype=torch.int64))
        self._exit.begin(texts, lengths)
        target = Target(self._exit, last, torch.from_numpy(lengths.copy()), None, sampling)  # type: ignore[arg-type]
        draft = self._own.propose(DraftBatch(names, histories, room, [{}] * len(names), target))
        self.calls = self._exit.calls
        self._drafting_ms = self._costs.exit_ms(self.calls, int(lengths.sum()))
        token_ids = np.zeros((len(names), self._width), np.int64)
        found = np.asarray(draft.token_ids)
        token_ids[:, : found.shape[1]] = found
        return token_ids, np.asarray(draft.num_draft, np.int64)

    def _told(self, value: Any) -> Any:
        match value:  # a gate's times: of a step and of drafting; tokens of context; of the exit alone
            case [float() as step_ms, float(), int() as num_context, *stages]:
                own_ms = [0.0] * (len(stages) - 1) + [self._drafting_ms] * bool(stages)
                return [step_ms, self._drafting_ms, num_context, *own_ms]
        return value
