"""Other engines' methods in a replay, logs with a drafter's accepted lengths, and formats of public benchmarks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make import trace

from vllm_specplugins.__main__ import main
from vllm_specplugins.draft import Draft, DraftBatch, Offer, ProposerContext
from vllm_specplugins.structures.arrays import view
from vllm_specplugins.tools.base_model import load_tokenizer
from vllm_specplugins.tools.data import samples
from vllm_specplugins.tools.replay.candidates import ALWAYS, LONG_MATCH, NGRAM_GPU, Fixed, candidates, match_end
from vllm_specplugins.tools.replay.costs import CostTable, Load
from vllm_specplugins.tools.replay.data import Traffic
from vllm_specplugins.tools.replay.drafter import Drafter
from vllm_specplugins.tools.replay.simulate import simulate

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"
DEMO_MODEL = ROOT / "examples" / "demo" / "model"
DRAFTER = Drafter("head", 2.0, 0.1, 3)


def frozen(tokens: list[int]) -> Any:
    return view(np.array(tokens, np.int32))


def longest(tokens: list[int], low: int, high: int) -> int:
    """The latest of the longest matches, by comparing all."""
    best = (0, 0)
    for end in range(1, len(tokens)):
        length = next((n for n in range(min(high, end), 0, -1) if tokens[end - n : end] == tokens[-n:]), 0)
        best = max(best, (length, end) if length >= low else (0, 0))
    return best[1]


def test_match_beside_brute_force() -> None:
    """Texts of three letters. Fails if an earlier, a shorter or a too short match is taken, if one is as long as the
    text itself, or if a match that is too long to count is preferred to a later one."""
    rng = np.random.default_rng(0)
    for low, high in (NGRAM_GPU, LONG_MATCH, (1, 3)):
        for _ in range(300):
            tokens = rng.integers(0, 3, rng.integers(1, 40)).tolist()
            assert match_end(frozen(tokens), low, high) == longest(tokens, low, high), (tokens, low, high)


def draft_of(ngrams: tuple[int, int], history: list[int], offered: list[int] | None, width: int) -> list[int]:
    context = ProposerContext(100, 64, 1, width, lambda text: [])
    offer = None if offered is None else Offer(Draft.whole(np.array([offered], np.int32)), 1.0)
    batch = DraftBatch(["request-0"], [frozen(history)], np.array([width], np.int32), [{}], offer=offer)
    draft = Fixed(*ngrams, context).propose(batch)
    return [int(token) for token in draft.token_ids[0, : draft.num_draft[0]]]


def test_fixed_rules() -> None:
    """Fails if vLLM's n-gram verifies fewer than K tokens, or goes on after the text's end; if a match of 3 overrides
    the drafter, or one of 4 does not; or if the drafter alone copies."""
    copied = [1, 2, 3, 4, 5, 9, 1, 2, 3]
    assert draft_of(NGRAM_GPU, copied, None, 4) == [4, 5, 9, 1]
    assert draft_of(NGRAM_GPU, [7, 8, 7, 8], None, 4) == [7, 8, 8, 8]
    assert draft_of(NGRAM_GPU, [1, 2, 3], None, 4) == [0, 0, 0, 0]
    assert draft_of(LONG_MATCH, copied, [6, 7, 8], 3) == [6, 7, 8]
    assert draft_of(LONG_MATCH, [*copied, 4], [6, 7, 8], 3) == [5, 9, 1]
    assert draft_of((0, 0), copied, [6, 7, 8], 3) == [6, 7, 8]


def drafted(prompt: list[int], output: list[int], accepted: list[int]) -> Traffic:
    traffic = Traffic()
    traffic.add(prompt, output, accepted={"head": np.array(accepted, np.int32)})
    return traffic


def test_drafter_by_hand() -> None:
    """One request, a drafter of 3 tokens. Fails if its accepted lengths are read a place off, if more than K or than
    the output are accepted, if a wrong token is right by chance, or if its time is not that of every step."""
    traffic = drafted([1, 2], [3, 4, 5, 6, 7, 8, 9], [9, 1, 9, 5, 0, 9, 9])
    assert traffic.vocab_size - 1 not in traffic.histories[0]
    build: Callable[..., Any] = lambda context: Fixed(0, 0, context)  # noqa: E731
    load = Load(CostTable.line(10.0, 0.5), draft_us=0.0)
    totals = simulate(traffic, build, 3, load, drafter=DRAFTER)
    # After the prefill's token 1 of 3 is accepted, and 5 follows; then 3, and 9 ends the output.
    assert (totals.steps, totals.drafted, totals.accepted, totals.emitted) == (2, 6, 4, 6)
    assert totals.step_ms == pytest.approx(2 * (10 + 3 * 0.5))
    assert totals.drafting_ms == pytest.approx(3 * (2.0 + 3 * 0.1))
    assert [DRAFTER.step_ms(4, length) for length in (3, 2, 1, 0)] == pytest.approx([3.2, 6.4 / 3, 3.2 / 3, 3.2 / 3])


def log_of(tmp_path: Path, name: str = "made.jsonl") -> Path:
    """Edits of code by a generator, and a drafter that is right about a token with probability 0.7."""
    rng, rows = np.random.default_rng(0), []
    for number, (prompt, output) in enumerate(trace("code", 16, seed=3, max_output=120)):
        right = (rng.geometric(0.3, len(output)) - 1).tolist()
        rows.append({"id": str(number), "prompt": prompt, "output": output, "accepted": {"eagle3": right}})
    file = tmp_path / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


FIELD = ["--costs", "llama-3.1-8b", "--draft-us", "0", "--drafter", "eagle3:2.14:0.00084:5", "--by-file"]
FIELD += ["--methods", "prompt_lookup", "--num-draft", "31", "--max-output", "1500"]


def test_command_with_a_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a row beside ours is missing, if files are mixed, even ids are played among odd ones, the drafter's time
    is left out, our rows are compared with none, or the speeds are no more those of
    docs/figures."""
    out = tmp_path / "out.json"
    files = [str(log_of(tmp_path)), str(log_of(tmp_path, "again.jsonl"))]
    given = ["replay", "--dataset-path", *files, "--ids", "odd", "--max-concurrency", "1,4", "--output-json", str(out)]
    assert main([*given, "--runner", "v1", *FIELD]) == 0
    printed, facts = capsys.readouterr().out, json.loads(out.read_text())
    assert "again, 4 at a time" in printed
    assert facts["requests"] == 16 and facts["drafter"] == "eagle3:2.14:0.00084:5" and facts["host"] is None
    rows = [row for row in facts["rows"] if row["task"] == "made" and row["batch"] == 1]
    same = [row for row in facts["rows"] if row["task"] == "again" and row["batch"] == 1]
    assert [{**row, "task": "made"} for row in same] == rows
    speeds = {(row["method"], row["policy"], row["num_draft"]): row["speed_up"] for row in rows}
    ngrams = {("ngram_gpu", "fixed", number) for number in (5, 15, 31)}
    ours = {("prompt_lookup", "always", 31), ("prompt_lookup", "gated", 31), ("cascade", "gated", 31)}
    rules = {("eagle3", "fixed", 5), ("match of 4 first", "fixed", 5)}
    assert set(speeds) == ngrams | ours | rules | {("none", "always", 0)}
    compared = next(row for row in rows if row["method"] == "cascade")["beside"]
    assert compared["eagle3, K = 5"][0] == pytest.approx(speeds["cascade", "gated", 31] / speeds["eagle3", "fixed", 5])
    assert all(low < ratio < high for ratio, low, high in compared.values()) and "none" in compared
    known_rows = json.loads((FIGURES / "field_table.json").read_text())["made"]["rows"]
    for known in (row for row in known_rows if row["method"] != "oracle of both"):
        names = "batch", "method", "policy", "num_draft"
        row = next(row for row in facts["rows"] if all(row[name] == known[name] for name in names))
        assert row["speed_up"] == pytest.approx(known["speed_up"], rel=0.01), known
    alone = next(row for row in rows if row["method"] == "eagle3")
    assert alone["draft_us"] == pytest.approx(2140, rel=0.15)


