"""Method `grammar` in real engines: outputs are those without it, and steps are fewer."""

from contextlib import suppress
from itertools import islice, product
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cases import LOOKUP, STRESS, ask_turns, early_exit, progress
from conftest import INTERPRETED, RUNNER
from hostile_grammars import hostile
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_specplugins.draft import Draft, DraftBatch, Feedback
from vllm_specplugins.engine.grammar.forced import ForcedTokens
from vllm_specplugins.gate.draft_tracker import DraftTracker
from vllm_specplugins.gate.gate import Gate

K = 7 if INTERPRETED else 15
GRAMMAR = {"method": "grammar", "num_speculative_tokens": K}
KEYS = ("customer_number", "delivery_address")
SCHEMA = {
    "type": "object",
    "properties": {key: {"type": "integer", "maximum": 99} for key in KEYS},
    "required": list(KEYS),
    "additionalProperties": False,
}
BACKENDS = "xgrammar", "guidance"
PROMPTS = ["def area(x, y):\n    return x * y\n", "{}\n", "x = 1\nx = 1\nx = 1\n"][: 2 if INTERPRETED else 3]
NUM_TOKENS = 48
OFF = {"extra_args": {"specplugins": {"enabled": False}}}
ON_V1 = pytest.mark.skipif(RUNNER == "v2", reason="V1's")


def start(engine: Any, backend: str, config: dict[str, Any] | None, **arguments: Any) -> Any:
    structured = {"backend": backend, "disable_any_whitespace": True}
    if RUNNER == "v1":
        arguments["logits_processors"] = ["scripted:NeverTwice"]
    return engine(config, **{"structured_outputs_config": structured, **arguments})


def ask(llm: Any, temperature: float = 0, grammar: bool = True, **own: Any) -> list[list[int]]:
    structured = StructuredOutputsParams(json=SCHEMA) if grammar else None
    options = {"extra_args": own} if own else {}
    params = SamplingParams(
        temperature=temperature, max_tokens=NUM_TOKENS, seed=3, structured_outputs=structured, **options
    )
    return [list(done.outputs[0].token_ids) for done in llm.generate(PROMPTS, params, use_tqdm=False)]


def counts(llm: Any) -> tuple[int, int, int]:
    """Steps of requests, tokens drafted, tokens accepted."""
    llm.llm_engine.step()  # as a server does when nothing is left to do
    stats = llm.collective_rpc("specplugins_stats")[0]
    assert not stats["faults"]
    return stats["request_steps"], stats["drafted_tokens"], stats["accepted_tokens"]


def counted(llm: Any, **how: Any) -> tuple[list[list[int]], tuple[int, ...]]:
    before = counts(llm)
    outputs = ask(llm, **how)
    return outputs, tuple(now - then for now, then in zip(counts(llm), before, strict=True))


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(engine: Any, backend: str) -> list[list[int]]:
    return ask(start(engine, backend, None))


@pytest.fixture
def llm(engine: Any, expected: Any, backend: str) -> Any:
    return start(engine, backend, GRAMMAR)


def test_outputs_and_steps(llm: Any, expected: Any) -> None:
    """Kills: forced tokens that are not verified, or never sent; on V2 ids that do not reach the device."""
    outputs, (steps, _, accepted) = counted(llm)
    num_tokens = sum(map(len, outputs))
    assert outputs == expected
    assert num_tokens >= 1.5 * (steps + len(outputs)) and steps + accepted + len(outputs) == num_tokens


def stages_of(llm: Any) -> tuple[dict[str, dict[str, Any]], list[int]]:
    """Counters by stage, and how many steps had a draft of each length."""
    stats = llm.collective_rpc("specplugins_stats")[0]
    return stats["stages"], [*stats["draft_lengths"], *[0] * (1 + K - len(stats["draft_lengths"]))]


