"""What a decoding step of Model Runner V2 costs the host: the engine's thread, on a device that does nothing.

    python benchmarks/bench_host_step.py [--arms none ngram_gpu "prompt_lookup, K = 31, free" JSON]
    python benchmarks/bench_host_step.py --check          ends with 1 where a bar is missed

Host and device are two stages of a pipeline, so that a step takes the longer of both; this is the host's. Every arm is
an engine in a process of its own; they take turns. Microseconds of the thread's CPU time, minima over all steps: other
work on the machine leaves these alone. What the driver takes is not in it (about 2 us a launch, 4 a copy, 10 a graph),
nor what a front end does. K does not change (no gate by time, where time means nothing) and is 5; an arm's ending says
more: ", K = 31"; ", K = 0": the scheduler plans no drafts; ", off": drafting is switched off. ", free": further
tokens cost the target nothing, as with few requests; otherwise about half of what is drafted is trimmed. ", gate off":
as configured. ", TRITON_ATTN": with what the attention of trees extends.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from time import thread_time_ns
from typing import Any

import null_device

from vllm_specplugins.tools.report import versions

LOOKUP = {"method": "prompt_lookup", "min_ngram": 2, "max_ngram": 8}
EXIT = {"method": "early_exit", "exit_layer": 1, "draft_sample_method": "greedy"}
METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram_gpu": {"method": "ngram_gpu", "prompt_lookup_min": 2, "prompt_lookup_max": 8},
    "prompt_lookup": LOOKUP,
    "suffix_lookup": {"method": "suffix_lookup"},
    "cascade": {"method": "cascade", "stages": [LOOKUP, EXIT]},
    "lookahead tree": {"method": "lookahead", "num_speculative_tokens": 29},
    "early_exit": EXIT,
    "coupled": {**EXIT, "draft_sample_method": "coupled"},
    "look_ahead": {**EXIT, "look_ahead": "?"},
    "jump": {"method": "jump", "draft_sample_method": "greedy"},
    "learning": {"method": "jump", "draft_sample_method": "greedy", "learn": True},
    "tree": {**EXIT, "tree": 5},
    "lookup and tree": {"method": "cascade", "stages": [LOOKUP, EXIT], "tree": 5},
    **{name: {"method": name} for name in ("draft_model", "eagle3", "mtp")},
    "store and jump": {"method": "cascade", "stages": [{"method": "suffix_lookup"}, {"method": "jump"}]},
    **{
        f"lookup and {name}": {"method": "cascade", "stages": [LOOKUP, {"method": name}]}
        for name in ("draft_model", "eagle3", "mtp", "jump", "medusa")
    },
}
# Arm, what it is held against, and the most that its step may cost of the other's at 1, 8 and 32 requests: what is
# aimed at, and what --check holds today.
BARS = [
    ("prompt_lookup", "ngram_gpu", (0.95, 0.95, 0.98), (1.15, 1.15, 1.15)),
    ("prompt_lookup, free", "ngram_gpu", (0.92, 0.92, 0.92), (1.15, 1.15, 1.15)),
    ("prompt_lookup, K = 31", "ngram_gpu, K = 31", (0.95, 0.95, 0.98), (1.20, 1.15, 1.15)),
    ("suffix_lookup", "prompt_lookup", (1.05, 1.05, 1.05), (1.15, 1.15, 1.15)),
    ("cascade", "prompt_lookup", (1.05, 1.05, 1.05), (1.15, 1.15, 1.15)),
    ("lookup and jump", "prompt_lookup", (1.05, 1.05, 1.05), (1.15, 1.15, 1.15)),
    ("store and jump", "lookup and jump", (1.05, 1.05, 1.05), (1.15, 1.15, 1.15)),
    ("early_exit", "ngram_gpu", (1.00, 1.00, 1.00), (1.20, 1.15, 1.15)),
    ("coupled", "ngram_gpu", (1.00, 1.00, 1.00), (1.30, 1.25, 1.30)),
    ("look_ahead", "early_exit", (1.00, 1.00, 1.00), (1.10, 1.10, 1.10)),
    ("learning", "jump", (1.02, 1.02, 1.02), (1.06, 1.05, 1.05)),
    # At one request, six engines took 839 to 917 us (median 894), six without speculation 699 to 851 us (729).
    ("prompt_lookup, K = 0", "none", (1.10, 1.10, 1.06), (1.28, 1.20, 1.20)),
    ("tree, K = 0", "early_exit, K = 0, TRITON_ATTN", (1.02, 1.02, 1.02), (1.15, 1.15, 1.15)),
    ("lookahead tree, K = 0", "prompt_lookup, K = 0, TRITON_ATTN", (1.02, 1.02, 1.02), (1.15, 1.15, 1.15)),
    ("lookup and tree, K = 0", "cascade, K = 0, TRITON_ATTN", (1.02, 1.02, 1.02), (1.15, 1.15, 1.15)),
    ("lookup and eagle3", "eagle3", (1.05, 1.05, 1.05), (1.40, 1.25, 1.25)),
]
BATCHES = (1, 8, 32)
COUNTED = "none", "prompt_lookup", "suffix_lookup", "cascade"  # arms of which --check holds the launches to the table
TABLE = Path(__file__).parents[1] / "docs" / "figures" / "step_costs.json"
TRITON = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
TREES = "vllm_specplugins.engine.v2.trees.attention.TreeAttentionBackend"
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128,
    "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32",
}  # fmt: skip
SIZES = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512]  # the last is vLLM's largest, too


class Engine:
    """One arm's."""

    def __init__(self, arm: str):
        null_device.put_in_place()
        from vllm import LLM
        from vllm.v1.attention.backends import registry

        from vllm_specplugins.engine.v2.learning import Readings

        # Of numbers that no kernel has computed, by another thread.
        Readings._reading = lambda *arguments: None  # type: ignore[method-assign]

        name, *endings = arm.split(", ") if not arm.startswith("{") else [arm]
        method = METHODS[name] if name in METHODS else json.loads(name)
        num_draft = 31 if "K = 31" in endings else 5
        planned = 0 if {"K = 0", "off"} & {*endings} else num_draft
        null_device.num_draft = 0 if method is None else planned
        config = None if method is None else {"num_speculative_tokens": num_draft, **method}
        if "gate off" in endings and config is not None:
            config["gate"] = "off"
        attention = TREES if "tree" in name else TRITON if "TRITON_ATTN" in endings else None
        if attention is not None:
            from vllm.v1.attention.backends import triton_attn

            overrides = registry._ATTN_OVERRIDES  # type: ignore[attr-defined]
            overrides[registry.AttentionBackendEnum.CPU_ATTN] = attention
            triton_attn.triton_reshape_and_cache_flash = triton_attn.unified_attention = lambda *_, **__: None
        self._temperature = 0.8 if name == "coupled" else 0.0
        with tempfile.TemporaryDirectory() as folder:
            drafter = (config or {}).get("stages", [config or {}])[-1]
            model = _write_models(Path(folder), drafter)
            self._llm = LLM(
                model=model, load_format="dummy", skip_tokenizer_init=True, dtype="float32",
                max_model_len=4096 if "tree" in name else 8192,
                max_num_seqs=256, max_num_batched_tokens=8192, block_size=32, num_gpu_blocks_override=8192,
                enable_prefix_caching=False, async_scheduling=True, speculative_config=config,
                kv_cache_memory_bytes=1 << 28, disable_log_stats=True,
                compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES},
            )  # fmt: skip
        null_device.replace_imported()
        self._core, self._num_requests = self._llm.llm_engine.engine_core.engine_core, 0
        runner = self._core.model_executor.driver_worker.worker.model_runner
        _pin(self._core.scheduler, planned if method else None)
        _replace_results(runner, num_draft, "free" in endings)
        if "off" in endings:
            self._llm.collective_rpc("specplugins_gate", args=("none",))

    def run(self, num_requests: int, num_steps: int) -> tuple[list[float], dict[str, float]]:
        """Microseconds of each step, and launches and the like of one."""
        self._begin(num_requests)
        before, times = Counter(null_device.counts), self.times(num_steps)
        spent = {name: (count - before[name]) / num_steps for name, count in null_device.counts.items()}
        self._end()
        return times, spent

    def times(self, num_steps: int) -> list[float]:
        """Microseconds of each step of the requests that run."""
        times = []
        for _ in range(num_steps):
            excluded, begin = null_device.excluded_ns, thread_time_ns()
            self._core.step_fn()
            times.append((thread_time_ns() - begin - null_device.excluded_ns + excluded) / 1000)
        return times

    def _begin(self, num_requests: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=self._temperature, max_tokens=8000, ignore_eos=True, detokenize=False)
        for _ in range(num_requests):
            self._num_requests += 1
            prompt = [5 + (self._num_requests + place) % 7 for place in range(12)]
            self._llm.llm_engine.add_request(f"r{self._num_requests}", {"prompt_token_ids": prompt}, params)
        for _ in range(12):
            self._core.step_fn()

    def _end(self) -> None:
        requests = list(self._core.scheduler.requests)
        self._core.abort_requests(requests)
        self._llm.llm_engine.output_processor.abort_requests(requests, internal=True)
        while self._core.scheduler.has_requests() or self._core.batch_queue:
            self._core.step_fn()


