"""A server in play: vLLM's scheduler and ours, a worker that draws numbers, and a clock that counts a step's tokens."""

from typing import Any

import numpy as np
from played_scheduler import VOCAB_SIZE, Played
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_specplugins.engine.messages import StepFacts, send_facts
from vllm_specplugins.gate.budget import Costs, StepBudget
from vllm_specplugins.gate.step_times import StepTimes, lengths_up_to
from vllm_specplugins.tools.replay.costs import CostTable

CONTEXT = 1000  # tokens of a request that decodes, for the costs
COPY_PROB = 0.9  # of a draft token to be right, in a request that copies
COPY_TOKENS, OWN_TOKENS = 40, 60  # the mean length of a stretch that is copied, and of one that is not


class PlayedServer(Played):
    """Requests that decode without an end copy a part of their text; of a draft the worker verifies what pays, by
    V2's rule.

    Attributes:
        now: ms, when the oldest step that is under way began.
        first_ms: from a request's arrival to its first token.
    """

    def __init__(self, config: Any, costs: CostTable, num_decoding: int, tokens_a_step: int, **arguments: Any):
        sizes = {"max_num_batched_tokens": tokens_a_step, "max_num_seqs": num_decoding + 64, "max_model_len": 8192}
        super().__init__(
            config, num_blocks=1 << 17, async_scheduling=True, enable_prefix_caching=False, **sizes, **arguments
        )
        self._costs, self.now, self._device_ms = costs, 0.0, 0.0
        self._verify_ms = np.array([costs.step_ms(tokens) for tokens in range(tokens_a_step + 1)])
        lengths = getattr(self.scheduler, "_lengths", None)
        if lengths is not None:
            lengths._clock = lambda: self.now / 1000
            lengths.times = StepTimes(lengths_up_to(self.scheduler.num_spec_tokens), trims=True)
        most = self.scheduler.num_spec_tokens
        self._copies = dict[str, bool]()
        self._rule = StepBudget(num_decoding + 64, most)
        self._arrived, self.first_ms = dict[str, float](), dict[str, float]()
        self._ends: list[float] = []
        for row in range(num_decoding):
            self.add(f"d{row}", [row % VOCAB_SIZE] * 8, 8000)

    def arrive(self, name: str, at_ms: float, length: int = 1000) -> None:
        """A prompt, whose answer is one token."""
        self._arrived[name] = at_ms
        self.add(name, [1] * length, 1)

    def step(self) -> None:
        super().step()
        if len(self._ends) == self.depth or not self.scheduler.has_requests():
            self.now = self._ends.pop(0)

    def _run(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        names = list(scheduled.num_scheduled_tokens)
        planned = {name: len(ids) for name, ids in scheduled.scheduled_spec_decode_tokens.items()}
        num_planned = sum(planned.values())
        num_fixed = scheduled.total_num_scheduled_tokens - num_planned
        context = CONTEXT * sum(name[0] == "d" for name in names)
        verified = self._trimmed(planned, num_fixed, self._costs.context_ms * context)
        sampled = [self._sampled(name, verified.get(name, 0)) for name in names]
        num_verified = sum(verified.values())
        step_ms = self._costs.step_ms(num_fixed + num_verified, num_context=context)
        end = max(self._ends[-1] if self._ends else self.now, self.now) + step_ms
        self._ends.append(end)
        for name, tokens in zip(names, sampled, strict=True):
            if tokens and name in self._arrived:
                self.first_ms[name] = end - self._arrived.pop(name)
        output = ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, sampled)
        if planned:
            send_facts(output, StepFacts(num_verified=num_verified))
        return output

    def _trimmed(self, planned: dict[str, int], num_fixed: int, context_ms: float) -> dict[str, int]:
        """How many tokens of each draft are verified: there are none where a request does not copy."""
        num_planned = sum(planned.values())
        if not num_planned:
            return {}
        probs = np.zeros((len(planned), self.scheduler.num_spec_tokens), np.float32)
        for row, name in enumerate(planned):
            probs[row] = COPY_PROB if self._copies.get(name) else 0.0
        slots, counts = np.arange(len(planned)), np.array(list(planned.values()))
        batch = Costs(context_ms, self._verify_ms), num_fixed, counts.tolist(), num_planned
        budget = self._rule.choose(*batch, lambda: (probs, slots, len(planned)))
        survival = np.where(np.arange(probs.shape[1]) < counts[:, None], probs.cumprod(1), -1.0)
        admitted = np.zeros(survival.size, bool)
        admitted[np.argsort(-survival.ravel(), kind="stable")[:budget]] = True
        return dict(zip(planned, admitted.reshape(survival.shape).sum(1).tolist(), strict=True))

    def _sampled(self, name: str, num_verified: int) -> list[int]:
        request = self.scheduler.requests[name]
        if request.is_prefill_chunk:
            return []
        copies, rng = self._copies.get(name, False), self._rng
        num = 1 + int((rng.random(num_verified) < COPY_PROB * copies).cumprod().sum())
        length = COPY_TOKENS if copies else OWN_TOKENS
        if rng.random() < num / length:
            self._copies[name] = not copies
        self.accepted += num - 1
        return [1] * num


def served(server: PlayedServer, num_ms: float, waiting: int = 0, rate: float = 0.0, seed: int = 0) -> dict[str, float]:
    """Plays so many ms, after as many again. Returns what came out.

    Args:
        waiting: prompts that always wait.
        rate: prompts a ms that arrive.
    """
    rng, number, start = np.random.default_rng(seed), 0, 0.0
    emitted = num_first = 0
    next_at = rng.exponential(1 / rate) if rate else np.inf
    while server.now < 2 * num_ms:
        while next_at <= server.now:
            server.arrive(f"p{number}", next_at)
            number, next_at = number + 1, next_at + rng.exponential(1 / rate)
        while waiting and len(server.scheduler.waiting) < waiting:
            server.arrive(f"p{number}", server.now)
            number += 1
        server.step()
        if not start and server.now >= num_ms:
            start, emitted, num_first = server.now, sum(map(len, server.emitted.values())), len(server.first_ms)
    ms = server.now - start
    first = list(server.first_ms.values())[num_first:]
    tokens = sum(map(len, server.emitted.values())) - emitted
    result = {"tokens a second": 1000 * tokens / ms, "prompts a second": 1000 * len(first) / ms}
    if first:
        result |= {"TTFT p50": float(np.median(first)), "TTFT p99": float(np.quantile(first, 0.99))}
    return result