def test_a_cell_of_the_chat_model() -> None:
    """Answers of the chat model to the task "edit", without a gate. Fails if a step brings more or fewer tokens than in
    the engine that docs/figures has the figures of: a lookup that finds other text, or answers of other prompts."""
    rows = json.loads((FIGURES / "chat_model.json").read_text())["rows"]
    name = "prompt_lookup #2"  # the second configuration of it, whose gate is off
    known = next(row for row in rows if (row["task"], row["method"]) == ("edit", name))
    traffic = Traffic()
    lines = (FIGURES / "chat_answers.jsonl").read_text().splitlines()
    for line in lines[1 : 1 + known["num_outputs"]]:  # the first one warmed up
        traffic.add(json.loads(line)["prompt"], json.loads(line)["output"])
    [found] = [one for one in candidates(["prompt_lookup"], [31]) if one.policy == ALWAYS]
    totals = simulate(traffic, found.build, 31, Load(CostTable.line(10.0, 0.5), draft_us=0.0))
    assert totals.emitted / totals.steps == pytest.approx(known["tokens_per_step"], rel=0.02)


BAD_DRAFTERS = "eagle3", "eagle3:2.14", ":2:5", "eagle3:2:65", "eagle3:2:0", "eagle3:-1:5", "eagle3:nan:5", "a:1:2:3:4"