def _write_models(folder: Path, drafter: dict[str, Any]) -> str:
    """A target, and what drafts for it if that is built into vLLM, whose dictionary gets its place."""
    head = {**MODEL, "num_hidden_layers": 1, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    target, method = MODEL, drafter.get("method")
    if method == "mtp":
        target = {**MODEL, "architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    for name, config in (("target", target), ("drafter", head)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    if method in ("draft_model", "eagle3"):
        drafter["model"] = str(folder / "drafter")
    field = "look_ahead" if "look_ahead" in drafter else {"jump": "head", "medusa": "heads"}.get(str(method))
    if field is not None:
        drafter[field] = _write_part(folder / "drafter", field)
    return str(folder / "target")


def _write_part(folder: Path, field: str) -> str:
    """A jump over all layers, heads, or embeddings for one, of zeros."""
    import torch
    from safetensors.torch import save_file

    from vllm_specplugins.proposers.heads.jump_head import JumpHead, JumpHeadConfig
    from vllm_specplugins.proposers.heads.look_ahead import LookAhead, LookAheadConfig

    size, layers = int(MODEL["hidden_size"]), int(MODEL["num_hidden_layers"])  # type: ignore[call-overload]
    if field == "head":
        config = JumpHeadConfig(
            early_layers=0, late_layer=layers, num_layers=layers, hidden_size=size, inner_size=16, rms_norm_eps=1e-5
        )
        shapes = JumpHead(config).state_dict()
        JumpHead(config, {name: torch.zeros(like.shape) for name, like in shapes.items()}).save(folder)
    elif field == "look_ahead":
        ahead = LookAheadConfig(exit_layer=1, hidden_size=size, num_embeddings=4)
        LookAhead(ahead, {"embeddings.weight": torch.zeros(4, size)}).save(folder)
    else:
        blocks = {f"blocks.{head}.layers.0.weight": torch.zeros(size, size) for head in range(5)}
        save_file(blocks, folder / "model.safetensors")
    return str(folder)


def _pin(scheduler: Any, num_draft: int | None) -> None:
    """One K for all steps, through vLLM's own seam for K by the size of the batch; ours is asked all the same."""
    chosen = scheduler.dynamic_sd_lookup

    class Pinned:
        def __getitem__(self, num_reqs: int) -> int | None:
            if chosen is not None:
                chosen[num_reqs]
            return num_draft

    if num_draft == 0 or (num_draft is not None and chosen is not None):
        scheduler.dynamic_sd_lookup = Pinned()


def _replace_results(runner: Any, num_draft: int, tokens_are_free: bool) -> None:
    """What kernels and the model would have left."""
    import torch

    logits = torch.zeros(8192, MODEL["vocab_size"])  # type: ignore[call-overload]
    runner.model.lm_head.quant_method = type(
        "Head", (), {"apply": lambda self, layer, x, bias=None: logits[: len(x)]}
    )()
    runner.model.forward = null_device.excluded(runner.model.forward)  # of a batch that no graph is recorded for
    if (manager := runner.adaptive_verification) is not None:
        token_ms = 0.0 if tokens_are_free else 0.35
        manager.set_cost_curves([(1, 0.05), (256, 0.05)], [(n, 3.0 + token_ms * n) for n in range(1, 513)])
    planned = getattr(runner.speculator, "specplugins", None) if manager is None else None
    outcomes = getattr(planned or runner.speculator, "outcomes", None)
    if outcomes is not None:
        outcomes.accept_probs.fill_(0.8)
        outcomes._num_draft.fill_(num_draft if manager is None else 0)  # what is planned, where nothing is trimmed
        if (confidences := outcomes.shared_probs) is not None:
            confidences.newest.fill_(0.8)
            confidences.host.fill(0.8)


def serve(connection: Any, *arguments: Any) -> None:
    """In a process of its own: calls of an engine, as they are asked for."""
    engine = Engine(*arguments)
    connection.send(None)
    while (message := connection.recv()) is not None:
        name, *rest = message
        connection.send(getattr(engine, name)(*rest))
    os._exit(0)


def started(arms: Iterable[str]) -> dict[str, Any]:
    """A connection to each arm's engine; one that does not start ends the program."""
    context, connections = multiprocessing.get_context("spawn"), {}
    for arm in arms:
        connections[arm], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, arm), daemon=True).start()
        theirs.close()
        connections[arm].recv()
    return connections