def of_vllm(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each draft from now on, how many tokens vLLM counts as drafted and as accepted."""
    scheduler, drafts = scheduler_of(llm), list[tuple[int, int]]()
    theirs = scheduler.make_spec_decoding_stats

    def counted(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, **others: Any) -> Any:
        drafts.append((num_draft_tokens, num_accepted_tokens))
        return theirs(stats, num_draft_tokens, num_accepted_tokens, **others)

    monkeypatch.setattr(scheduler, "make_spec_decoding_stats", counted)
    return drafts


def test_counts(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the stage counts no forced tokens, other tokens than vLLM, or a step twice."""
    (before, lengths_before), (steps_before, *_) = stages_of(llm), counts(llm)
    drafts = of_vllm(llm, monkeypatch)
    outputs = ask(llm)
    (now, lengths), (steps, *_) = stages_of(llm), counts(llm)
    then, stage = before["0 grammar"], now["0 grammar"]
    drafted, accepted = map(sum, zip(*drafts, strict=True))
    more = {name: stage[name] - then[name] for name in ("drafts", "drafted", "kept", "verified", "accepted")}
    assert more == dict(drafts=len(drafts), drafted=drafted, kept=drafted, verified=drafted, accepted=accepted)
    assert sum(stage["accepted_at"]) == stage["accepted"] and stage["asked"] - then["asked"] >= len(drafts) > 0
    by_length = [now - then for now, then in zip(lengths, lengths_before, strict=True)]
    assert sum(by_length) == steps - steps_before + len(outputs)  # and the steps of the prompts
    assert by_length[1:] == [[num for num, _ in drafts].count(length) for length in range(1, 1 + K)]


@ON_V1
def test_beside_others(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the forced tokens of one request make the steps of others much longer."""
    drafts = of_vllm(llm, monkeypatch)
    monkeypatch.setattr("vllm_specplugins.engine.grammar.scheduler._MAX_BESIDE_OTHERS", 3)
    ask(llm)
    longest = max(num for num, _ in drafts)
    drafts.clear()
    grammar, free = (SamplingParams(temperature=0, max_tokens=num, ignore_eos=True) for num in (40, 48))
    grammar.structured_outputs = StructuredOutputsParams(json=SCHEMA)
    llm.generate(PROMPTS[:2], [grammar, free], use_tqdm=False)
    assert max(num for num, _ in drafts) <= 3 < longest


def test_seeded(llm: Any) -> None:
    """At a temperature above 0 a seeded request has the same output with drafts and without."""
    without, (_, drafted, _) = counted(llm, temperature=0.8, specplugins={"enabled": False})
    assert drafted == 0
    assert counted(llm, temperature=0.8)[0] == without


def test_session(llm: Any) -> None:
    """Turns that end at a stop id within what a grammar forces, at `max_tokens`, or where they like. Fails if a turn is
    answered otherwise than without drafts, or tokens that were dropped count."""
    tokenizer, structured = llm.get_tokenizer(), StructuredOutputsParams(json=SCHEMA)
    turns = [tokenizer.encode(text) for text in (PROMPTS[0], "{", "x")]
    common = {"ignore_eos": False, "max_tokens": 2 * K, "structured_outputs": structured}
    [whole, *_] = ask_turns(llm, turns[:1], **common, **OFF)
    each = [{"stop_token_ids": [whole[K - 2]]}, {"max_tokens": 5}, {}]
    without = ask_turns(llm, turns, [own | OFF for own in each], **common)
    before = progress(llm)
    assert ask_turns(llm, turns, each, **common) == without
    steps, accepted = progress(llm) - before
    assert accepted > 0
    assert steps + accepted == sum(map(len, without)) - 1


def test_options(llm: Any, expected: Any) -> None:
    """Kills: a request's options that the scheduler does not look at."""
    before = counts(llm)[1]
    assert ask(llm, specplugins={"max_draft": 2}) == expected
    assert ask(llm, specplugins={"max_context": 1}) == expected
    assert counts(llm)[1] - before <= 2 * sum(map(len, expected))
    assert counted(llm, grammar=False)[1][1] == 0


def test_wrong_tokens(llm: Any, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced text in other tokens than the model's, and tokens that are not forced: they cost acceptance alone."""
    own, scheduler = ForcedTokens.after, scheduler_of(llm)
    tokenizer = scheduler._forced._tokenizer

    def letters(self: Any, grammar: Any, draft: Any, most: int, *_: Any) -> list[int]:
        text = bytes(tokenizer.decode_bytes(own(self, grammar, draft, most, *_)))
        spelt = [tokenizer.tokenize_bytes(text[place : place + 1])[0] for place in range(len(text))]
        return grammar.validate_tokens([*draft, *spelt])[len(draft) :][:most]

    monkeypatch.setattr(ForcedTokens, "after", letters)
    outputs, (_, drafted, accepted) = counted(llm)
    assert outputs == expected and drafted > accepted

    def any_allowed(self: Any, grammar: Any, draft: Any, most: int, *_: Any) -> list[int]:
        found = (grammar.validate_tokens([*draft, token])[len(draft) :] for token in range(4, 200))
        return next(filter(None, found), [])

    monkeypatch.setattr(ForcedTokens, "after", any_allowed)
    assert ask(llm) == expected


def test_faults_of_a_grammar(llm: Any, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: an exception that ends the engine."""

    def fail(*_: Any) -> list[int]:
        raise RuntimeError("planted")

    monkeypatch.setattr(ForcedTokens, "after", fail)
    assert ask(llm) == expected


def hostile_outputs(llm: Any, seed: int, **own: Any) -> dict[str, dict[int, list[int]]]:
    """By request and index, with other parameters each; one is aborted on the way."""
    engine, outputs, num_steps = llm.llm_engine, dict[str, dict[int, list[int]]](), 0
    for index, (name, fields) in enumerate(islice(hostile(seed, 200), 5 if INTERPRETED else None)):
        params = SamplingParams(
            temperature=0.8 if index % 4 == 0 else 0,
            seed=3,
            max_tokens=16 + index,
            min_tokens=5 * (index % 3),
            n=1 + (index % 4 == 0),
            stop=["b"] if index % 5 == 4 else None,
            structured_outputs=StructuredOutputsParams(**fields),
            extra_args=own or None,
        )
        with suppress(ValueError):  # what the backend cannot read
            engine.add_request(f"{index} {name}", PROMPTS[index % len(PROMPTS)], params)
    while engine.has_unfinished_requests():
        for done in engine.step():
            for output in done.outputs:
                outputs.setdefault(done.request_id, {})[output.index] = list(output.token_ids)
        num_steps += 1
        if num_steps == 4:
            engine.abort_request(["1 schema, long const"])
    outputs.pop("1 schema, long const", None)
    return outputs


def test_hostile_requests(llm: Any) -> None:
    """Grammars without an end and long ones, with stops, several outputs, an abort. Fails if the engine dies of one, or
    if a forced token is emitted that the model would not have emitted.
    """
    without = hostile_outputs(llm, 0, specplugins={"enabled": False})
    assert hostile_outputs(llm, 0) == without and len(without) >= (3 if INTERPRETED else 9)


class Reasoner:
    """Reasons until its third token."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def is_reasoning_end(self, token_ids: Any) -> bool:
        return False

    def is_reasoning_end_streaming(self, token_ids: Any, delta: Any) -> bool:
        return len(token_ids) >= NUM_PROMPT[0] + 3


NUM_PROMPT = [0]


def test_reasoning(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: tokens that are forced before the grammar applies."""
    scheduler, prompt = scheduler_of(llm), {"prompt_token_ids": [9, 10, 11, 12]}
    NUM_PROMPT[0] = 4
    monkeypatch.setattr(scheduler.structured_output_manager, "reasoner_cls", Reasoner)
    lengths, own = [], ForcedTokens.after

    def after(self: Any, grammar: Any, draft: Any, most: int, *_: Any) -> list[int]:
        lengths.extend(request.num_output_tokens for request in scheduler.requests.values())
        return own(self, grammar, draft, most, *_)

    monkeypatch.setattr(ForcedTokens, "after", after)
    params = SamplingParams(temperature=0, max_tokens=24, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    outputs = []
    for options in ({}, {"extra_args": {"specplugins": {"enabled": False}}}):
        [done] = llm.generate([prompt], params.clone() if not options else _with(params, options), use_tqdm=False)
        outputs.append(list(done.outputs[0].token_ids))
    assert outputs[0] == outputs[1] and lengths and min(lengths) >= 3


def _with(params: SamplingParams, options: dict[str, Any]) -> SamplingParams:
    changed = params.clone()
    changed.extra_args = options["extra_args"]
    return changed


@ON_V1
def test_one_position(llm: Any, expected: Any) -> None:
    """A stateful logits processor is called once per step. Fails if such a request gets forced tokens."""
    assert counted(llm, never_twice=True)[1][1] == 0
    assert ask(llm) == expected


def test_after_a_lookup(engine: Any, expected: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under preemption, too. Kills: forced tokens that overwrite a lookup's; those of another step. Fails if tokens are
    counted for the wrong stage, or for none.
    """
    stages = [{**LOOKUP, "min_ngram": 1}, {"method": "grammar"}]
    config = {"method": "cascade", "num_speculative_tokens": K, "stages": stages, "gate": "off"}
    llm = start(engine, backend, config, **({} if INTERPRETED else STRESS))
    outputs, (steps, _, _) = counted(llm)
    assert outputs == expected and sum(map(len, outputs)) >= 1.5 * (steps + len(outputs))
    without, _ = counted(llm, specplugins={"stages": ["prompt_lookup"]})
    assert without == expected
    assert hostile_outputs(llm, 2) == hostile_outputs(llm, 2, specplugins={"enabled": False})
    drafts, (before, _) = of_vllm(llm, monkeypatch), stages_of(llm)
    assert ask(llm) == expected
    more = {
        name: [stage[name] - before[which][name] for which, stage in stages_of(llm)[0].items()]
        for name in ("verified", "accepted")
    }
    drafted, accepted = map(sum, zip(*drafts, strict=True))
    assert (sum(more["verified"]), sum(more["accepted"])) == (drafted, accepted) and more["verified"][1] > 0


@ON_V1
def test_after_drawn_drafts(engine: Any, backend: str) -> None:
    """Drafts with a q, and forced tokens after them, which are certain: at temperature 0 as ever. Kills: a forced token
    that is verified as if it had been drawn.
    """
    exit_stage = {key: value for key, value in early_exit(4, 3).items() if key != "num_speculative_tokens"}
    exit_stage |= {"num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}
    config = {
        "method": "cascade",
        "num_speculative_tokens": K,
        "stages": [exit_stage, {"method": "grammar"}],
        "gate": "off",
    }
    llm = start(engine, backend, config)
    outputs, (steps, _, _) = counted(llm, temperature=0.8)
    assert sum(map(len, outputs)) >= 1.5 * (steps + len(outputs))
    assert ask(llm) == ask(llm, specplugins={"enabled": False})


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


@ON_V1
def test_q_of_forced_tokens() -> None:
    """Certain after what was drawn. Kills: logits of a drafter taken for a forced token's; those of another request."""
    from vllm_specplugins.engine.v1.rows import Rows
    from vllm_specplugins.engine.v1.verify import Verifier

    verifier = Verifier.__new__(Verifier)
    verifier._runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a", "b", "c"]))
    verifier._rejection, drawn = "token", torch.randn(2, 2, 6)
    verifier.save_q(["b", "a"], drawn)
    verifier._session = SimpleNamespace(forced={"a": (1, [3, 4]), "c": (0, [5])})
    rows = Rows([3, 2, 1], [1, 3, 4, 2, 2, 5], np.zeros(3, np.int64), torch.device("cpu"))
    q = verifier._q(rows, 3)
    assert q is not None and torch.equal(q[0, :1], drawn[1, :1]) and torch.equal(q[1, :2], drawn[0])
    certain = [(0, 1, 3), (0, 2, 4), (2, 0, 5)]
    assert all(q[row, place].argmax() == token and q[row, place].isfinite().sum() == 1 for row, place, token in certain)
    assert not q[1, 2].isfinite().any() and not q[2, 1:].isfinite().any()


@ON_V1
def test_q_of_cut_drafts() -> None:
    """A draft of four drawn tokens and two forced ones, of which a step has room for any number, beside another one.
    Kills: the number of drawn tokens taken for that of verified ones, which ended the engine."""
    from vllm_specplugins.engine.v1.rows import Rows
    from vllm_specplugins.engine.v1.verify import Verifier

    drawn, tokens = torch.randn(2, 4, 11), [1, 2, 3, 4, 8, 9]
    for num_a, num_b in product(range(7), range(5)):
        verifier = Verifier.__new__(Verifier)
        verifier._runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a", "new", "b"]))
        verifier.save_q(["b", "a"], drawn)
        verifier._session = SimpleNamespace(forced={"a": (4, tokens[4:num_a])})
        fed = [*tokens[:num_a], *tokens[:num_b]]
        rows = Rows([num_a, 0, num_b], fed, np.zeros(3, np.int64), torch.device("cpu"))
        q = verifier._q(rows, max(num_a, num_b))
        if q is None:
            assert num_a == num_b == 0
            continue
        assert torch.equal(q[0, : min(num_a, 4)], drawn[1, :num_a]) and torch.equal(q[2, :num_b], drawn[0, :num_b])
        assert [int(row.argmax()) for row in q[0, 4:num_a]] == tokens[4:num_a]
        assert not q[1].isfinite().any()


@pytest.mark.skipif(RUNNER == "v1", reason="V2's")
@pytest.mark.parametrize("has_q", [False, True])
def test_forced_tokens_on_the_device(has_q: bool) -> None:
    """Kills: a token in another slot or place; a q that is another draft's."""
    from vllm_specplugins.engine.messages import ForcedDraft, news_of
    from vllm_specplugins.engine.v2.runner import put_forced

    drafts, q = torch.full((3, 4), 9), torch.zeros(3, 4, 6) if has_q else None
    states = SimpleNamespace(req_id_to_index={"a": 2, "b": 0}, draft_tokens=drafts)
    runner = SimpleNamespace(req_states=states, device=torch.device("cpu"), speculator=SimpleNamespace(draft_logits=q))
    output = SimpleNamespace()
    put_forced(runner, output)
    news_of(output).forced = ForcedDraft("a", 1, [3, 4]), ForcedDraft("b", 3, [5])
    put_forced(runner, output)
    assert drafts.tolist() == [[9, 9, 9, 5], [9, 9, 9, 9], [9, 3, 4, 9]]
    if q is not None:
        assert q[2, 1:3].argmax(-1).tolist() == [3, 4] and q[0, 3].argmax() == 5
        assert int(q.isfinite().sum()) == q.numel() - 3 * 5


class Refused:
    """Drafts words that the schema refuses, and keeps what the engine says of them."""

    feedback: ClassVar[list[Feedback]] = []

    def __init__(self, options: Any, context: Any):
        self._token = context.tokenize("def")[0]

    def propose(self, batch: DraftBatch) -> Draft:
        return Draft(np.full((batch.num_reqs, 1), self._token, np.int32), np.minimum(batch.max_num_draft, 1))

    def observe(self, feedback: Feedback) -> None:
        self.feedback.append(feedback)

    def forget(self, request_ids: Any) -> None: ...


def test_the_gate_learns_from_refused_tokens(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target never sees these drafts, and the gate still learns that they are wrong. Kills: records of acceptance
    that leave out what a grammar refuses: JSON got 0.91 of the speed without speculation from wrong drafts."""
    Refused.feedback.clear()
    monkeypatch.setattr(Gate, "split_draft", lambda self, rows, drafts, *_: (drafts.num_draft, 0 * drafts.num_draft))
    config = {"method": "custom", "proposer": f"{__name__}:Refused", "gate": "auto", "num_speculative_tokens": 2}
    llm = start(engine, "xgrammar", config)
    ask(llm)
    told = sum(int(feedback.num_refused.sum()) for feedback in Refused.feedback if feedback.num_refused is not None)
    steps, drafted, _ = counts(llm)
    assert steps and not drafted and told > 8
    learned = llm.llm_engine.model_executor.driver_worker.worker._session.barrier.proposer._tracker.state
    share, first = (
        state.shared_accepted.sum() / state.shared_tried.sum() for state in (learned, DraftTracker(1, 2).state)
    )
    assert share < 0.8 * first
