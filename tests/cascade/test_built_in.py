"""A stage built into the engine: what it makes of the tokens that the engine offers, without an engine."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vllm_specplugins.cascade.built_in import BuiltIn
from vllm_specplugins.config.built_in import BuiltInConfig
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Offer, ProposerContext
from vllm_specplugins.methods import build_proposer
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.structures.drafts import of_stage

K = 3
CONTEXT = ProposerContext(100, 64, 8, K, lambda text: [])
MODEL = {"method": "draft_model", "model": "m"}
LOOKUP = {"method": "prompt_lookup"}


def batch_of(histories: list[list[int]], offered: list[list[int]] | None, room: int = K) -> DraftBatch:
    return DraftBatch(
        request_ids=[str(row) for row in range(len(histories))],
        token_ids=[np.array(history, np.int32) for history in histories],
        max_num_draft=np.full(len(histories), room, np.int32),
        options=[{}] * len(histories),
        offer=None if offered is None else Offer(Draft.whole(np.array(offered, np.int32)), ms=2.5),
    )


def drafts_of(draft: Draft) -> list[list[int]]:
    return [tokens[:count].tolist() for tokens, count in zip(draft.token_ids, draft.num_draft, strict=True)]


def cascade(*stages: Any) -> Any:
    return build_proposer(parse_config({"method": "cascade", "gate": "off", "stages": list(stages)}), CONTEXT)


@pytest.mark.parametrize(
    ("prefix", "limit", "drafted"),
    [
        ([], 3, [7, 8, 9]),
        ([], 2, [7, 8]),
        ([], 0, []),
        ([7], 2, [8, 9]),
        ([7, 8, 9], 0, []),
        ([7, 8, 4], 0, []),
        ([8], 2, []),
        ([7, 9], 1, []),
    ],
)
def test_continues_only_its_own_beginning(prefix: list[int], limit: int, drafted: list[int]) -> None:
    """Kills: tokens put behind something that they were not meant to follow."""
    begun = of_stage(0, np.array([(prefix + [8] * K)[:K]], np.int32), np.array([len(prefix)]), np.ones(1))
    drafts = BuiltIn(BuiltInConfig(), CONTEXT).draft(
        batch_of([[1]], [[7, 8, 9]]), begun if prefix else None, np.array([limit])
    )
    assert drafts.token_ids[0, : drafts.num_draft[0]].tolist() == drafted


def test_policies() -> None:
    """One request with something to copy, one without."""
    batch = batch_of([[1, 2, 3, 4, 1, 2], [5, 6]], [[3, 8, 9], [7, 8, 9]])
    assert drafts_of(cascade(LOOKUP, MODEL).propose(batch)) == [[3, 4, 1], [7, 8, 9]]
    assert drafts_of(cascade(MODEL, LOOKUP).propose(batch)) == [[3, 8, 9], [7, 8, 9]]


def test_step_without_its_draft() -> None:
    """Kills: an engine that could not run it, and a cascade that fails."""
    proposer = cascade(LOOKUP, MODEL)
    assert drafts_of(proposer.propose(batch_of([[1, 2, 3, 1, 2], [5, 6]], None))) == [[3, 1, 2], []]


@pytest.mark.parametrize("num_offered", [0, 1])
def test_a_short_offer(num_offered: int) -> None:
    """Steps for which the engine wants fewer than K. Kills: an offer that is taken to be of K tokens."""
    batch = batch_of([[1, 2, 3, 4, 1, 2], [5, 6]], [[3, 8, 9][:num_offered], [7, 8, 9][:num_offered]])
    drafts = drafts_of(cascade(LOOKUP, MODEL).propose(batch))
    assert drafts == [[3, 4, 1], [7][:num_offered]]
    drafts = drafts_of(cascade(MODEL, LOOKUP).propose(batch))
    first = {0: [3, 4, 1], 1: [3]}[num_offered]
    assert drafts == [first, [7][:num_offered]]


def test_time_is_counted_at_every_step() -> None:
    proposer = cascade(LOOKUP, MODEL)
    for _ in range(2):
        proposer.propose(batch_of([[1, 2, 3, 1, 2]], [[7, 8, 9]]))
    model = proposer.stage_counters()["1 draft_model"]
    assert (model.ms, model.drafted) == (5.0, 0)


def test_its_own_chances_reach_the_gate() -> None:
    """Of every second request it is sure, and right; of the others neither. Fails if the gate goes by the place in the
    draft alone, or by another token's chance."""
    config = {"method": "cascade", "stages": [{**LOOKUP, "min_ngram": 5}, MODEL]}
    proposer = build_proposer(parse_config(config), CONTEXT)
    lengths: list[int] = []
    for step in range(80):
        is_sure = step % 2 == 0
        batch = batch_of([[1, 2, 3, 4]], [[7, 8, 9]])
        assert batch.offer is not None
        chances = np.array([[0.995, 0.995, 0.2] if is_sure else [0.2, 0.995, 0.995]], np.float32)
        batch = replace(
            batch,
            request_ids=[str(step)],
            offer=replace(batch.offer, draft=replace(batch.offer.draft, confidence=chances)),
        )
        num_draft = proposer.propose(batch).num_draft
        lengths.append(int(num_draft[0]))
        num_right = np.minimum(num_draft, 2 if is_sure else 0)
        proposer.observe(Feedback([str(step)], num_draft, num_right, step_ms=10.0 + 3.0 * lengths[-1]))
    assert np.median(lengths[40::2]) == 2 and np.median(lengths[41::2]) == 0


