"""`replay`: recorded traffic in all its forms, played exactly, at costs that a hand can add up."""

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_specplugins.__main__ import main
from vllm_specplugins.config import ConfigError
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext
from vllm_specplugins.tools.base_model import load_tokenizer
from vllm_specplugins.tools.replay.candidates import Candidate, candidates
from vllm_specplugins.tools.replay.costs import H100, CostTable, Load, costs_of
from vllm_specplugins.tools.replay.data import Chosen, Traffic, read_traffic
from vllm_specplugins.tools.replay.on_device import DeviceLengths, PlannedLengths
from vllm_specplugins.tools.replay.report import row_of, verdict
from vllm_specplugins.tools.replay.simulate import Totals, simulate

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo" / "model"
CODE = "def area(width, height):\n    return width * height\n"
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You edit code."},
    {"role": "user", "content": [{"type": "text", "text": "Double "}, {"type": "text", "text": "it."}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "read", "arguments": "{}"}}]},
    {"role": "tool", "content": CODE},
    {"role": "assistant", "content": CODE + CODE},
]


class Guess:
    """Drafts what its options say for a length of the history; writes down all that it is told."""

    def __init__(self, drafts: dict[int, list[int]], context: ProposerContext):
        self.drafts, self.context = drafts, context
        self.seen: list[list[tuple[str, int]]] = []
        self.fed: list[Feedback] = []
        self.gone: list[str] = []

    def propose(self, batch: DraftBatch) -> Draft:
        self.seen.append([(name, len(ids)) for name, ids in zip(batch.request_ids, batch.token_ids, strict=True)])
        token_ids = np.zeros((batch.num_reqs, self.context.max_num_draft), np.int32)
        num_draft = np.zeros(batch.num_reqs, np.int32)
        for row, (ids, limit) in enumerate(zip(batch.token_ids, batch.max_num_draft, strict=True)):
            draft = self.drafts.get(len(ids), [])[:limit]
            token_ids[row, : len(draft)], num_draft[row] = draft, len(draft)
        return Draft(token_ids, num_draft)

    def observe(self, feedback: Feedback) -> None:
        self.fed.append(feedback)

    def forget(self, request_ids: Sequence[str]) -> None:
        self.gone += request_ids


def played(traffic: Traffic, drafts: dict[int, list[int]], load: Load, num_draft: int = 4) -> tuple[Totals, Guess]:
    made: list[Guess] = []

    def build(context: ProposerContext) -> Guess:
        made.append(Guess(drafts, context))
        return made[-1]

    return simulate(traffic, build, num_draft, load), made[0]


def made(*requests: tuple[int, int]) -> Traffic:
    """Requests of so many tokens of prompt and output, which count up from 0."""
    traffic = Traffic()
    for prompt, output in requests:
        ids = list(range(prompt + output))
        traffic.add(ids[:prompt], ids[prompt:])
    return traffic


def test_costs_and_acceptance_by_hand() -> None:
    """One request of 3 + 7 tokens. Kills: a bonus token forgotten or paid for, a draft accepted behind a wrong token,
    a first token that costs a step, drafts priced in the step before, tokens counted behind the end of the output."""
    drafts = {4: [4, 5, 99, 7], 7: [7, 8, 9, 10]}
    totals, guess = played(made((3, 7)), drafts, Load(CostTable.line(10.0, 0.5), draft_us=100.0))
    # Prefill gives token 3; then 4, 5 are accepted and 6 follows; then 7, 8, 9 end the output.
    assert guess.seen == [[("request-0", 4)], [("request-0", 7)], [("request-0", 10)]]
    assert (totals.steps, totals.drafts, totals.drafted, totals.accepted, totals.emitted) == (2, 2, 8, 5, 6)
    assert totals.step_ms == pytest.approx(2 * (10 + 4 * 0.5))
    assert totals.drafting_ms == pytest.approx(3 * 0.1)
    assert [feedback.step_ms for feedback in guess.fed] == [None, 12.0, 12.0]


def test_nothing_drafted() -> None:
    """Kills: a step of no speculation that is not one token at the price of one."""
    totals = simulate(made((3, 7), (2, 4)), None, 0, Load(CostTable.line(10.0, 0.5)))
    assert (totals.steps, totals.emitted, totals.drafts) == (9, 9, 0)
    assert totals.ms == pytest.approx(90.0) and totals.tokens_per_ms == pytest.approx(0.1)


