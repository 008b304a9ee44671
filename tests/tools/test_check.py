"""`check`: good proposers pass the recorded engine, and `check` states the violation of each kind of bad one."""

from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from vllm_specplugins.__main__ import main
from vllm_specplugins.device import DeviceProposer
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, RequestFault
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.tools.check import NEWCOMER, Trace, check, load
from vllm_specplugins.tools.replay.data import name_of


class Oracle:
    """Knows what the target says next, but for every fifth position; and holds the engine to its promises."""

    trace: Trace = load()

    def __init__(self, options: dict[str, Any], context: Any):
        self._exact = options.get("exact", True)
        self._drafted: dict[str, tuple[int, int]] = {}  # length of the history, of the draft
        self._living: set[str] = set()

    def propose(self, batch: DraftBatch) -> Draft:
        width = int(batch.max_num_draft.max(initial=0))
        token_ids = np.zeros((batch.num_reqs, width), np.int32)
        lengths = np.zeros(batch.num_reqs, np.int32)
        for row, (request_id, history) in enumerate(zip(batch.request_ids, batch.token_ids, strict=True)):
            self._living.add(request_id)
            if request_id == NEWCOMER:
                continue
            whole = self.trace.histories[int(request_id.split("-")[1])]
            assert (history == whole[: len(history)]).all()
            rest = whole[len(history) : len(history) + batch.max_num_draft[row]]
            lengths[row] = len(rest)
            token_ids[row, : len(rest)] = rest
            if not self._exact:
                places = np.arange(len(history), len(history) + len(rest)) % 5 == 0
                token_ids[row, : len(rest)][places] += 1
            self._drafted[request_id] = (len(history), len(rest))
        return Draft(token_ids, lengths)

    def observe(self, feedback: Feedback) -> None:
        for request_id, drafted, accepted in zip(
            feedback.request_ids, feedback.num_draft, feedback.num_accepted, strict=True
        ):
            start, length = self._drafted.pop(request_id, (0, 0))
            assert drafted == length
            good = [place for place in range(start, start + length) if self._exact or place % 5]
            assert accepted == next((i for i in range(length) if start + i not in good), length)

    def forget(self, request_ids: Any) -> None:
        for request_id in request_ids:
            self._living.discard(request_id)
            self._drafted.pop(request_id, None)


class Faulty(Oracle):
    """Does one thing wrong, now and then."""

    def __init__(self, options: dict[str, Any], context: Any):
        super().__init__(options, context)
        self._fault, self._step = options["fault"], 0
        self.kept: dict[str, int] = {}

    def propose(self, batch: DraftBatch) -> Draft:
        self._step += 1
        draft = super().propose(batch)
        if self._fault == "keeps":
            self.kept.update(dict.fromkeys(batch.request_ids, 1))
        if self._step % 30:
            return draft
        match self._fault:
            case "raises":
                raise RuntimeError("planted")
            case "writes":
                batch.token_ids[0][0] = 1
            case "writes through":
                torch.from_numpy(batch.token_ids[0]).add_(1)
            case "too long":
                return Draft(draft.token_ids, draft.num_draft + 9)
            case "blames":
                raise RequestFault(batch.request_ids[0], "its text")
        return draft

    def observe(self, feedback: Feedback) -> None:
        """Its drafts of a step in which it fails are dropped."""


class Ends(Oracle):
    """Notes the ends of requests."""

    ends: ClassVar[dict[str, int]] = {}

    def finish(self, request_id: str, token_ids: Any, tenant: bytes) -> None:
        assert tenant == b""
        Ends.ends[request_id] = len(token_ids)


class Nameless:
    def __init__(self, options: Any, context: Any):
        pass

    def propose(self, batch: DraftBatch) -> Draft:
        return Draft.empty(batch.num_reqs)


