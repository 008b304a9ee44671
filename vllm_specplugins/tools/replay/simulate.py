"""Simulates an engine: recorded requests in order, several at a time, in steps that take time. Prompts take no time,
since drafts do not affect their time. A request that arrives while others decode joins in the next step; as in an
engine, a gate does not learn from that step. The recording has the target's tokens, and a draft is accepted up to the
first token that differs."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from vllm_specplugins.counters import faults_of
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Int32Array, Offer, ProposerContext
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.isolation.guard import Texts
from vllm_specplugins.request_options import draft_limit
from vllm_specplugins.stage import stage_of
from vllm_specplugins.structures.drafts import DraftArrays
from vllm_specplugins.tools.replay.candidates import Build
from vllm_specplugins.tools.replay.costs import Load
from vllm_specplugins.tools.replay.data import Traffic, name_of
from vllm_specplugins.tools.replay.drafter import Drafter
from vllm_specplugins.tools.replay.on_device import DeviceLengths


class Fate(NamedTuple):
    """The numbers of verified, accepted and emitted tokens of a request in a step; 0 in its first step."""

    drafted: int
    accepted: int
    emitted: int


class Player:
    """Plays recorded texts (such as Traffic's) against a fault barrier, or another object with `propose` and `forget`.
    The caller decides which requests take part in a step."""

    def __init__(self, recorded: Any, max_num_draft: int, max_model_len: int, barrier: Any):
        self._histories: Sequence[Int32Array] = recorded.histories
        self._recorded, self._max_num_draft, self._max_model_len = recorded, max_num_draft, max_model_len
        self._barrier = barrier
        # A new request has its prompt, and the token that its prefill emits.
        self.lengths: list[int] = [length + 1 for length in recorded.prompt_lengths]
        self._drafts: dict[int, list[int]] = {}  # to be verified
        self._has_arrived: set[int] = set()

    def num_drafted(self, number: int) -> int:
        return len(self._drafts.get(number, ()))

    def is_new(self, number: int) -> bool:
        return number not in self._has_arrived

    def has_ended(self, number: int) -> bool:
        return self.lengths[number] >= len(self._histories[number])

    def step(self, running: Sequence[int], step_ms: float | None = None) -> list[Fate]:
        """Verifies the drafts of these requests, and drafts for them; `step_ms` is a value of the feedback."""
        fates = [self._verify(number) for number in running]
        self._has_arrived.update(running)
        batch = self.batch(running)
        drafted, accepted, _ = (np.array(counts, np.int32) for counts in zip(*fates, strict=True))
        proposed = self._barrier.propose(batch, Feedback(batch.request_ids, drafted, accepted, step_ms))
        for number, tokens, count in zip(running, proposed.token_ids, proposed.num_draft, strict=True):
            self._drafts[number] = tokens[:count].tolist()
        return fates

    def cut(self, number: int, count: int) -> None:
        """Verifies `count` tokens in place of the whole draft; tokens after its end are wrong."""
        draft = self._drafts.get(number, [])
        self._drafts[number] = draft[:count] + [-1] * (count - len(draft))

    def forget(self, numbers: Iterable[int]) -> None:
        """Drops the drafts of finished or preempted requests."""
        for number in numbers:
            self._drafts.pop(number, None)
            name = name_of(number)
            self._barrier.forget([name], {name: self._histories[number][: self.lengths[number]]})

    def batch(self, running: Sequence[int]) -> DraftBatch:
        options, lengths = [self._recorded.options[number] for number in running], self.lengths
        limits = [
            draft_limit(its, lengths[number], self._max_num_draft, self._max_model_len)
            for number, its in zip(running, options, strict=True)
        ]
        return DraftBatch(
            request_ids=[name_of(number) for number in running],
            token_ids=[self._histories[number][: lengths[number]] for number in running],
            max_num_draft=np.array(limits, np.int32),
            options=options,
            prompt_lengths=[self._recorded.prompt_lengths[number] for number in running],
        )

    def _verify(self, number: int) -> Fate:
        draft = self._drafts.pop(number, [])
        if self.is_new(number):
            return Fate(0, 0, 0)
        history, length = self._histories[number], self.lengths[number]
        truth = history[length : length + len(draft)]
        accepted = int(np.cumprod(np.equal(draft[: len(truth)], truth)).sum())
        self.lengths[number] = min(length + accepted + 1, len(history))  # the target emits one more token
        return Fate(len(draft), accepted, self.lengths[number] - length)


@dataclass(slots=True)
class Totals:
    """Sums over all steps of single requests after their first tokens. `by_request` maps the number of a request to its
    emitted tokens and its share of the time in ms."""

    steps: int = 0
    drafts: int = 0  # steps that verified a draft
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    step_ms: float = 0.0  # ms of the engine without drafting
    drafting_ms: float = 0.0  # ms of the proposer and its barrier, measured on this machine or set by the load
    num_faults: int = 0  # of the proposer
    by_request: dict[int, tuple[int, float]] = field(default_factory=dict)

    def add(self, fates: Mapping[int, Fate], step_ms: float, drafting_ms: float) -> None:
        """Adds a step of these requests. A request emits nothing in a step that computes its prompt."""
        self.step_ms += step_ms
        self.drafting_ms += drafting_ms
        for number, (drafted, accepted, emitted) in fates.items():
            tokens, ms = self.by_request.get(number, (0, 0.0))
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
    text: Mapping[str, Any] = MappingProxyType({}),
    advance: Callable[[], None] = lambda: None,
    drafter: Drafter | None = None,
    lengths: type[DeviceLengths] | None = None,
) -> Totals:
    """Plays all traffic against the proposer that `build` returns (None: no drafts). `drafter` may offer drafts to it,
    like a drafter that is built into the engine. With `lengths` the proposer is a lookup without a gate, which drafts
    on the device."""
    given = traffic, num_draft, load, drafter
    engine = _Engine(*given) if lengths is None else _DeviceEngine(*given, lengths)
    if build is not None:
        context = ProposerContext(
            vocab_size=traffic.vocab_size,
            max_model_len=traffic.max_model_len + num_draft,
            max_num_reqs=load.batch,
            max_num_draft=num_draft,
            **{"tokenize": lambda text: [], **text},
            agreed=engine.agreed,
        )
        engine.barrier = FaultBarrier(build(context), traffic.vocab_size, num_draft, None)
        if (stage := stage_of(engine.barrier.proposer)).has_gate:
            stage.use_profile(load.profile(num_draft))
    waiting, running = deque(range(len(traffic.histories))), list[int]()
    while waiting or running:
        running += [waiting.popleft() for _ in range(min(len(waiting), load.batch - len(running)))]
        for number in engine.step(running):
            running.remove(number)
            advance()
    if engine.barrier:
        engine.totals.num_faults = sum(faults_of(asdict(engine.barrier.totals())).values())
    return engine.totals


class _Engine:
    """Adds the times of a load and the drafts of a drafter to the steps of a player."""

    def __init__(self, traffic: Traffic, num_draft: int, load: Load, drafter: Drafter | None):
        self.totals = Totals()
        self.barrier: FaultBarrier | None = None
        self._traffic, self._load, self._drafter = traffic, load, drafter
        self._num_reqs, self._drafter_ms, self._proposing_ms = 0, 0.0, 0.0
        self._player = Player(traffic, num_draft, traffic.max_model_len + num_draft, self)

    def step(self, running: Sequence[int]) -> list[int]:
        """Runs one step of these requests, and returns the requests that it finished."""
        player = self._player
        decoding = [number for number in running if not player.is_new(number)]
        num_draft = sum(map(player.num_drafted, decoding))
        context = sum(player.lengths[number] for number in decoding)
        step_ms = self._load.step_ms(len(decoding), num_draft, context) if decoding else 0.0
        fates = player.step(running, step_ms if len(decoding) == len(running) else None)
        self.totals.add(dict(zip(running, fates, strict=True)), step_ms, self._drafting_ms())
        over = list(filter(player.has_ended, running))
        player.forget(over)
        return over

    def _drafting_ms(self) -> float:
        return self._load.drafting_ms(self._num_reqs, self._proposing_ms) + self._drafter_ms if self.barrier else 0.0

    def propose(self, batch: DraftBatch, feedback: Feedback) -> Draft:
        self._num_reqs = batch.num_reqs
        if self.barrier is None:
            return Draft.empty(batch.num_reqs)
        if self._drafter is not None:
            batch, feedback = self._offered(self.barrier, self._drafter, batch, feedback)
        start = time.thread_time()
        draft = self.barrier.propose(batch, feedback)
        self._proposing_ms = (time.thread_time() - start) * 1000
        return draft

    def _offered(
        self, barrier: FaultBarrier, drafter: Drafter, batch: DraftBatch, feedback: Feedback
    ) -> tuple[DraftBatch, Feedback]:
        """Returns batch and feedback after the drafter has run, as in an engine; its time is part of the step."""
        chosen = stage_of(barrier.proposer).offer_length(batch, feedback.num_accepted)  # None: by a rival
        length = drafter.num_draft if chosen is None else min(drafter.num_draft, chosen)
        self._drafter_ms = drafter.step_ms(batch.num_reqs, length)
        token_ids = drafter.draft(self._traffic, batch.request_ids, batch.token_ids)
        offer = Offer(Draft.whole(token_ids[:, :length]), self._drafter_ms)
        if feedback.step_ms is not None:
            feedback = replace(feedback, step_ms=feedback.step_ms + self._drafter_ms)
        return replace(batch, offer=offer), feedback

    def forget(self, request_ids: Sequence[str], texts: Texts) -> None:
        if self.barrier:
            self.barrier.forget(request_ids, texts)

    def agreed(self, value: Any) -> Any:
        """Replaces the agreement of ranks: the gate's drafting time is that of the load."""
        match value:
            case [float() as step_ms, float() as drafting_ms, *others]:
                return [step_ms, self._load.drafting_ms(self._num_reqs, drafting_ms), *others]
        return value


class _DeviceEngine(_Engine):
    """An engine that drafts on the device, where drafting is part of the step and a drafter takes time."""

    def __init__(
        self, traffic: Traffic, num_draft: int, load: Load, drafter: Drafter | None, lengths: type[DeviceLengths]
    ):
        super().__init__(traffic, num_draft, load, drafter)
        self._lengths = lengths(num_draft, load, lambda: self.totals.ms / 1000, drafter)

    def step(self, running: Sequence[int]) -> list[int]:
        player = self._player
        decoding = [number for number in running if not player.is_new(number)]
        context = sum(player.lengths[number] for number in decoding)
        counts = self._lengths.admitted(len(running), list(map(name_of, decoding)), context)
        for number, count in zip(decoding, counts.tolist(), strict=True):
            player.cut(number, count)
        return super().step(running)

    def _drafting_ms(self) -> float:
        return self._load.drafting_ms(self._num_reqs, 0.0) + self._drafter_ms

    def propose(self, batch: DraftBatch, feedback: Feedback) -> Draft:
        assert self.barrier is not None
        length, depth = self._lengths.observe(feedback)
        limited = replace(batch, max_num_draft=np.minimum(batch.max_num_draft, length).astype(np.int32))
        offered, self._num_reqs = None, batch.num_reqs
        lookup: Any = self.barrier.proposer
        if self._drafter is not None:
            self._drafter_ms = self._drafter.step_ms(batch.num_reqs, depth)
            offered = self._drafter.draft(self._traffic, batch.request_ids, batch.token_ids)[:, :depth]

        def more(drafts: DraftArrays) -> DraftArrays:
            """Returns the lookup's tokens after these tokens."""
            more = np.maximum(0, limited.max_num_draft - drafts.num_draft)
            continued: DraftArrays = lookup.draft(limited, drafts, more)
            return continued

        return self._lengths.keep(batch.request_ids, self.barrier.propose(limited, feedback), offered, more)

    def forget(self, request_ids: Sequence[str], texts: Texts) -> None:
        super().forget(request_ids, texts)
        self._lengths.forget(request_ids)
