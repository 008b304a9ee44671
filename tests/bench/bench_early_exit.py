"""What a draft step of early_exit costs, inside a real engine on Model Runner V1, against what it should cost.

    python examples/demo/widen.py examples/demo/model .cache/widened
    python tests/bench/bench_early_exit.py --model .cache/widened

One request decodes without drafts; in each step every exit layer runs one draft token through `PagedForward`, and the
step's own forward pass and head are timed beside it. The limit of a draft step is E/L of that forward pass plus the
head; the last column is the distance to it (the bar: at most 1.25). The parts are medians over the steps.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "demo"))
from prompts import load_prompts

from vllm_specplugins.draft import Draft, DraftBatch, Feedback


class Stopwatch:
    """Milliseconds by name."""

    def __init__(self) -> None:
        self.times: dict[Any, list[float]] = defaultdict(list)

    def call(self, name: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        self.times[name].append((time.perf_counter() - start) * 1000)
        return result

    def median(self, name: Any) -> float:
        return statistics.median(self.times[name][2:])


class TimedLayers:
    """A model proposer that drafts nothing: it runs each exit layer once a step and takes the time."""

    def __init__(self, layers: list[int], watch: Stopwatch):
        self._layers, self._watch = layers, watch

    def propose(self, batch: DraftBatch) -> Draft:
        target = batch.target
        assert target is not None
        for layer in self._layers:
            arguments = (layer, target.last_token_ids, target.num_tokens - 1)
            hidden_states = self._watch.call(("layers", layer), target.forward.hidden_states, *arguments)
            self._watch.call("head", target.forward.argmax, hidden_states)
        return Draft.empty(batch.num_reqs)

    def observe(self, feedback: Feedback) -> None:
        pass

    def forget(self, request_ids: Any) -> None:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compile", action="store_true", help="without enforce_eager")
    args = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    num_layers = json.loads((Path(args.model) / "config.json").read_text())["num_hidden_layers"]
    layers = sorted({layer for layer in (1, 2, 4, num_layers // 2, num_layers) if layer <= num_layers})
    stages = [{"method": "early_exit", "exit_layer": layer} for layer in layers]
    llm = LLM(args.model, dtype=args.dtype, max_model_len=2048, max_num_seqs=1, enforce_eager=not args.compile,
              speculative_config={"method": "cascade", "num_speculative_tokens": 1, "stages": stages})  # fmt: skip
    worker = llm.llm_engine.model_executor.driver_worker.worker
    runner, watch = worker.model_runner, Stopwatch()
    worker._barrier.guard.proposer = TimedLayers(layers, watch)
    forward = runner._model_forward

    def timed_forward(*positional: Any, **named: Any) -> Any:
        tokens = named.get("input_ids", positional[0] if positional else None)
        return watch.call(("forward", len(tokens)), forward, *positional, **named)

    runner._model_forward = timed_forward
    params = SamplingParams(temperature=0, max_tokens=args.steps, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(load_prompts("continue", 1), params, use_tqdm=False)
    seconds = time.perf_counter() - start

    whole, head = watch.median(("forward", 1)), watch.median("head")
    table = Table(title=f"one draft token, {args.dtype}, ms (medians of {args.steps} steps)")
    for column in ("exit layer", "layers", "head", "draft step", "limit", "draft step / limit"):
        table.add_column(column, justify="right")
    for layer in layers:
        measured, limit = watch.median(("layers", layer)), whole * layer / num_layers + head
        table.add_row(
            f"{layer} of {num_layers}", f"{measured:.2f}", f"{head:.2f}", f"{measured + head:.2f}", f"{limit:.2f}",
            f"{(measured + head) / limit:.2f}",
        )  # fmt: skip
    console = Console(width=110)
    console.print(table)
    print(f"the target's forward pass for one token: {whole:.2f} ms of {num_layers} layers; {seconds:.1f} s in all")
    print(f"torch {version('torch')}, vllm {version('vllm')}, {platform.machine()}, {os.cpu_count()} cores")
    return 0


if __name__ == "__main__":
    sys.exit(main())
