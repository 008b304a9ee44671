"""Measures what this plugin brings on this machine, in a few minutes: a real chat model and vLLM, engines in turns.

    bash examples/quickstart.sh [--model MODEL] [--minutes 2.5] [--output-len 48] [--output-json FILE]

Two engines serve the same prompts, one without speculation and one with prompt_lookup, until the difference is known to
ten percent or the minutes are over. Then both answer by a JSON schema, and with parameters that vLLM refuses under its
speculation. vLLM's n-gram is replayed on the answers at the step times that were just measured. The last line is the
command to serve with.
Exit status: 0; 1 if an output differs although the engines compute in float32; 2 if something could not be done.
"""

import argparse
import statistics
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chat_model import chat_model

from vllm_specplugins.config import ConfigError
from vllm_specplugins.draft import Draft, DraftBatch, Proposer, ProposerContext
from vllm_specplugins.engine.harness.serving import serve_round
from vllm_specplugins.engine.harness.traffic import Traffic, Turn
from vllm_specplugins.tools.base_model import load_tokenizer
from vllm_specplugins.tools.bench.command import Turns, engine_arguments, engines_up
from vllm_specplugins.tools.bench.figures import Cell, Row, rows_of
from vllm_specplugins.tools.bench.report import Report, mean_ratio, tell
from vllm_specplugins.tools.bench.workloads import Workload, make_workload
from vllm_specplugins.tools.data import chat_prompt
from vllm_specplugins.tools.picker import NONE, pick_methods
from vllm_specplugins.tools.progress import progress
from vllm_specplugins.tools.report import serve_with

ROOT = Path(__file__).resolve().parents[1]
METHOD = "prompt_lookup"
TASKS = "edit", "summary", "chat"
PROMPTS = 2  # of each task in a round
MIN_ROUNDS, NARROW = 4, 1.1  # rounds at least; ratio of the ends of an interval that ends the measurement
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "company": {"type": "string"}, "invoice": {"type": "integer"}},
    "required": ["name", "company", "invoice"],
    "additionalProperties": False,
}
QUESTION = "Extract name, company and invoice as JSON: Peter Novak of Brightwater Pumps asks about invoice 2291."