def test_prompts_are_no_passes() -> None:
    """A prompt of 150 ms in every eighth step, passes of 2 ms. Kills: its time taken for that of a pass, for which the
    model rests or drafts more than it should; a step without a pass that counts as one that has spared passes."""
    config = {"method": "cascade", "stages": [LOOKUP, {**MODEL, "num_speculative_tokens": K}]}

    def play(every: int) -> tuple[list[int], Any]:
        proposer: Any = build_proposer(parse_config(config), CONTEXT)
        lengths, num_draft, right = list[int](), np.zeros(1, np.int32), np.zeros(1, np.int32)
        for step in range(120):
            has_prompt = step % 8 < every
            batch = batch_of([[5, 6, step + 10]], None)
            proposer.observe(Feedback(batch.request_ids, num_draft, right, None if has_prompt else 20.0))
            lengths.append(proposer.offer_length(batch, right))
            ms = 2.0 * max(1, lengths[-1]) + 150.0 * has_prompt
            offer = Offer(Draft.whole(np.array([[7, 8, 9]], np.int32)[:, : lengths[-1]]), ms, has_prompt=has_prompt)
            num_draft = proposer.propose(replace(batch, offer=offer)).num_draft
            right = np.minimum(num_draft, 2 + step % 2).astype(np.int32)
        return lengths, proposer

    (without, _), (lengths, proposer) = play(0), play(1)
    assert np.mean(lengths[60:]) == pytest.approx(np.mean(without[60:]), abs=0.3)
    stage = proposer._offered.proposer
    assert stage.saved_ms <= 6.0
    stage.share = 0.5
    proposer.propose(batch_of([[5, 6, 9]], None))
    assert stage.spared_ms == 0.0, "as while its breaker is open"


def test_chances_of_what_is_continued() -> None:
    """Fails if tokens behind another stage's have the chances of those in front of them."""
    batch = batch_of([[1]], [[7, 8, 9]])
    assert batch.offer is not None
    rated = replace(batch.offer.draft, confidence=np.array([[0.0, 0.75, 0.9375]], np.float32))
    sure = replace(batch.offer, draft=rated)
    prefix = of_stage(0, np.array([[7, 0, 0]], np.int32), np.array([1]), np.ones(1))
    drafts = BuiltIn(BuiltInConfig(), CONTEXT).draft(replace(batch, offer=sure), prefix, np.array([2]))
    assert drafts.confidence[0, : drafts.num_draft[0]].tolist() == [0.75, 0.9375]


def test_spared_while_text_is_copied() -> None:
    """Lookup drafts 6 tokens, the model 3. Fails if the model is skipped after a draft that was shorter, its own, cut
    short or of only one request; if it is skipped for ever; or if its time counts only in steps in which it ran."""
    context = replace(CONTEXT, max_num_draft=6)
    stages = [LOOKUP, {**MODEL, "num_speculative_tokens": 3}]
    config = {"method": "cascade", "num_speculative_tokens": 6, "stages": stages}
    proposer: Any = build_proposer(parse_config(config), context)
    copied, new = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3], [5, 6]
    told: list[float] = []
    proposer._add_times = lambda gate, feedback, step_ms: told.append(step_ms)
    proposer._gate.split_draft = lambda rows, found, stage, sure, most, *rest: (
        found.num_draft,
        most * (found.num_draft == 0),
    )

    def step(*histories: list[int], room: int = 6, offered: int = 3, ms: float = 8.0) -> list[int]:
        batch = batch_of(list(histories), [[7, 8, 9][:offered]] * len(histories), room)
        assert batch.offer is not None
        num_draft: list[int] = proposer.propose(replace(batch, offer=replace(batch.offer, ms=ms))).num_draft.tolist()
        return num_draft

    def needs(*accepted: int) -> bool:
        batch, counts = batch_of([new] * len(accepted), None), np.array(accepted, np.int32)
        length: int = proposer.offer_length(batch, counts)
        proposer.observe(Feedback(batch.request_ids, counts, counts, step_ms=20.0))
        assert length in (0, 3)
        return length > 0

    assert needs(0), "nothing was drafted yet"
    assert step(copied) == [6] and not needs(6)
    assert step(copied, offered=0, ms=1.0) == [6] and needs(5), "cut short"
    assert step(copied, room=5) == [5] and needs(5), "short"
    assert step(new) == [3] and needs(3), "its own"
    assert step(copied, new) == [6, 3] and needs(6, 3), "of one alone"
    assert step(copied) == [6] and not needs(6)
    assert told == [20.0, 20.0 + 8.0, 20.0, 20.0, 20.0, 20.0, 20.0 + 7.0]


