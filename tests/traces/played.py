"""Replays recorded texts to a cascade in an engine with given step costs. Without a clock, results never change."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages import Played, Request, loops_at, traffic_of

from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Int32Array, ProposerContext
from vllm_specplugins.methods import build_proposer
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.stage import stage_of
from vllm_specplugins.tools.replay.simulate import Player

NOISE = 0.01  # of the times that a gate is told
TOKENS = 4000  # of texts that are counted, at least
CELLS = ("copying", "continuing", "mixed", "sampled")


@dataclass(frozen=True, slots=True)
class Machine:
    """ms of a step, and of an exit's pass, each with so much more for every token in it."""

    step_ms: float
    token_ms: float
    pass_ms: float
    pass_token_ms: float

    def step(self, num_tokens: int) -> float:
        return self.step_ms + self.token_ms * num_tokens

    def passes(self, passes: Sequence[int]) -> float:
        """Of so many tokens each."""
        return sum(self.pass_ms + self.pass_token_ms * num_tokens for num_tokens in passes)


MACHINES = {"cpu": Machine(26.7, 1.3, 4.7, 0.3), "gpu": Machine(5.6, 0.0015, 0.7, 0.0003)}


def cells(trace: dict[tuple[str, float], list[Request]]) -> dict[str, list[Request]]:
    """Mixed is edits and continuations in turn, as much of each, and no further than either loops."""
    mixed = []
    for pair in zip(trace["edit", 0.0], trace["continue", 0.0], strict=True):
        end = min(loops_at(request.text[request.num_prompt :]) for request in pair)
        mixed += [Request(own.text[: own.num_prompt + end], own.num_prompt, own.said[:end]) for own in pair]
    sampled = [request for pair in zip(trace["edit", 1.0], trace["continue", 1.0], strict=True) for request in pair]
    found = dict(zip(CELLS, (trace["edit", 0.0], trace["continue", 0.0], mixed, sampled), strict=True))
    return {
        name: [request for request in own if len(request.text) > request.num_prompt + 8] for name, own in found.items()
    }


class Silent:
    """No speculation."""

    passes: Sequence[int] = ()

    def propose(self, batch: DraftBatch) -> Draft:
        return Draft.empty(batch.num_reqs)

    def observe(self, feedback: Feedback) -> None:
        pass

    def forget(self, request_ids: Sequence[str]) -> None:
        pass


class Engine:
    """Plays requests, so many at a time, to a proposer; sums what that takes."""

    def __init__(
        self,
        requests: Sequence[Request],
        batch: int,
        machine: Machine,
        width: int,
        build: Callable[[ProposerContext], Any],
        num_counted: int = TOKENS,
    ):
        num_tokens = sum(len(request.text) - request.num_prompt for request in requests)
        self._rounds, self._batch, self._machine = 2 + num_counted // num_tokens + batch // 4, batch, machine
        self._traffic = traffic_of(list(requests) * self._rounds)
        self._rng, self._drafting_ms, self._width = random.Random(1), 0.0, width
        length = self._traffic.max_model_len + width
        self.proposer = build(ProposerContext(1 << 15, length, batch, width, lambda text: [], agreed=self._agreed))
        steps = {num_tokens: machine.step(num_tokens) for num_tokens in range(1, 1 + batch * (1 + width))}
        stage_of(getattr(self.proposer, "proposer", self.proposer)).use_profile(steps)

    def _agreed(self, value: Any) -> Any:
        """A gate's times: of the drafting, those of the machine."""
        match value:
            case [float(), float(), int(), *stages]:
                return [value[0], self._drafting_ms, value[2], *(self._drafting_ms for _ in stages)]
        return value

    def propose(self, batch: DraftBatch, feedback: Feedback) -> Any:
        if len(batch.request_ids):
            self.proposer.observe(feedback)
        return self.proposer.propose(batch)

    def forget(self, request_ids: Sequence[str], texts: Mapping[str, Int32Array]) -> None:
        self.proposer.forget(request_ids)

    def played(self) -> float:
        """Tokens a ms, from when as many requests have begun as there are until none waits: the batch is full then."""
        ms, num_tokens, self._drafting_ms = 0.0, 0, 0.0
        length = self._traffic.max_model_len + self._width
        player = Player(self._traffic, self._width, length, self)
        waiting, running = list(range(len(self._traffic.histories))), list[int]()
        num_rest = len(waiting) - len(waiting) // self._rounds
        self._rng.shuffle(waiting)
        while waiting:
            running += [waiting.pop() for _ in range(min(len(waiting), self._batch - len(running)))]
            decoding = [number for number in running if not player.is_new(number)]
            step_ms = self._machine.step(len(decoding) + sum(map(player.num_drafted, decoding))) if decoding else 0.0
            told_ms = step_ms * self._rng.lognormvariate(0, NOISE) if len(decoding) == len(running) else None
            fates = player.step(running, told_ms)
            if len(waiting) < num_rest:
                ms += step_ms + self._drafting_ms * bool(decoding)
                num_tokens += sum(fate.emitted for fate in fates)
            self._drafting_ms = self._machine.passes(self.proposer.passes)
            over = [number for number in running if player.has_ended(number)]
            player.forget(over)
            running = [number for number in running if number not in over]
        return num_tokens / ms


def speed_of(
    config: dict[str, Any], requests: Sequence[Request], batch: int, machine: Machine, num_counted: int = TOKENS
) -> float:
    """Tokens a ms of a cascade; a stage that is built into the engine offers what the last exit says."""
    parsed = parse_config(config)
    stages = parsed.method_config.stages
    offered = sum(stage.num_speculative_tokens or 0 for stage in stages if stage.method == "draft_model")
    width = parsed.common.num_speculative_tokens

    def build(context: ProposerContext) -> Played:
        return Played(build_proposer(parsed, context), requests, offered)

    return Engine(requests, batch, machine, width, build, num_counted).played()
