"""What a decoding step costs the device and the host, counted on the simulated device (tests/simulated_device).

    python tests/bench/bench_hot_path.py [--methods early_exit draft_model ...] [--batches 1 8 32]

Medians over the steps of a generation behind its prompts, on Model Runner V2 with CUDA graphs for decoding, greedy,
after the warm-up that vLLM's worker does on a GPU; "compiled" are the kinds of arguments of Triton kernels that were
first met in the whole generation, and "whole" the share of its steps without a prompt in which the target ran as one
graph. Times are not measured. Exits with 1 if a method of ours waits for the device, launches more outside of graphs
than vLLM's own draft_model or runs less than 95 % of these steps as one graph, or if anything is compiled meanwhile.
"""

import argparse
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

os.environ["SPECPLUGINS_RUNNER"] = "v2"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["VLLM_SPECPLUGINS_SELF_CHECK"] = "0"  # its inputs are not the warm-up's
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))

from conftest import DEMO_MODEL, first_layers, graphs, shut_down
from recorded import drafts_pay, runner
from simulated_device.device import Device, interpreted, simulated_device
from simulated_device.ledger import Counts
from vllm.config import CUDAGraphMode

K = 3
NUM_TOKENS = 17  # one from the prompt and four whole steps of K + 1
STAGES = [{"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": 1}]
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "draft_model": {"model": str(first_layers(DEMO_MODEL, 1))},  # as many layers as the exit has
    "early_exit": {"exit_layer": 1},
    "early_exit, sampled": {"exit_layer": 1, "draft_sample_method": "probabilistic"},
    "prompt_lookup": {},
    **{f"cascade, {policy}": {"policy": policy, "stages": STAGES} for policy in ("auto", "verify")},
}
COLUMNS = {
    "launches": "launches",
    "replays": "graphs",
    "replayed_launches": "launches in graphs",
    "synchronisations": "waits",
    "bytes_to_host": "bytes to host",
    "bytes_to_device": "bytes to device",
    "whole": "whole, %",
    "compiled": "compiled",
}


def start(method: str, max_batch: int) -> Any:
    from vllm import LLM

    width = 1 if method == "none" else K + 1
    sizes = sorted({n * w for n in (1, 8, 32) if n <= max_batch for w in (1, width)})
    own = {"method": method.split(",")[0], "num_speculative_tokens": K, **METHODS[method]}
    llm = LLM(
        model=str(DEMO_MODEL),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=max_batch,
        block_size=32,
        num_gpu_blocks_override=256,
        enable_prefix_caching=False,
        async_scheduling=True,
        speculative_config=None if method == "none" else own,
        **graphs(sizes),
    )
    if runner(llm).adaptive_verification is not None:
        drafts_pay(llm)
    return llm


@contextmanager
def recorded_steps(llm: Any) -> Iterator[list[bool]]:
    """Of each step without a prompt in it, whether the target ran as one whole graph."""
    manager = llm.llm_engine.model_executor.driver_worker.worker.model_runner.cudagraph_manager
    dispatch, recorded = manager.dispatch, []

    def watching(*args: Any, max_query_len: int | None = None, **kwargs: Any) -> Any:
        chosen = dispatch(*args, max_query_len=max_query_len, **kwargs)
        if max_query_len is not None:  # it is None with a prompt
            recorded.append(chosen.cg_mode == CUDAGraphMode.FULL)
        return chosen

    manager.dispatch = watching
    try:
        yield recorded
    finally:
        del manager.dispatch


def step_counts(llm: Any, device: Device, batch: int) -> list[Counts]:
    """Of each step of one generation behind the prompts; the first, and the last, whose batch shrinks, left out."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    engine, serving = llm.llm_engine, device.ledger.serving
    for request in range(batch):
        prompt = [10 + (request + place) % 7 for place in range(12)]  # repeats itself: lookups find something
        engine.add_request(f"{batch}-{request}", {"prompt_token_ids": prompt}, params)
    steps, finished = [], False
    while engine.has_unfinished_requests():
        before = serving - Counts()
        outputs = engine.step()
        finished |= any(output.finished for output in outputs)
        if (counts := serving - before).steps and not finished:
            steps.append(counts)
    return steps[1:]


def measure(method: str, batches: list[int]) -> Iterator[tuple[int, dict[str, float], Counter[str], Counter[str]]]:
    """For each batch size: numbers by column, kinds of arguments first met, places that waited."""
    with simulated_device(is_cuda=True, warm_up=True) as device:
        llm = start(method, max(batches))
        for batch in batches:
            device.ledger.new_specialisations.clear()
            device.ledger.places.clear()
            with recorded_steps(llm) as recorded:
                steps = step_counts(llm, device, batch)
            row = {
                field.name: statistics.median(getattr(counts, field.name) / counts.steps for counts in steps)
                for field in fields(Counts)
            }
            compiled = Counter(key[0] for key in device.ledger.new_specialisations)
            row |= {"whole": 100 * statistics.mean(recorded), "compiled": compiled.total()}
            yield batch, row, compiled, Counter(device.ledger.places)
        shut_down(llm)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    args = parser.parse_args()
    rows: dict[tuple[str, int], dict[str, float]] = {}
    notes, missed = [], []
    print("| method | batch |", " | ".join(COLUMNS.values()), "|")
    print("|---|---|" + "---|" * len(COLUMNS), flush=True)
    with interpreted():
        for method in args.methods:
            for batch, row, compiled, places in measure(method, args.batches):
                rows[method, batch] = row
                numbers = " | ".join(f"{row[name]:.3g}" if name == "whole" else f"{row[name]:g}" for name in COLUMNS)
                print(f"| {method} | {batch} | {numbers} |", flush=True)
                notes += [f"{method}, {batch}: waits at {place}, {n} times" for place, n in places.items()]
                notes += [f"{method}, {batch}: compiles {name}, {n} kinds" for name, n in compiled.items()]
    for (method, batch), row in rows.items():
        is_ours = method not in ("none", "draft_model")
        if is_ours and row["synchronisations"]:
            missed.append(f"{method}, {batch}: waits {row['synchronisations']:g} times a step, but must never.")
        theirs = rows.get(("draft_model", batch))
        if is_ours and theirs and row["launches"] > theirs["launches"]:
            missed.append(f"{method}, {batch}: launches {row['launches']:g}, vLLM's own {theirs['launches']:g}.")
        if is_ours and row["whole"] < 95:
            missed.append(f"{method}, {batch}: {row['whole']:.3g} % of the steps are one graph, but 95 % must be.")
        if row["compiled"]:
            missed.append(f"{method}, {batch}: compiles {row['compiled']:g} kernels while serving, but must none.")
    print(*notes, *missed, sep="\n")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
