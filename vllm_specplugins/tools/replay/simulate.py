"""A simulated engine: recorded requests in the order in which they came, so many at a time, in steps that cost time.

Prompts are free, since they cost the same whatever is drafted: what is counted is decoding. A request that comes while
others decode takes part from the next step on, and makes that step say nothing to a gate, as in an engine.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vllm_specplugins.counters import faults_of
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Proposer, ProposerContext
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.target import Offer
from vllm_specplugins.tools.replay.costs import Load
from vllm_specplugins.tools.replay.data import Traffic
from vllm_specplugins.tools.replay.player import Fate, Player
from vllm_specplugins.tools.replay.rivals import Drafter

PLACE = 32  # tokens of an output that count as one place
Build = Callable[[ProposerContext], Proposer]
Tokenize = Callable[[str], list[int]]


@dataclass(slots=True)
class Totals:
    """Sums over all steps of single requests after their first tokens.

    Args:
        drafts: steps that verified a draft.
        step_ms: of the engine, drafting excluded.
        drafting_ms: of the proposer and what is around it, on this machine or as the load says.
        num_faults: of the proposer.
        by_request: of each, by number, tokens emitted and its share of the time.
        along: by PLACE tokens of a request's output, tokens emitted in steps that begin there, and such steps.
    """

    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    step_ms: float = 0.0
    drafting_ms: float = 0.0
    num_faults: int = 0
    by_request: dict[int, tuple[int, float]] = field(default_factory=dict)
    along: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, fates: Mapping[int, Fate], step_ms: float, drafting_ms: float, places: Sequence[int]) -> None:
        """Adds a step of these requests, each with so many tokens of output at its start (`places`). A request whose
        prompt the step computed got nothing."""
        self.step_ms += step_ms
        self.drafting_ms += drafting_ms
        for place, (number, (drafted, accepted, emitted)) in zip(places, fates.items(), strict=True):
            tokens, ms = self.by_request.get(number, (0, 0.0))
            its_tokens, its_steps = self.along.get(place // PLACE, (0, 0))
            self.along[place // PLACE] = its_tokens + emitted, its_steps + (emitted > 0)
            self.by_request[number] = tokens + emitted, ms + (step_ms + drafting_ms) / len(fates)
            self.steps += emitted > 0
            self.drafts += drafted > 0
            self.drafted += drafted
            self.accepted += accepted
            self.emitted += emitted

    @property
    def ms(self) -> float:
        return self.step_ms + self.drafting_ms

    @property
    def tokens_per_ms(self) -> float:
        return self.emitted / self.ms if self.ms else 0.0


def simulate(
    traffic: Traffic,
    build: Build | None,
    num_draft: int,
    load: Load,
    tokenize: Tokenize = lambda text: [],
    advance: Callable[[], None] = lambda: None,
    drafter: Drafter | None = None,
) -> Totals:
    """Plays all of the traffic.

    Args:
        build: makes the proposer; None: nothing is drafted.
        num_draft: K.
        tokenize: for the proposer.
        advance: called whenever a request is over.
        drafter: that the proposer is offered the drafts of, as of a stage built into the engine.
    """
    engine = _Engine(traffic, build, num_draft, load, tokenize, drafter)
    totals, idle_ms = engine.totals, 0.0
    waiting, running = deque(range(len(traffic.histories))), list[int]()
    while waiting or running:
        clock_ms = totals.ms + idle_ms
        while waiting and len(running) < load.batch and traffic.start_ms[waiting[0]] <= clock_ms:
            running.append(waiting.popleft())
        if not running:
            idle_ms += traffic.start_ms[waiting[0]] - clock_ms
            continue
        for number in engine.step(running):
            running.remove(number)
            advance()
    if engine.barrier:
        totals.num_faults = sum(faults_of(asdict(engine.barrier.totals())).values())
    return totals


class _Engine:
    def __init__(
        self,
        traffic: Traffic,
        build: Build | None,
        num_draft: int,
        load: Load,
        tokenize: Tokenize,
        drafter: Drafter | None,
    ):
        self.totals = Totals()
        self._traffic, self._drafter, self._drafter_ms = traffic, drafter, 0.0
        self.barrier: FaultBarrier | None = None
        self._load, self._num_reqs, self._proposing_ms = load, 0, 0.0
        max_model_len = traffic.max_model_len + num_draft
        if build is not None:
            context = ProposerContext(
                vocab_size=traffic.vocab_size,
                max_model_len=max_model_len,
                max_num_reqs=load.batch,
                max_num_draft=num_draft,
                tokenize=tokenize,
                agreed=self._agreed,
            )
            self.barrier = FaultBarrier(build(context), traffic.vocab_size, num_draft, None)
        forget = self.barrier.forget if self.barrier else lambda numbers: None
        self._player = Player(traffic, num_draft, max_model_len, self._propose, forget)

    def step(self, running: Sequence[int]) -> list[int]:
        """One step of these requests; those that are over with it."""
        player = self._player
        decoding = [number for number in running if not player.is_new(number)]
        num_draft = sum(map(player.num_drafted, decoding))
        context = sum(player.lengths[number] for number in decoding)
        step_ms = self._load.step_ms(len(decoding), num_draft, context) if decoding else 0.0
        places = [player.lengths[number] - self._traffic.prompt_lengths[number] for number in running]
        fates = player.step(running, step_ms if len(decoding) == len(running) else None)
        drafting_ms = self._drafting_ms(self._proposing_ms) + self._drafter_ms if self.barrier else 0.0
        self.totals.add(dict(zip(running, fates, strict=True)), step_ms, drafting_ms, places)
        over = [number for number in running if player.has_ended(number)]
        player.forget(over)
        return over

    def _propose(self, batch: DraftBatch, feedback: Feedback) -> Draft:
        self._num_reqs = batch.num_reqs
        if self.barrier is None:
            return Draft.empty(batch.num_reqs)
        if self._drafter is not None:
            batch, feedback = self._offered(self._drafter, batch, feedback)
        start = time.thread_time()
        draft = self.barrier.propose(batch, feedback)
        self._proposing_ms = (time.thread_time() - start) * 1000
        asked = getattr(self.barrier.proposer, "asked", None)  # by an oracle, which asks when it has chosen
        if self._drafter is not None and asked is not None:
            self._drafter_ms = self._drafter.step_ms(batch.num_reqs, asked)
        return draft

    def _offered(self, drafter: Drafter, batch: DraftBatch, feedback: Feedback) -> tuple[DraftBatch, Feedback]:
        """The drafter runs before ours is asked, and its time is a part of the step, as in an engine."""
        assert self.barrier is not None
        is_needed = self.barrier.needs_built_in(batch, feedback.num_accepted)
        self._drafter_ms = drafter.step_ms(batch.num_reqs, is_needed)
        token_ids = drafter.draft(self._traffic, batch.request_ids, batch.token_ids)
        offer = Offer(token_ids[:, : None if is_needed else 0], self._drafter_ms)
        if feedback.step_ms is not None:
            feedback = replace(feedback, step_ms=feedback.step_ms + self._drafter_ms)
        return replace(batch, offer=offer), feedback

    def _drafting_ms(self, measured: float) -> float:
        if self._load.draft_us is not None:
            return self._load.draft_us * self._num_reqs / 1000
        # What drafts on the device is in the host's share.
        return 0.0 if self._load.host and not self._load.waits else measured

    def _agreed(self, value: Any) -> Any:
        """What ranks agree on: a gate's times, of which the drafting's are those of the load, and drafts."""
        match value:
            case [float() as step_ms, float() as drafting_ms, *others]:
                return [step_ms, self._drafting_ms(drafting_ms), *others]
        return value
