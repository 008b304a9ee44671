"""Which scheduling serves which proposer better, on Model Runner V2: drafts known when a step is planned, or not.

    python tests/bench/bench_scheduling.py [--model examples/demo/model]

Synchronous scheduling plans true draft lengths and waits for the drafts; asynchronous scheduling overlaps the
scheduler with the device and plans from each request's record. Without a GPU the runner goes through Triton's
interpreter: then the times mean nothing, and the counts (tokens per step, share of steps with a draft) are what there
is to read.
"""

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console

from vllm_specplugins.engine.measure.serving import ServingEngine, Traffic
from vllm_specplugins.tools.base_model import load_tokenizer
from vllm_specplugins.tools.bench.figures import Cell, rows_of
from vllm_specplugins.tools.bench.report import Report, show
from vllm_specplugins.tools.bench.rounds import serve_rounds
from vllm_specplugins.tools.bench.workloads import make_workload

ROOT = Path(__file__).resolve().parents[2]
LOOKUP = {"method": "prompt_lookup", "num_speculative_tokens": 5}
EXIT = {"method": "early_exit", "num_speculative_tokens": 3, "exit_layer": 2}
SYNC, ASYNC = {"async_scheduling": False}, {"async_scheduling": True}
# name -> speculative_config, more arguments of the engine
ARMS = {
    "none": (None, {}),
    "prompt_lookup, sync": (LOOKUP, SYNC),
    "prompt_lookup, async": (LOOKUP, ASYNC),
    "early_exit, sync": (EXIT, SYNC),
    "early_exit, async": (EXIT, ASYNC),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "examples" / "demo" / "model"))
    model = parser.parse_args().model
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    if not torch.cuda.is_available():
        os.environ |= {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "tests" / "engine" / "triton_cpu")}
    tokenizer, logs, rows = load_tokenizer(model), Path(tempfile.mkdtemp()), []
    with ExitStack() as stack:
        engines = {}
        for name, (config, more) in ARMS.items():
            share = 0.9 / len(ARMS)
            arguments = {"model": model, "max_model_len": 1024, "max_num_seqs": 4, "gpu_memory_utilization": share}
            engine = ServingEngine(name, {**arguments, **more}, config, logs / f"{name}.log")
            engines[name] = stack.enter_context(engine)
            machine = engine.wait()
        for kind in ("copy", "code"):
            prompts = make_workload(kind, tokenizer, 8, 256).prompts
            traffic = Traffic(prompts=prompts, temperature=0, max_tokens=48, at_a_time=4, ignore_eos=True)
            rows += rows_of(Cell(kind, 4, 0.0), serve_rounds(engines, [traffic] * 2, lambda: None))
    conditions = {"model": model, "rounds": 1, "prompts": 8, "tokens": 48}
    show(Report(rows, {name: config for name, (config, _) in ARMS.items()}, machine, conditions), Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