def test_concurrent_requests() -> None:
    """Kills: more at a time than there may be, another order, a request that is not told to be forgotten, a step with
    a newcomer that speaks to the gate, a batch whose price is that of one request."""
    costs = CostTable({1: 10.0, 2: 11.0, 3: 12.0})
    totals, guess = played(made((3, 3), (2, 4), (5, 2)), {}, Load(costs, batch=2))
    names = [[name for name, _ in step] for step in guess.seen]
    first, second, third = (f"request-{number}" for number in range(3))
    assert names == [[first, second], [first, second], [first, second], [second, third], [third]]
    assert [feedback.step_ms for feedback in guess.fed] == [None, 11.0, 11.0, None, 10.0]
    assert guess.gone == [first, second]  # the third is over with the last step
    assert totals.step_ms == pytest.approx(11 + 11 + 10 + 10) and totals.emitted == 2 + 3 + 1


def test_context_and_table() -> None:
    """Kills: a table that ends at its last entry, or is not followed between two; context that costs nothing, or costs
    by draft token."""
    table = CostTable({1: 1.0, 3: 2.0, 5: 4.0}, context_ms=0.1)
    by_hand = {(1, 0): 1.0, (1, 1): 1.5, (2, 1): 2.0, (2, 2): 3.0, (3, 4): 6.0}
    assert {key: table.step_ms(*key) for key in by_hand} == pytest.approx(by_hand)
    assert table.step_ms(2, 1, num_context=20) == pytest.approx(4.0)
    steps = [H100.step_ms(batch, 0, 1000 * batch) for batch in (1, 4, 32, 128, 512, 4096)]
    assert steps == sorted(steps) and 1 < steps[0] < 30 and H100.source


BENCHED = {"model": "a/b", "machine": {"device": "a CPU"}, "step_ms_by_tokens": {"5": 12.0, "1": 10.0}}
NO_COSTS = (
    "nothing",
    "[]",
    json.dumps({**BENCHED, "step_ms_by_tokens": {"1": 10.0}}),
    json.dumps({"step_ms_by_tokens": {"1": 1, "2": 2}}),
)


def test_costs_that_were_measured(tmp_path: Path) -> None:
    """Fails if the file's times are not those of the steps, if times that fall at the end make further tokens
    free, or if a file without two of them is taken, or raises."""
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(BENCHED))
    assert costs_of(str(file)).step_ms(1, 2) == pytest.approx(11.0) and costs_of("llama-2-7b") is H100
    file.write_text(json.dumps({**BENCHED, "step_ms_by_tokens": {"1": 10.0, "5": 13.0, "6": 11.0}}))
    assert costs_of(str(file)).step_ms(1, 10) == pytest.approx(14.0)  # the line from 10 to 12 goes on
    assert CostTable({1: 1.0, 3: 3.0, 4: 2.0}).step_ms(1, 9) == pytest.approx(2.0)  # and not less
    assert costs_of("10:0.5").step_ms(1, 4) == pytest.approx(12.0)
    for text in NO_COSTS:
        file.write_text(text)
        with pytest.raises(ConfigError, match="--costs must be llama-2-7b, llama-3"):
            costs_of(str(file))


def lines(tmp_path: Path, *rows: Any) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return file


def read(file: Path) -> Traffic:
    tokenizer = load_tokenizer(str(DEMO_MODEL))
    return read_traffic([file], lambda: tokenizer, Chosen(100))


def texts(traffic: Traffic) -> list[tuple[str, str]]:
    tokenizer = load_tokenizer(str(DEMO_MODEL))
    return [
        (tokenizer.decode(history[:length]), tokenizer.decode(history[length:]))
        for history, length in zip(traffic.histories, traffic.prompt_lengths, strict=True)
    ]


def test_texts_and_ids(tmp_path: Path) -> None:
    """Kills: prompt and output mixed up, ids that are tokenised again, an empty line that is an error, an output that
    begins a text, a tenant that is lost."""
    file = lines(
        tmp_path,
        {"prompt": "Double it.\n" + CODE, "output": CODE},
        "",
        {"prompt": [5, 6], "output": [7]},
        {"prompt": [5, 6], "output": []},
        {"prompt": [5, 6], "output": [8], "tenant": "é"},
    )
    traffic = read(file)
    assert texts(traffic)[0] == ("<bos>Double it.\n" + CODE, CODE)
    assert traffic.histories[1].tolist() == [5, 6, 7] and traffic.prompt_lengths[1] == 2
    assert traffic.options == [{}, {}, {"tenant": "é".encode()}]


