"""Engines that are forced to emit a log (harness/forced.py), on the runner's real path of verification."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import LOOKUP, cascade
from conftest import INTERPRETED, RUNNER
from families import checkpoint
from recorded import runner

from vllm_specplugins.engine.harness.forced import _Log, _OnV1, _OnV2
from vllm_specplugins.engine.harness.serving import LOGGED, _Steps
from vllm_specplugins.gate.gate import Gate

WITHOUT_TAPES = "the hook makes its tensors outside of the simulated device"
VOCAB_SIZE, NUM_DRAFT = 60, 4
STEP_MS, TOKEN_MS = 10.0, 1.0
RNG = random.Random(0)
PROMPTS = [[RNG.randrange(3, VOCAB_SIZE) for _ in range(40)] for _ in range(6)]
# Half of each output copies from its prompt, in two pieces with other tokens around them.
OUTPUTS = [[*prompt[4:12], *RNG.choices(range(3, VOCAB_SIZE), k=5 + index), *prompt[20:29], 7]
           for index, prompt in enumerate(PROMPTS)]  # fmt: skip
ACCEPTED = [[(place + index) % 5 for place in range(len(output))] for index, output in enumerate(OUTPUTS)]
KIND = _OnV1 if RUNNER == "v1" else _OnV2


@contextmanager
def forced(llm: Any, outputs: Any, accepted: Any = None) -> Iterator[None]:
    """The hook, for the length of a block."""
    model_runner = runner(llm)
    speculator = getattr(model_runner, "speculator", None)
    owners = [(model_runner, "_sample"), (model_runner, "sample"), (model_runner, "add_requests")]
    owners += [(model_runner.model, "compute_logits"), (speculator, "propose")]
    owners += [(getattr(speculator, "specplugins", None), "propose_theirs")]
    with pytest.MonkeyPatch.context() as patches:
        for owner, name in owners:
            if hasattr(owner, name):
                patches.setattr(owner, name, getattr(owner, name))
        KIND(model_runner, _Log(outputs, accepted, model_runner.device))
        yield


def serve(
    llm: Any, log: Sequence[Sequence[int]] = OUTPUTS, prompts: Sequence[Sequence[int]] = PROMPTS,
    only: int | None = None, **options: Any,
) -> tuple[list[list[int]], list[int]]:  # fmt: skip
    """The outputs, and in how many steps after its first token each came; of all requests at once, or `only` one."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, outputs, steps = llm.llm_engine, [[] for _ in log], [-1] * len(log)
    for index, output in enumerate(log):
        if only not in (None, index):
            continue
        own = SamplingParams(temperature=0, max_tokens=len(output), ignore_eos=True, detokenize=False,
                             output_kind=RequestOutputKind.DELTA, extra_args={LOGGED: index, **options})  # fmt: skip
        engine.add_request(str(index), {"prompt_token_ids": prompts[index]}, own)
    while engine.has_unfinished_requests():
        for result in engine.step():
            outputs[int(result.request_id)] += result.outputs[0].token_ids
            steps[int(result.request_id)] += bool(result.outputs[0].token_ids)
    return outputs, steps