def main() -> int:
    args = parser().parse_args()
    try:
        args.model = args.model or str(a_model())
        return run(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", help="folder or name of a checkpoint (default: SmolLM2-135M-Instruct, from Q4_1)")
    parser.add_argument("--minutes", type=float, default=2.5, help="of measuring (default: 2.5)")
    parser.add_argument("--output-len", type=int, default=48, help="length limit of an output (default: 48)")
    parser.add_argument("--output-json", type=Path, help="where to write the figures")
    parser.set_defaults(max_concurrency=[1], engine_args={}, dtype=None, rate=[], trace=None, load_format=None)
    return parser


def a_model() -> Path:
    """The chat model, or the demo model where it cannot be had."""
    try:
        return chat_model()
    except RuntimeError as error:
        print(f"The demo model, which loops, is served instead: {error}.", file=sys.stderr)
        return ROOT / "examples" / "demo" / "model"


def run(args: Namespace) -> int:
    configs, tokenizer = pick_methods([METHOD]), load_tokenizer(args.model)
    tasks = [make_workload(name, tokenizer, 8) for name in TASKS]
    arguments = engine_arguments(args, len(configs), tasks)
    with progress() as bars:
        bar = bars.add_task("", total=None)

        def advance(words: str | None = None) -> None:
            bars.update(bar, description=words)

        with engines_up(configs, arguments, advance) as (engines, machine):
            turns = measure(args, engines, tasks, advance)
            extras = [line(*served) for served in asked_beside(engines, tokenizer, advance)]
    rows = [row for cell, turns_of in turns.items() for row in rows_of(cell, turns_of, not torch.cuda.is_available())]
    conditions = {
        "model": args.model, "rounds": len(rows[0].ratio.rounds), "prompts": PROMPTS, "tokens": args.output_len,
        "together": True, "arguments": arguments, "keeps": [], "short": [], "forced": False,
    }  # fmt: skip
    report = Report(rows, configs, machine, conditions)
    ngram = replayed(turns, rows, {task.name: task for task in tasks}, machine.runner)
    status = tell(args, report, {"ngram": ngram})
    others = ", ".join(f"{ratio:.2f}x at K = {num_draft}" for num_draft, ratio in ngram.items())
    print(f"vLLM's n-gram, replayed on these answers at these step times: {others}.")
    for text, is_equal in extras:
        print(text)
        status = status if is_equal or machine.dtype != "float32" else 1
    if chosen := report.verdict()[1]:
        print(f"\nTo serve it:\nvllm serve {args.model} {serve_with(chosen)}")
    return status


def measure(
    args: Namespace, engines: Mapping[str, Any], tasks: Sequence[Workload], advance: Callable[..., None]
) -> Turns:
    """Turns of all engines in rounds of all tasks; a first round warms up."""
    turns: Turns = defaultdict(lambda: defaultdict(list))
    began, ends = time.monotonic(), time.monotonic() + 60 * args.minutes
    names, index = list(engines), 0
    while index <= MIN_ROUNDS or (time.monotonic() < ends and not is_narrow(turns)):
        speed = speed_so_far(turns) if index > 1 else "warming up"  # after whole rounds
        for task in tasks:
            cell = Cell(task.name, 1, 0.0)
            minutes = f"{(time.monotonic() - began) / 60:.1f} of about {args.minutes:g}"
            advance(f"measuring {task.name}, minute {minutes}, {speed}")
            asked = {"prompts": prompts_of(task, index), "output_lengths": args.output_len}
            traffic = Traffic(**asked, temperature=0.0, at_a_time=1, salt=f"{cell}, round {index}")
            order = names[index % len(names) :] + names[: index % len(names)]  # who goes first may matter
            for name, turn in serve_round({name: engines[name] for name in order}, traffic).items():
                turns[cell][name].append(turn)
        index += 1
    return {cell: {name: turns_of[name] for name in names} for cell, turns_of in turns.items()}


def speed_so_far(turns: Turns) -> str:
    rows = [row for cell, turns_of in turns.items() for row in rows_of(cell, turns_of, not torch.cuda.is_available())]
    return f"so far {mean_ratio([row for row in rows if row.method == METHOD]).median:.2f}x"


def prompts_of(task: Workload, index: int) -> list[list[int]]:
    """The prompts of a round."""
    return task.take(PROMPTS, PROMPTS * index)


def is_narrow(turns: Turns) -> bool:
    rows = [row for cell, turns_of in turns.items() for row in rows_of(cell, turns_of, not torch.cuda.is_available())]
    low, high = mean_ratio([row for row in rows if row.method == METHOD]).interval()
    return high < NARROW * low


def asked_beside(engines: Mapping[str, Any], tokenizer: Any, advance: Callable[..., None]) -> Any:
    """A JSON schema, and parameters that vLLM's speculation refuses: the words for each, and both outputs."""
    prompt = chat_prompt(tokenizer, [{"role": "user", "content": QUESTION}])
    the = tokenizer(" the", add_special_tokens=False)["input_ids"][0]
    cases: dict[str, dict[str, Any]] = {
        "A JSON schema": {"structured_outputs": {"json": SCHEMA}},
        "min_p and logit_bias, which vLLM refuses under speculation": {"min_p": 0.1, "logit_bias": {the: -5.0}},
    }
    for words, sampling in cases.items():
        advance(words)
        answered = serve_round(
            engines, Traffic(prompts=[prompt], temperature=0.0, output_lengths=64, at_a_time=1, sampling=sampling)
        )
        yield words, *(answered[name] for name in (NONE, METHOD)), tokenizer


def line(words: str, plain: Turn, ours: Turn, tokenizer: Any) -> tuple[str, bool]:
    """A sentence on a request, and whether both engines answered alike."""
    [expected], [answer] = plain.answers, ours.answers
    is_equal, text = (
        expected.token_ids == answer.token_ids,
        tokenizer.decode(answer.token_ids, skip_special_tokens=True),
    )
    alike = "the same output as without speculation" if is_equal else "ANOTHER output than without speculation"
    return (
        f"{words}: {alike}, in {1 + ours.num_steps} steps for {1 + plain.num_steps}: {' '.join(text.split())[:200]}",
        is_equal,
    )


def replayed(turns: Turns, rows: Sequence[Row], tasks: Mapping[str, Workload], runner: str) -> dict[int, float]:
    """Predicted speed of vLLM's n-gram on this model runner to no speculation, by K: the geometric mean over the
    tasks."""
    # Processes of engines import this file: without speculation vLLM does not start where numba is loaded before it.
    from vllm_specplugins.tools.replay.candidates import rivals
    from vllm_specplugins.tools.replay.costs import CostTable, Load
    from vllm_specplugins.tools.replay.data import Traffic as Log
    from vllm_specplugins.tools.replay.simulate import simulate

    ratios: dict[int, list[float]] = defaultdict(list)
    for cell, turns_of in turns.items():
        plain, ours = (next(row for row in rows if (row.cell, row.method) == (cell, name)) for name in (NONE, METHOD))
        drafting = turns_of[METHOD]
        num_drafted = sum(turn.num_draft_tokens for turn in drafting) / sum(turn.num_steps for turn in drafting)
        token_ms = max(0.0, ours.step_ms - plain.step_ms) / max(1.0, num_drafted)
        load, log = Load(CostTable.line(plain.step_ms, token_ms), draft_us=100.0), Log()
        for index, turn in enumerate(turns_of[NONE]):
            for prompt, answer in zip(prompts_of(tasks[cell.workload], index), turn.answers, strict=True):
                log.add(prompt, answer.token_ids)
        without = simulate(log, None, 1, load).tokens_per_ms
        for rival in rivals(None):
            build = NGram if runner == "V1" else rival.build
            ratios[rival.num_draft].append(simulate(log, build, rival.num_draft, load).tokens_per_ms / without)
    return {num_draft: statistics.geometric_mean(values) for num_draft, values in ratios.items()}


class NGram(Proposer):
    """vLLM's n-gram on Model Runner V1, by vLLM's function: it drafts nothing where it finds no match."""

    def __init__(self, context: ProposerContext):
        self._width, self._max_model_len = context.max_num_draft, context.max_model_len

    def propose(self, batch: DraftBatch) -> Draft:
        from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as find

        token_ids, num_draft = np.zeros((batch.num_reqs, self._width), np.int32), np.zeros(batch.num_reqs, np.int32)
        for row, tokens in enumerate(batch.token_ids):
            draft = find(tokens, 2, 8, self._max_model_len, int(batch.max_num_draft[row]))
            num_draft[row] = len(draft)
            token_ids[row, : len(draft)] = draft
        return Draft(token_ids, num_draft)


if __name__ == "__main__":
    sys.exit(main())