def measure(
    arms: Iterable[str], rounds: int, steps: int, found: list[dict[str, Any]] | None = None
) -> dict[tuple[str, int], float]:
    """Minima by arm and number of requests, also as rows of a table.

    Args:
        found: gets for each arm the least time and the largest of the rounds' minima, and what a step launches.
    """
    connections = started(arms)
    runs: dict[tuple[str, int], list[Any]] = {}
    for _ in range(rounds):
        for num_requests in BATCHES:
            for arm, connection in connections.items():
                connection.send(("run", num_requests, steps))
                runs.setdefault((arm, num_requests), []).append(connection.recv())
    minima = {cell: min(min(times) for times, _ in of_cell) for cell, of_cell in runs.items()}
    for arm, connection in connections.items():
        values = [f"{minima[arm, size]:.0f}" for size in BATCHES]
        for base in ("none", "ngram_gpu, K = 31" if "K = 31" in arm else "ngram_gpu"):
            known = base in connections
            values.append(" / ".join(f"{minima[arm, n] / minima[base, n]:.2f}" for n in BATCHES) if known else "-")
        counts = runs[arm, BATCHES[0]][0][1]
        if found is not None:
            us = {n: [end(min(times) for times, _ in runs[arm, n]) for end in (min, max)] for n in BATCHES}
            found.append({"arm": arm, "us": us, "counts": counts})
        spent = ", ".join(f"{count:g} {name}" for name, count in sorted(counts.items()))
        print(f"| {arm} | {' | '.join(values)} | {spent} |", flush=True)
        connection.send(None)
    return minima