CONFIGS: dict[str, Any] = {
    "none": None,
    "prompt_lookup": {"method": "prompt_lookup", "num_speculative_tokens": NUM_DRAFT, "gate": "off"},
    **({} if INTERPRETED else {"ngram": {"method": "ngram", "num_speculative_tokens": NUM_DRAFT,
                                         "prompt_lookup_max": 8, "prompt_lookup_min": 2}}),
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {"max_num_batched_tokens": 96, "enable_chunked_prefill": True}


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_are_the_log(name: str, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts taken in in pieces, rows with and without drafts. Fails if a row's place in the log is off by one, for
    decoding or after a draft, if a request reads another one's row, or if drafts are verified otherwise than greedily;
    if a log shifted by one passes; if a lookup without a gate emits other than `replay`'s tokens a step; and if steps
    that take prompts in are timed, or tokens of drafts are none of a step's."""
    llm = engine(CONFIGS[name], **ARGUMENTS)
    with forced(llm, OUTPUTS), timed_steps(llm) as times:
        outputs, steps = serve(llm)
        taken = times.taken()
        assert outputs == OUTPUTS
        assert max(steps) - 4 <= len(taken) <= max(steps) and all(ms > 0 for _, ms in taken)
        assert (name == "none") is all(num_tokens <= len(OUTPUTS) for num_tokens, _ in taken)
        assert (name == "none") is (steps == [len(output) - 1 for output in OUTPUTS])
        if name == "prompt_lookup":  # alone: a prompt that waits takes the tokens of others' drafts
            steps = [serve(llm, only=index)[1][index] for index in range(len(OUTPUTS))]
            assert per_step(OUTPUTS, steps) == pytest.approx(played(CONFIGS[name], PROMPTS, OUTPUTS), rel=0.02)
        monkeypatch.setattr(_Log, "force", _shifted(_Log.force))
        assert not any(got == wanted for got, wanted in zip(serve(llm)[0], OUTPUTS, strict=True))


@contextmanager
def timed_steps(llm: Any) -> Iterator[_Steps]:
    """Times the steps of an engine, for the length of a block."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(scheduler, "update_from_output", scheduler.update_from_output)
        clock: Any = SimpleNamespace(now=time.perf_counter)
        yield _Steps(llm, clock)


def per_step(outputs: Sequence[Sequence[int]], steps: Sequence[int]) -> float:
    return sum(len(output) - 1 for output in outputs) / sum(steps)


def played(config: dict[str, Any], prompts: Any, outputs: Any) -> float:
    """Tokens a step that `replay` predicts where all requests come at once."""
    from vllm_specplugins.tools.replay.candidates import Candidate
    from vllm_specplugins.tools.replay.costs import CostTable, Load
    from vllm_specplugins.tools.replay.data import Traffic
    from vllm_specplugins.tools.replay.simulate import simulate

    traffic, num_draft = Traffic(), config["num_speculative_tokens"]
    for prompt, output in zip(prompts, outputs, strict=True):
        traffic.add(prompt, output)
    candidate = Candidate.ours(config["method"], config["gate"], config, runner="v1")
    totals = simulate(traffic, candidate.build, num_draft, Load(CostTable.line(STEP_MS, TOKEN_MS), len(prompts), 100.0))
    return totals.emitted / totals.steps


LONGER = [[*output, *RNG.choices(range(3, VOCAB_SIZE), k=20), *prompt[8:38], *RNG.choices(range(3, VOCAB_SIZE), k=20)]
          for prompt, output in zip(PROMPTS, OUTPUTS, strict=True)]  # fmt: skip


@pytest.mark.skipif(RUNNER == "v2", reason="there the scheduler has the gate: one length for all")
def test_a_gate_decides_as_in_a_replay(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have the same step times. Fails if an engine's gate learns of other drafts or outcomes than a replay's, if
    its steps go to another batch size, or if the steps that take prompts in count."""
    add = Gate.add_step

    def timed(gate: Gate, num_reqs: int, ms: float, drafting_ms: float, num_draft: int, num_emitted: int) -> None:
        add(gate, num_reqs, STEP_MS + TOKEN_MS * num_draft, 0.1, num_draft, num_emitted)

    use, profile = Gate.use_profile, {1: STEP_MS, 2: STEP_MS + TOKEN_MS}
    monkeypatch.setattr(Gate, "use_profile", lambda gate, ms: use(gate, profile))
    monkeypatch.setattr(Gate, "add_step", timed)
    monkeypatch.setattr(Gate, "add_drafting", lambda *args: None)
    config = {**CONFIGS["prompt_lookup"], "gate": "auto"}
    with forced(llm := engine(config), LONGER):
        outputs, steps = serve(llm, LONGER)
    assert outputs == LONGER
    found, wide = per_step(LONGER, steps), played({**config, "gate": "off"}, PROMPTS, LONGER)
    assert found == pytest.approx(played(config, PROMPTS, LONGER), rel=0.05) and found < 0.95 * wide


def _shifted(force: Any) -> Any:
    return lambda log, logits, rows, places: force(log, logits, rows, places + 1)


def steps_of(output: Sequence[int], accepted: Sequence[int]) -> int:
    """Returns the steps after the first token, each with the number of accepted draft tokens in the log."""
    place, steps = 1, 0
    while place < len(output):
        place += 1 + min(accepted[place], NUM_DRAFT, len(output) - place - 1)
        steps += 1
    return steps


DRAFTER = {"method": "draft_model", "num_speculative_tokens": NUM_DRAFT}


@pytest.mark.skipif(RUNNER == "v1", reason="drafts are replaced on Model Runner V2 alone")
@pytest.mark.parametrize("is_stage", [False, True])
def test_drafts_are_accepted_as_logged(is_stage: bool, engine: Any) -> None:
    """A drafter of vLLM, alone and as the only stage beside a lookup that requests switch off. Fails if drafts are
    written one place off, after ours has read them, or with fewer or more right tokens than the log says."""
    model = str(checkpoint("llama"))
    drafter = {**DRAFTER, "model": model}
    config = cascade("auto", stages=(LOOKUP, drafter)) if is_stage else drafter
    llm = engine(config, model=model, skip_tokenizer_init=True, max_model_len=256)
    options = {"specplugins": {"stages": ["draft_model"]}} if is_stage else {}
    with forced(llm, OUTPUTS, ACCEPTED):
        outputs, steps = serve(llm, **options)
    assert outputs == OUTPUTS
    assert steps == [steps_of(output, ACCEPTED[index]) for index, output in enumerate(OUTPUTS)]


def test_padding() -> None:
    """Fails if a shorter row is filled with another row's tokens, or the last place of the longest has none."""
    log = _Log([[5, 6], [7], [8, 9, 4]], None, torch.device("cpu"))
    assert log.tokens.tolist() == [[5, 6, 6, 6], [7, 7, 7, 7], [8, 9, 4, 4]]
    logits = torch.zeros(2, 10)
    log.force(logits, torch.tensor([2, 0]), torch.tensor([1, 99]))
    assert logits.argmax(1).tolist() == [9, 6]