def test_chat_logs(tmp_path: Path) -> None:
    """Kills: an answer that is part of its own prompt, a call of a tool or a part of a message that is lost, answers of
    earlier requests that are counted again in a log of requests."""
    answer = {"choices": [{"message": {"role": "assistant", "content": "Done."}}], "messages": CHAT}
    found = texts(read(lines(tmp_path, {"messages": CHAT}, answer)))
    call = '{"name": "read", "arguments": "{}"}'
    assert [output for _, output in found] == [call, CODE + CODE, "Done."]
    beginning = "<bos>You edit code.\nDouble it.\n"  # as the model's template has it
    assert found[0][0] == beginning and found[1][0] == f"{beginning}{call}\n{CODE}"
    assert found[2][0] == f"{beginning}{call}\n{CODE}{CODE}{CODE}"


IDS = {"prompt": [1], "output": [1]}
# What follows "line 2 of FILE must".
DAMAGED: dict[str, tuple[Any, str]] = {
    "cut off": ('{"prompt": "a", "out', "be a JSON object, not"),
    "no object": ("[1, 2]", "be a JSON object, not '[1, 2]'"),
    "no form": ({"texts": "a"}, 'have {"prompt": text or token ids, "output"'),
    "no output": ({"prompt": "a"}, 'have an answer, as in {"prompt": text or token ids, "output"'),
    "no ids": ({"prompt": [1, "2"], "output": [3]}, "have text or token ids as prompt, not [1, '2']"),
    "negative id": ({**IDS, "output": [-3]}, "have text or token ids as output, not [-3]"),
    "large id": ({**IDS, "output": [1 << 31]}, "have text or token ids as output, not [2147483648]"),
    "no text": ({"text": 5}, "have text or token ids as text, not 5"),
    "no messages": ({"messages": []}, "have messages that have a role and a content, not []"),
    "no answer": ({"messages": CHAT[:2]}, "have an answer"),
    "bad content": ({"messages": [{"role": "user", "content": 5}]}, "have text, or a list of parts, as content"),
    "no choice": ({"messages": CHAT, "choices": []}, "have a message in its first choice, not []"),
    "tenant": ({**IDS, "tenant": 7}, "have text as tenant, not 7"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_line(name: str, tmp_path: Path, refused: Any) -> None:
    """Kills: a traceback, a line that is left out in silence, a sentence that names no line."""
    row, words = DAMAGED[name]
    file = lines(tmp_path, {"prompt": [1, 2], "output": [3]}, row)
    error = refused("replay", "--dataset-path", file, "--tokenizer", DEMO_MODEL)
    assert error.startswith(f"error: --dataset-path: line 2 of {file} must {words}")


def test_text_needs_a_tokenizer(tmp_path: Path, refused: Any) -> None:
    """Kills: text that is taken for something else, a tokenizer that is asked for where there are only ids."""
    file = lines(tmp_path, {"prompt": [1, 2] * 4, "output": [1, 2] * 4}, {"prompt": "a", "output": "b"})
    assert "line 2 of" in (error := refused("replay", "--dataset-path", file)) and "--tokenizer must name" in error
    assert main(["replay", "--dataset-path", str(file), "--requests", "1", "--num-draft", "2"]) == 0


class Reads:
    """Copies what its text says, by the engine's codec."""

    def __init__(self, options: Any, context: Any):
        self.codec, self.newline = context.codec(), context.tokenize("\n")

    def propose(self, batch: DraftBatch) -> Draft:
        assert self.newline and self.codec.tokenize_bytes(self.codec.decode_bytes(batch.token_ids[0][-2:].tolist()))
        return Draft.empty(batch.num_reqs)

    observe = forget = lambda self, news: None


def test_tokenizer_reaches_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a class that finds no codec in `replay`, though `--tokenizer` names a model."""
    monkeypatch.setitem(sys.modules, "tools_test_replay", sys.modules[__name__])
    file = lines(tmp_path, {"prompt": CODE, "output": CODE})
    out, method = tmp_path / "out.json", json.dumps({"method": "custom", "proposer": "tools_test_replay:Reads"})
    arguments = ["--num-draft", "2", "--methods", method, "--tokenizer", str(DEMO_MODEL), "--output-json", str(out)]
    assert main(["replay", "--dataset-path", str(file), *arguments]) == 0
    rows = [row for row in json.loads(out.read_text())["rows"] if row["method"] == "custom"]
    assert rows and not any(row["num_faults"] for row in rows)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Text that repeats its prompt, from standard input. Kills: a report without its parts, a method that is not
    played, K that does not reach the proposer, a value for --speculative-config that is none."""
    row = {"prompt": CODE * 3, "output": CODE * 3}
    data = "".join(json.dumps(row) + "\n" for _ in range(3)).encode()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    out = tmp_path / "out.json"
    arguments = ["--num-draft", "2,6", "--max-concurrency", "1,2", "--costs", "10:0.1", "--draft-us", "10"]
    arguments += ["--methods", "prompt_lookup", "--output-json", str(out)]
    assert main(["replay", "--dataset-path", "-", "--tokenizer", str(DEMO_MODEL), *arguments]) == 0
    printed, found = capsys.readouterr().out, json.loads(out.read_text())
    assert "1 at a time" in printed and "2 at a time" in printed and "Predicted: prompt_lookup" in printed
    assert "3 requests say little about other traffic" in printed and "The largest K tried is the best" in printed
    assert max(len(line) for line in printed.splitlines() if not line.startswith("--")) <= 100
    by_key = {(row["batch"], row["method"], row["policy"], row["num_draft"]): row for row in found["rows"]}
    expected = {(b, "prompt_lookup", p, k) for b in (1, 2) for p in ("always", "gated") for k in (2, 6)}
    expected |= {(b, "ngram_gpu", "fixed", k) for b in (1, 2) for k in (5, 15, 31)}
    assert set(by_key) == expected | {(b, "none", "always", 0) for b in (1, 2)}
    small, large = (by_key[1, "prompt_lookup", "always", k] for k in (2, 6))
    assert 2 < small["tokens_per_step"] <= 3 < large["tokens_per_step"] <= 7
    assert large["speed_up"] > small["speed_up"] > 1 and large["draft_us"] == pytest.approx(10, rel=0.2)
    assert json.loads(printed.split("--speculative-config '")[1].split("'")[0])["num_speculative_tokens"] == 6
    assert found["output_tokens"] > 100 and " ".join(found["advice"].split()) in " ".join(printed.split())


def test_what_is_compared() -> None:
    """Kills: a method that needs a model played all the same, a gate that is not there, or where it should not be: V2
    chooses lengths without one, but not those of a proposer of another package, which it calls on the host."""
    config = {"method": "prompt_lookup", "min_ngram": 3, "time_budget_ms": 50}
    plain, gated = candidates([json.dumps(config)], [4])
    assert [plain.policy, gated.policy] == ["always", "gated"]
    assert plain.config == {**config, "gate": "off", "num_speculative_tokens": 4}
    assert gated.config == {**config, "gate": "auto", "num_speculative_tokens": 4}
    context = ProposerContext(100, 64, 1, 4, lambda text: [])
    assert [type(found.build(context)).__name__ for found in (plain, gated)] == ["PromptLookup"] * 2
    assert [found.lengths for found in (plain, gated)] == [PlannedLengths, DeviceLengths]
    on_v1 = candidates([json.dumps(config)], [4], "v1")
    assert [type(found.build(context)).__name__ for found in on_v1] == ["PromptLookup", "Cascade"]
    custom = {"method": "custom", "proposer": "vllm_specplugins.proposers.prompt_lookup:PromptLookup"}
    late = candidates(["suffix_lookup"], [4])
    assert [(found.lengths, found.is_late) for found in late] == [(None, True)] * 2
    assert not any(found.is_late for found in candidates(["suffix_lookup"], [4], "v1"))
    assert not any(found.lengths for found in [*on_v1, *candidates([json.dumps(custom)], [4])])
    assert "prompt_lookup" in {candidate.method for candidate in candidates([], [4])}
    for name in ("early_exit", "ngram", "ngram:5"):
        with pytest.raises(ConfigError, match=rf"--methods must be prompt_lookup, .*, or JSON, not '{name}'"):
            candidates([name], [4])
        with pytest.raises(ConfigError, match="must be proposers that read only token ids"):
            candidates([json.dumps({"method": name.partition(":")[0], "exit_layer": 1})], [4])


def test_fields_of_the_user() -> None:
    """Fails if the gate or K of a configuration that the user gives is replaced by others."""
    mine = {"method": "prompt_lookup", "gate": "off", "num_speculative_tokens": 7}
    [found] = candidates([json.dumps(mine)], [4, 9])
    assert found.config == mine and (found.policy, found.num_draft) == ("always", 7)
    assert [found.key[1:] for found in candidates(["prompt_lookup:3"], [4])] == [("always", 3), ("gated", 3)]
    auto = {**mine, "gate": "auto"}
    assert [found.policy for found in candidates([json.dumps(auto)], [4, 9])] == ["gated"]


def totals(emitted: int, ms: float) -> Totals:
    return Totals(steps=100, emitted=emitted, step_ms=ms)


def test_choice() -> None:
    """Kills: the best batch taken for all of them, the most tokens for the fastest, a gain that is not worth it."""
    plain, k4, k8 = totals(100, 100.0), totals(300, 150.0), totals(400, 160.0)
    few, many = (Candidate("lookup", "always", count, None, {}) for count in (4, 8))
    rows = [row_of(few, 1, k4, plain), row_of(many, 1, k8, plain)]
    assert verdict(rows, [few, many])[1] is many
    rows += [row_of(few, 32, totals(300, 290.0), plain), row_of(many, 32, totals(400, 1000.0), plain)]
    words, best = verdict(rows, [few, many])
    assert best is few and f"{(2 * 300 / 290) ** 0.5:.2f} times as fast" in words
    assert "(1 at a time: 2.00x (2.00-2.00), 32 at a time: 1.03x (1.03-1.03))" in words
    words, best = verdict([row_of(few, 1, totals(102, 100.0), plain)], [few])
    assert best is None and words.startswith("Serve without speculation")


def test_range_over_requests() -> None:
    """By hand: half of the requests gain 3 times, half nothing. Kills: a range of steps, one that is not paired with
    the same requests without drafts, advice where it reaches no speculation."""
    plain = Totals(emitted=800, step_ms=800.0, by_request={number: (20, 20.0) for number in range(40)})
    mixed = Totals(emitted=800, by_request={number: (20, 20.0 / (3 if number % 2 else 1)) for number in range(40)})
    mixed.step_ms = sum(ms for _, ms in mixed.by_request.values())
    candidate = Candidate("lookup", "always", 4, None, {})
    row = row_of(candidate, 1, mixed, plain)
    assert row.speed_up == pytest.approx(1.5) and 1.3 < row.low < 1.42 and 1.58 < row.high < 1.8
    even = Totals(emitted=800, step_ms=400.0, by_request={number: (20, 10.0) for number in range(40)})
    sure = row_of(candidate, 1, even, plain)
    assert (sure.low, sure.high) == pytest.approx((2.0, 2.0)) and "--speculative-config" in verdict(
        [sure], [candidate]
    )[0]
    assert "--speculative-config" not in verdict([replace(sure, low=0.9)], [candidate])[0]


def test_the_host_has_its_share() -> None:
    """Host and device side by side, or one after the other. Kills: a step shorter than the host's, a sum where they
    overlap, no sum where the device waits, drafting counted twice."""
    host, costs = CostTable({1: 1.0, 8: 1.7, 32: 4.1}), CostTable.line(2.0, 0.0)
    beside, waiting = (Load(costs, host=host, waits=waits) for waits in (False, True))
    assert [beside.step_ms(count, 0, 0) for count in (1, 8, 32, 42)] == pytest.approx([2.0, 2.0, 4.1, 5.1])
    assert waiting.step_ms(1, 0, 0) == pytest.approx(3.0)
    for waits, step_ms in ((False, 1.0), (True, 1.5)):
        totals, _ = played(made((3, 7)), {}, Load(CostTable.line(0.5, 0.0), host=host, waits=waits))
        assert totals.step_ms == pytest.approx(6 * step_ms) and (waits or totals.drafting_ms == 0)
    waiters = {candidate.method: candidate.waits for candidate in candidates([], [5])}
    assert not waiters["suffix_lookup"] and not waiters["prompt_lookup"]


def test_larger_k_while_speed_rises(tmp_path: Path, capsys: Any) -> None:
    """Texts that are copied whole, and texts that are not. Kills: a ladder that ends at 12, one that goes on where
    nothing is gained, one that ends at the first step down."""
    rng = np.random.default_rng(0)
    largest, costs = {}, ["--costs", "10:0.01", "--draft-us", "0"]
    for name, copies in (("copied", True), ("strange", False)):
        texts = [rng.integers(0, 30_000, 200).tolist() for _ in range(4)]
        others = texts if copies else [rng.integers(0, 30_000, 200).tolist() for _ in range(4)]
        rows = [{"prompt": text, "output": other} for text, other in zip(texts, others, strict=True)]
        out = tmp_path / f"{name}.json"
        files = ["--dataset-path", str(lines(tmp_path, *rows)), "--output-json", str(out)]
        assert main(["replay", *files, "--methods", "prompt_lookup", *costs]) == 0
        played = json.loads(out.read_text())["rows"]
        largest[name] = max(row["num_draft"] for row in played if row["method"] == "prompt_lookup")
    assert largest["copied"] == 64 and largest["strange"] <= 12