def test_spared_where_a_run_gains_less() -> None:
    """The model is right about its first token alone, copies about all of theirs. Fails if the model runs while all
    requests copy and a draft was cut short, if it is spared before it was tried, or where one of two has nothing to
    copy and a run costs nothing; if it runs for one of two where a run is dear; if it never runs again; if the lookup
    searches twice in a step, or if its drafts of another step are taken."""
    context = replace(CONTEXT, max_num_draft=6)
    stages = [LOOKUP, {**MODEL, "num_speculative_tokens": 3}]
    config = {"method": "cascade", "num_speculative_tokens": 6, "stages": stages}
    proposer: Any = build_proposer(parse_config(config), context)
    copied, new, searches = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3], [5, 6], list[int]()
    lookup = proposer.stages[0].proposer
    search = lookup.draft
    lookup.draft = lambda *given: (searches.append(1), search(*given))[1]

    def step(*histories: list[int], run_ms: float = 0.0) -> tuple[bool, list[int]]:
        batch = batch_of(list(histories), [[7, 8, 9]] * len(histories), 6)
        cut_short = np.full(len(histories), 2, np.int32)
        length: int = proposer.offer_length(batch, cut_short)
        assert batch.offer is not None
        offer = Offer(Draft.whole(batch.offer.draft.token_ids[:, :length]), 2.5 + run_ms * max(0, length - 1) / 2)
        num_draft = proposer.propose(replace(batch, offer=offer)).num_draft
        right = np.minimum(num_draft, [6 if history is copied else 1 for history in histories]).astype(np.int32)
        proposer.observe(Feedback(batch.request_ids, num_draft, right, step_ms=10.0 + 0.1 * int(num_draft.sum())))
        return length > 0, num_draft.tolist()

    for _ in range(10):
        assert step(copied)[0], "it has never drafted"
    for _ in range(30):
        step(new)
        step(copied)
    searches.clear()
    assert step(copied) == (False, [6]) and searches == [1]
    assert step(new)[0]
    for _ in range(10):
        step(copied, new)
    assert step(copied, new)[0] and not step(copied, copied)[0]
    ran = [step(copied, new, run_ms=5.0)[0] for _ in range(240)]
    assert 2 <= sum(ran[40:]) <= 10, "runs of 5 ms in 1 % of the time"
    proposer.offer_length(batch_of([copied], None, 6), np.zeros(1, np.int32))
    assert proposer.propose(batch_of([new], None, 6)).num_draft.tolist() == [0]


def test_as_many_tokens_as_pay() -> None:
    """The model is right about its first two tokens, and every other time about the third. Nothing can be copied. Fails
    if it drafts a third one where passes are dear, or only two where they cost nothing; if the time of a pass is not
    learned in steps that skip none; or if the time that a step saved is that of all passes."""
    config = {"method": "cascade", "stages": [LOOKUP, {**MODEL, "num_speculative_tokens": K}]}

    def play(pass_ms: float) -> tuple[list[int], list[float]]:
        """The drafts' lengths, and what was added to the steps' times."""
        proposer: Any = build_proposer(parse_config(config), CONTEXT)
        lengths, added, add = list[int](), list[float](), proposer._add_times
        proposer._add_times = lambda gate, feedback, step_ms: (
            added.append(step_ms - feedback.step_ms),
            add(gate, feedback, step_ms),
        )
        for step in range(80):
            batch = batch_of([[5, 6, step + 10]], None)
            lengths.append(proposer.offer_length(batch, np.zeros(1, np.int32)))
            ms = pass_ms * max(1, lengths[-1])
            offer = Offer(Draft.whole(np.array([[7, 8, 9]], np.int32)[:, : lengths[-1]]), ms)
            num_draft = proposer.propose(replace(batch, offer=offer)).num_draft
            right = np.minimum(num_draft, 2 + step % 2)
            proposer.observe(Feedback(batch.request_ids, num_draft, right, step_ms=10.0 + ms))
        return lengths[40:], added

    assert set(play(0.0)[0]) == {3}
    lengths, added = play(5.0)
    assert np.median(lengths) == 2 and added[-1] == pytest.approx(5.0, rel=0.01)