def changed(found: Iterable[dict[str, Any]]) -> list[str]:
    """Arms that launch, copy or wait otherwise in a step than the table of docs/research/figures.md has it."""
    known = {row["arm"]: row["counts"] for row in json.loads(TABLE.read_text())["rows"]}
    return [
        f"{row['arm']}: a step has {row['counts']}, in {TABLE.name} {known[row['arm']]}"
        for row in found
        if row["arm"] in COUNTED
        and any(abs(row["counts"].get(name, 0) - n) > 0.25 for name, n in known[row["arm"]].items())
    ]


def missed(minima: dict[tuple[str, int], float]) -> list[str]:
    """Bars of today that these figures do not meet."""
    found = []
    for arm, base, _, held in BARS:
        for num_requests, bar in zip(BATCHES, held, strict=True):
            if (arm, num_requests) in minima and (base, num_requests) in minima:
                ratio = minima[arm, num_requests] / minima[base, num_requests]
                if ratio > bar:
                    found.append(f"{arm}, {num_requests} requests: {ratio:.2f} of {base}, {bar} is the most")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--arms", nargs="+", default=list(dict.fromkeys(name for arm, base, *_ in BARS for name in (base, arm)))
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    print(f"| arm | {' | '.join(f'{n}, us' for n in BATCHES)} | of none | of ngram_gpu | a step |\n{'|---' * 7}|")
    found: list[dict[str, Any]] = []
    minima = measure(args.arms, args.rounds, args.steps, found)
    if args.json:
        args.json.write_text(json.dumps({"versions": versions("vllm", "torch", "triton"), "rows": found}))
    if args.check and missed(minima):  # once more: other work on the machine is not the code's fault
        again = measure(args.arms, args.rounds, args.steps)
        minima = {cell: min(microseconds, again[cell]) for cell, microseconds in minima.items()}
    if args.check and (problems := [*missed(minima), *changed(found)]):
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