HERE = "tools_test_check"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a name without a dash or a path."""
    import sys

    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


def checked(name: str, **options: Any) -> Any:
    return check(parse_config({"method": "custom", "proposer": f"{HERE}:{name}", "options": options}), load())


def test_trace() -> None:
    """What the shipped file promises. Kills: a trace without arrivals, preemptions or options."""
    trace = load()
    assert len({len(requests) for requests, _ in trace.steps}) > 3
    last = {number: step for step, (requests, _) in enumerate(trace.steps) for number in requests}
    preempted = [n for step, (_, gone) in enumerate(trace.steps) for n in gone if last[n] >= step]
    assert preempted and {"max_draft": 2} in trace.options and {"enabled": False} in trace.options
    assert all(len(history) > length for history, length in zip(trace.histories, trace.prompt_lengths, strict=True))


def test_oracle() -> None:
    """What the target says is accepted to the last token, and the feedback is right. Kills: a draft compared one
    position off; a preempted request that loses a token or gets its old draft's feedback.
    """
    violations, exact = checked("Oracle")
    assert violations == []
    assert 0 < exact.accepted_tokens == exact.drafted_tokens
    violations, worse = checked("Oracle", exact=False)
    assert violations == []
    assert 0 < worse.accepted_tokens < worse.drafted_tokens
    assert worse.request_steps > exact.request_steps
    # Every request ends with its recorded text: what is accepted and what is said makes up the outputs.
    trace = load()
    said = sum(len(history) for history in trace.histories) - sum(trace.prompt_lengths)
    for found in (exact, worse):
        assert 0 <= found.request_steps + found.accepted_tokens - said <= 2 * len(trace.histories)


def test_ends() -> None:
    """Fails if `check` never calls `finish`, so that it approves a class that raises there, or calls it too early."""
    violations, _ = checked("Ends")
    lengths = [len(history) for history in load().histories]
    assert violations == [] and Ends.ends == {name_of(number): length for number, length in enumerate(lengths)}


FAULTS = {
    "raises": ("It raised an exception in 3 steps.", "RuntimeError: planted"),
    "writes": ("It raised an exception in 3 steps.", "ValueError: assignment destination is read-only"),
    "writes through": (f"{HERE}:Faulty wrote to batch.token_ids in ", ""),
    "too long": ("It returned an invalid draft in 3 steps.", "num_draft is not between 0 and max_num_draft"),
    "blames": ("It raised an exception for the options of a request in ", "its text"),
    "keeps": ("Its kept still holds 16 of 16 requests that ended.", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """A sentence each, and the first cause of each kind in the log."""
    violations, counters = checked("Faulty", fault=fault)
    words, cause = FAULTS[fault]
    assert violations[0].startswith(words) and cause in caplog.text
    assert len(violations) == (1 if fault in ("keeps", "blames", "writes through") else 2), "three faults switch it off"
    assert all(sentence.endswith(".") and "\n" not in sentence for sentence in violations)
    assert counters.accepted_tokens > 0, "the other steps count"


class Device(DeviceProposer):
    """Repeats the newest token, and does one thing that a CUDA graph cannot record."""

    def __init__(self, options: Any, context: Any):
        super().__init__(options, context)
        self._fault, self._state = options["fault"], torch.zeros(context.max_num_reqs, dtype=torch.int32)

    def draft(self, texts: Any, slots: Any, limits: Any) -> Draft:
        self._state[slots] += 1
        newest = texts.token_ids[slots, (texts.lengths[slots] - 1).clamp(min=0).long()]
        ids, num_draft = newest[:, None].repeat(1, self.context.max_num_draft), limits
        match self._fault:
            case "waits":
                num_draft = num_draft.clamp(max=int(texts.lengths.max().item()))
            case "branches":
                num_draft = num_draft if (newest > 0).any() else num_draft * 0
            case "shapes":
                ids = torch.cat((ids, torch.nonzero(newest >= 0)[: len(ids)]), dim=1)[:, : ids.shape[1]]
            case "floats":
                ids = ids.float()
            case "wide":
                num_draft = num_draft[:, None]
            case "writes text":
                texts.token_ids[slots, 0] = 7
            case "writes limits":
                num_draft = num_draft.clamp_(max=2)
        return Draft(ids, num_draft)


@pytest.mark.parametrize("fault", ["waits", "branches", "shapes", "floats", "wide", "writes text", "writes limits", ""])
def test_device_classes(fault: str) -> None:
    """Kills: a class that `check` approves although a graph cannot record it, or that writes to the engine's tensors,
    by each rule of write-a-proposer.md."""
    violations, _ = checked("Device", fault=fault)
    words = "It writes to " + ("token_ids" if "text" in fault else "limits")
    words = words if fault.startswith("writes") else "No CUDA graph can record it"
    assert any(sentence.startswith(words) for sentence in violations) == bool(fault)
    assert fault or not violations


class Reader(Nameless):
    """Uses the tokenizer, as a class does that drafts from text."""

    def __init__(self, options: Any, context: Any):
        self.text = context.codec().decode_bytes(context.tokenize("return 1"))

    def observe(self, feedback: Feedback) -> None:
        assert self.text == b"return 1"

    def forget(self, request_ids: Any) -> None:
        pass


def test_tokenizer(refused: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Kills: a tokenizer that no class gets; tokens of another vocabulary in its place."""
    assert main(["check", f"{HERE}:Reader", "--tokenizer", "examples/demo/model"]) == 0
    assert "the engine has no tokenizer" in refused("check", f"{HERE}:Reader")


def test_command(capsys: pytest.CaptureFixture[str], refused: Any) -> None:
    """Exit codes, and one sentence each."""
    assert main(["check", f"{HERE}:Oracle"]) == 0
    assert "No rule is violated." in capsys.readouterr().out
    assert main(["check", f"{HERE}:Faulty", "--options", '{"fault":"raises"}']) == 1
    printed = capsys.readouterr().out
    assert "violated: It raised an exception in 3 steps" in printed
    assert printed.count('raise RuntimeError("planted")') == 1, "the first traceback shows the line, and none twice"
    for wrong, words in {
        f"{HERE}:Faulty": "cannot be built (KeyError",
        f"{HERE}:Nameless": "has no method observe, forget",
        f"{HERE}:Nothing": "cannot be imported",
        "nobody": "PROPOSER must be package.module:Class or a registered method (none), not 'nobody'",
    }.items():
        assert words in refused("check", wrong)
