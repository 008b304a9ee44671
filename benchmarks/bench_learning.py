"""A jump that learns while it serves: trained on docs, asked for code.

    python benchmarks/bench_learning.py --work FOLDER [--train-s 60 --minutes 2 --json FILE --plot FILE]

Three engines answer prompts of code, one after the other, busy for half of the time: with a jump trained on docs, as it
is and learning, and with one trained on code for as much CPU time as the learning took. The acceptance length of each
half minute is drawn, and the others' means; at the end all three weights answer the same prompts, which the learning
has not seen, without learning. What the second has won of the distance from the first to the third is printed. FOLDER
keeps what was trained.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from vllm_specplugins.tools.base_model import BaseModel, load_tokenizer
from vllm_specplugins.tools.data import rows_of
from vllm_specplugins.tools.training.core import train
from vllm_specplugins.tools.training.kinds import JumpSettings

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "demo"))
from library import is_held_out, library_files  # noqa: E402

MODEL = ROOT / "examples" / "demo" / "model"
K, ROW_TOKENS, PROMPT_TOKENS, OUTPUT_TOKENS, BATCH = 3, 256, 64, 96, 8
BUSY_S = 15.0  # and as long idle
Rows = list[list[int]]


def texts(kind: str) -> list[str]:
    """Text of a kind: what documents Python and this project, or code of the standard library."""
    if kind == "code":
        return [text for source, text in library_files() if not is_held_out(source)]
    from pydoc_data.topics import topics

    return [*topics.values(), *(path.read_text() for path in (ROOT / "docs").glob("*.md"))]


def rows_of_kind(kind: str, num_tokens: int) -> Rows:
    tokenizer = load_tokenizer(str(MODEL))
    return rows_of(
        (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts(kind)), tokenizer, num_tokens
    )


def trained(folder: Path, kind: str, seconds: float) -> Path:
    """A jump trained on text of a kind for so long."""
    rows = rows_of_kind(kind, ROW_TOKENS)
    base = BaseModel.load(str(MODEL), "cpu")
    make = partial(
        JumpSettings, batch_tokens=2048, row_tokens=ROW_TOKENS, learning_rate=1e-3, seed=0, num_draft=K,
        early_layers=0, late_layer=base.num_layers,
        inner_size=4 * base.hidden_size,
    )  # fmt: skip
    ends: list[float] = []
    train(base, rows, make(steps=5), folder / f"{kind}-speed", lambda *_: ends.append(time.process_time()))
    steps = max(10, int(seconds / (ends[-1] - ends[0]) * (len(ends) - 1)))
    began = time.process_time()
    out = folder / f"{kind}-{steps}"
    if not out.exists():
        train(base, rows, make(steps=steps), out)
    print(f"{kind}: {steps} steps, {time.process_time() - began:.0f} s", flush=True)
    return out


def prompts(seed: int) -> Iterator[Any]:
    """Prompts of code, forever."""
    order = torch.Generator().manual_seed(seed)
    rows = [row for row in rows_of_kind("code", PROMPT_TOKENS) if len(row) == PROMPT_TOKENS]
    return cycle({"prompt_token_ids": rows[i]} for i in torch.randperm(len(rows), generator=order).tolist())


def engine(head: Path, learn: Any) -> Any:
    """One that drafts with these weights."""
    from vllm import LLM

    config = {"method": "jump", "head": str(head), "num_speculative_tokens": K, "gate": "off", "learn": learn}
    return LLM(
        str(MODEL), dtype="float32", enforce_eager=True, max_model_len=512, speculative_config=config,
        disable_log_stats=False, enable_prefix_caching=False,
    )  # fmt: skip


def ask(llm: Any, source: Iterator[Any]) -> float:
    """The acceptance length of a batch."""
    from vllm import SamplingParams

    before = llm.collective_rpc("specplugins_stats")[0]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
    llm.generate([next(source) for _ in range(BATCH)], params, use_tqdm=False)
    after = llm.collective_rpc("specplugins_stats")[0]
    accepted, drafts = (after[name] - before[name] for name in ("accepted_tokens", "drafts"))
    return 1 + accepted / max(1, drafts)


def measured(head: Path, batches: int) -> float:
    """The acceptance length of these weights on prompts that are the same for all."""
    llm, source = engine(head, False), prompts(1)
    found = [ask(llm, source) for _ in range(batches)]
    shut_down(llm)
    return sum(found) / len(found)


def served(head: Path, learn: Any, minutes: float) -> tuple[list[tuple[float, float]], dict[str, float], float]:
    """Minutes and acceptance lengths of batches, the last metrics, and seconds that the learning worked."""
    llm, source, began = engine(head, learn), prompts(0), time.monotonic()
    points = []
    while (now := time.monotonic() - began) < 60 * minutes:
        if now % (2 * BUSY_S) < BUSY_S:
            points.append((now / 60, ask(llm, source)))
        else:
            time.sleep(0.2)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    learner = runner.drafter.adapter._learner
    found = {} if learner is None else {**learner.counts(), **learner.lengths(), "bytes": learner.num_bytes}
    worked = 0.0 if learner is None else learner.pace.worked_s
    shut_down(llm)
    return points, found, worked


def loaded(head: Path, learn: Any, seconds: float) -> dict[str, float]:
    """Milliseconds of steps at full load, and how many tokens a second."""
    from vllm import SamplingParams

    llm, source = engine(head, learn), prompts(2)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
    ask(llm, source)
    ask(llm, source)
    times, began, tokens = [], time.monotonic(), 0
    while time.monotonic() - began < seconds:
        for number in range(BATCH):
            llm.llm_engine.add_request(f"{began}-{len(times)}-{number}", next(source), params)
        while llm.llm_engine.has_unfinished_requests():
            since = time.perf_counter()
            llm.llm_engine.step()
            times.append(1000 * (time.perf_counter() - since))
        tokens += BATCH * OUTPUT_TOKENS
    rate = tokens / (time.monotonic() - began)
    shut_down(llm)
    times.sort()
    return {"p50_ms": times[len(times) // 2], "p99_ms": times[int(len(times) * 0.99)], "tokens_per_s": rate}


def shut_down(llm: Any) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


def plot(runs: dict[str, list[tuple[float, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for color, (name, points) in enumerate(runs.items()):
        by_half: dict[float, list[float]] = {}
        for minute, length in points if name == "learning" else ():
            by_half.setdefault(int(2 * minute) / 2 + 0.25, []).append(length)
        mean = sum(length for _, length in points) / len(points)
        if by_half:
            axes.plot(list(by_half), [sum(own) / len(own) for own in by_half.values()], "o-", label=name)
        else:
            axes.axhline(mean, linestyle="--", color=f"C{color}", label=f"{name}, does not learn")
    axes.set(xlabel="minutes of serving code, busy for half of them", ylabel="tokens a step (acceptance length)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--train-s", type=float, default=60)
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--others-minutes", type=float, help="of the engines that do not learn")
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--busy-share", type=float, default=0.1)
    parser.add_argument("--idle-share", type=float, default=0.5)
    parser.add_argument("--load-s", type=float, help="only: steps at full load, learning and not, for so long each")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    saved, others = args.work / "learned", args.others_minutes or args.minutes
    docs = trained(args.work, "docs", args.train_s)
    learn = {"busy_share": args.busy_share, "idle_share": args.idle_share, "path": str(saved)}
    if args.load_s:
        for name, own in (("off", False), ("on", learn), ("off again", False), ("on again", learn)):
            print(name, loaded(docs, own, args.load_s), flush=True)
        return
    points, totals, worked = served(docs, learn, args.minutes)
    runs = {"learning": points}
    print(totals, f"worked {worked:.0f} s", flush=True)
    code = trained(args.work, "code", worked)
    runs["as trained on docs"], _, _ = served(docs, False, others)
    runs["trained on code"], _, _ = served(code, False, others)
    lengths = {
        name: measured(head, args.batches) for name, head in (("docs", docs), ("learned", saved), ("code", code))
    }
    recovered = (lengths["learned"] - lengths["docs"]) / (lengths["code"] - lengths["docs"])
    found = {"lengths": lengths, "recovered": recovered, "worked_s": worked, "learning": totals, "runs": runs}
    print(json.dumps({name: own for name, own in found.items() if name != "runs"}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found))
    if args.plot:
        plot(runs, args.plot)


if __name__ == "__main__":
    main()