@pytest.mark.parametrize("text", BAD_DRAFTERS)
def test_bad_drafter(text: str, refused: Any) -> None:
    """Fails if a drafter without a name, a time or a K in range is taken, or the sentence names no form."""
    error = refused("replay", "--dataset-path", "nowhere", "--drafter", text)
    assert error.startswith("error: --drafter must be NAME:MS[:MS_A_TOKEN]:K")


BAD_LENGTHS: dict[str, tuple[dict[str, Any], str]] = {
    "no object": ({"accepted": [1]}, "have a JSON object as accepted, not [1]"),
    "negative": (
        {"accepted": {"eagle3": [1, -1]}},
        "have non-negative token counts as accepted['eagle3'], not [1, -1]",
    ),
    "another": ({"accepted": {"mtp": [1]}}, 'have "accepted": {"eagle3": [...]} for --drafter'),
}


@pytest.mark.parametrize("name", BAD_LENGTHS)
def test_bad_lengths(name: str, tmp_path: Path, refused: Any) -> None:
    """Fails if accepted lengths of another form or drafter are taken, or if the sentence does not name the line."""
    row, words = BAD_LENGTHS[name]
    file = tmp_path / "log.jsonl"
    file.write_text(json.dumps({"prompt": [1], "output": [2, 3], **row}))
    assert refused("replay", "--dataset-path", file, *FIELD).startswith(
        f"error: --dataset-path: line 1 of {file} must {words}"
    )


def read(*files: Path) -> list[tuple[str, str | None]]:
    tokenizer = load_tokenizer(str(DEMO_MODEL))
    decode = tokenizer.decode
    found = samples(files, lambda: tokenizer)
    return [(decode(sample.prompt), None if sample.output is None else decode(sample.output)) for sample in found]


def test_public_formats(tmp_path: Path) -> None:
    """Rows as the benchmarks' authors describe them. Fails if SpecDecode-Bench's lengths, which count the bonus token,
    are taken as they stand; if an array of tau-bench's conversations is one text; or if a later turn of SPEED-Bench is
    asked before the first is answered."""
    user = {"role": "user", "content": "Add 2."}
    simulated = tmp_path / "simulated.jsonl"
    row = {"id": "0", "prompt_token_ids": [5], "generated_token_ids": [6, 7, 8], "acc_eagle": {"acc_len": [3, 1, 2]}}
    simulated.write_text(json.dumps(row))
    from vllm_specplugins.tools.replay.data import Chosen, read_traffic

    traffic = read_traffic([simulated], lambda: None, Chosen(9, drafter="eagle"))
    assert traffic.histories[0].tolist() == [5, 6, 7, 8] and traffic.accepted[0]["eagle"].tolist() == [2, 0, 1]
    tau = tmp_path / "tau.json"
    turns = [{"role": "system", "content": "Help."}, user, {"role": "assistant", "content": "4"}]
    tau.write_text(json.dumps([{"task_id": 0, "traj": turns}, {"task_id": 1, "traj": turns}]))
    assert [output for _, output in read(tau)] == ["4", "4"]
    speed = tmp_path / "speed.jsonl"
    speed.write_text(json.dumps({"category": "maths", "messages": [user, {"role": "user", "content": "Why?"}]}))
    (prompt, output), *rest = read(speed)
    assert "Add 2." in prompt and "Why?" not in prompt and output is None and not rest
