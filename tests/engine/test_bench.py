"""`bench` from end to end: real engines in separate processes take turns."""

import argparse
import json
import multiprocessing
from pathlib import Path

import pytest
from conftest import DEMO_MODEL, RUNNER, long
from forked import forking, run

from vllm_specplugins.engine.harness.serving import serve_round, serving_engine
from vllm_specplugins.engine.harness.traffic import Traffic, Turn
from vllm_specplugins.tools.base_model import load_tokenizer
from vllm_specplugins.tools.bench.command import rounds_of
from vllm_specplugins.tools.bench.figures import Cell
from vllm_specplugins.tools.bench.workloads import read_workloads
from vllm_specplugins.tools.picker import NAMED

HELD_OUT = Path(DEMO_MODEL).parent / "heldout.jsonl"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(RUNNER == "v2", reason="one runner is enough for its arithmetic")]


def edits(folder: Path) -> Path:
    """A file of prompts from which the demo model copies nearly everything."""
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    texts = sorted((row["text"] for row in rows if row["kind"] == "edit"), key=len)
    file = folder / "edits.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return file


def test_benchmarks_the_demo_model(tmp_path: Path) -> None:
    """Kills: an engine that does not start from here, metrics of another name, a clock that runs while others serve,
    requests that are not served together, outputs in another order than their prompts.
    """
    options = f"--dataset-path {edits(tmp_path)} --max-concurrency 1,3 --num-prompts 3 --output-len 32 --rounds 2"
    method = json.dumps({"method": "prompt_lookup", "gate": "off"})  # drafts hardly pay on so small a model
    command = ["-m", "vllm_specplugins", "bench", "--model", DEMO_MODEL, *options.split()]
    command += ["--methods", method]
    done = run([*command, "--output-json", tmp_path / "bench.json"])
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["lossless"] and found["machine"]["dtype"] == "float32"
    rows = {(row["method"], row["cell"]["batch"]): row for row in found["rows"]}
    assert len(rows) == 4
    for (method, _), row in rows.items():
        assert row["num_outputs"] == 6 and row["num_different"] == 0
        assert row["step_ms"] > 0 and row["gap_ms"][0] <= row["gap_ms"][1]
        if method == "none":
            assert row["tokens_per_step"] == 1 and row["coverage"] == 0
            continue
        # It copies: most steps find something, and most of it is right.
        assert 1.2 < row["tokens_per_step"] < 32 and 0.3 < row["coverage"] <= 1 and 0.2 < row["accepted"] <= 1
        pairs = zip(row["decoding"]["rounds"], row["step_cost"]["rounds"], strict=True)
        products = [decoding * step_cost for decoding, step_cost in pairs]
        assert 0.99 * min(products) <= row["tokens_per_step"] <= 1.01 * max(products)
    single, together = rows["none", 1], rows["none", 3]
    assert together["tokens_per_second"] > 0 and single["first_ms"] > 0


# Without a gate, which goes by times.
METHODS = {
    "suffix_lookup": {"method": "suffix_lookup", "gate": "off"},
    "prompt_lookup": {"method": "prompt_lookup", "gate": "off"},
    "cascade": {**NAMED["cascade"], "gate": "off"},
}


@pytest.mark.parametrize("method", ["suffix_lookup", *(long(name) for name in METHODS if name != "suffix_lookup")])
def test_a_round_is_a_first_reading(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens a step of the last round are those of a fresh engine on the same prompts, within 5 %, although other
    rounds, and the same prompts in another cell, were served before. Kills: prompts asked in two rounds of which the
    second replays the first's outputs; a tenant that cells share.
    """
    monkeypatch.setattr(multiprocessing, "get_context", forking)
    [workload] = read_workloads(edits(tmp_path), load_tokenizer(str(DEMO_MODEL)), 28, 0)
    args = argparse.Namespace(num_prompts=7, rounds=2, output_len=48, ignore_eos=False)
    cells = [rounds_of(args, workload, Cell(name, batch, 0.0), {}) for name, batch in (("copy", 4), ("copy", 1))]
    arguments = {"model": str(DEMO_MODEL), "max_model_len": 512, "max_num_seqs": 4}

    def last_turn(rounds: list[Traffic]) -> Turn:
        with serving_engine(method, arguments, METHODS[method], tmp_path / "engine.log") as engine:
            engine.receive()
            for traffic in rounds:
                [turn] = serve_round({method: engine}, traffic).values()
            return turn

    warm, fresh = last_turn([traffic for rounds in cells for traffic in rounds]), last_turn(cells[-1][-1:])
    assert [answer.token_ids for answer in warm.answers] == [answer.token_ids for answer in fresh.answers]
    assert fresh.tokens_per_step > 1.2
    assert warm.tokens_per_step == pytest.approx(fresh.tokens_per_step, rel=0.05)
