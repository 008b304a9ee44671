"""What a lookup brings beside a draft model: a cascade of both, of the speed of the draft model alone, in real engines.

    python examples/demo/widen.py examples/demo/model .cache/widened
    python tests/bench/bench_built_in.py --model .cache/widened [--layers 2 --workloads copy prose --temperature 0]

The draft model is made of the demo model's first layers, not widened; all 8 are always right. It drafts 4 tokens,
alone and as a stage, the lookup 12. Alone it is vLLM's own method at temperature 0. Above, where vLLM's CPU build
samples from another distribution under speculation, it is the stage alone, without a gate. Prose is what Python's help
says of its topics; `repeats` is the share of output tokens that end an 8-gram which stood before in the same output.
Both engines stay up and take turns. A round's ratio is of whole times, prompts included: medians and ranges over the
rounds, by wall clock and by CPU time. The bar: copy 1.4, prose 0.97.
"""

import argparse
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))

from shortened import first_layers

from vllm_specplugins.engine.measure.serving import ServingEngine, Traffic, Turn
from vllm_specplugins.tools.base_model import load_tokenizer
from vllm_specplugins.tools.bench.figures import repeated_share
from vllm_specplugins.tools.bench.rounds import serve_rounds
from vllm_specplugins.tools.bench.workloads import make_workload

DEMO_MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo" / "model"
K, LONGEST = 4, 12
NUM_PROMPTS = 4
PROMPT_LENGTH = 128


def configs(draft_model: str, temperature: float, policy: str) -> dict[str, dict[str, Any]]:
    """The draft model alone, and beside a lookup."""
    stage = {"method": "draft_model", "model": draft_model, "num_speculative_tokens": K}
    alone: dict[str, Any] = stage
    if temperature:
        alone = {"method": "cascade", "num_speculative_tokens": K, "gate": "off", "stages": [stage]}
    both = {"method": "cascade", "num_speculative_tokens": LONGEST, "policy": policy}
    return {"alone": alone, "both": {**both, "stages": [{"method": "prompt_lookup"}, stage]}}


def prose(tokenizer: Any) -> list[list[int]]:
    """Parts of help texts, behind their titles."""
    import pydoc_data.topics

    texts = [tokenizer(text)["input_ids"] for _, text in sorted(pydoc_data.topics.topics.items())]
    parts = [ids[PROMPT_LENGTH : 2 * PROMPT_LENGTH] for ids in texts if len(ids) > 3 * PROMPT_LENGTH]
    return random.Random(0).sample(parts, NUM_PROMPTS)


def ratios(turns: dict[str, list[Turn]], clock: Callable[[Turn], float]) -> str:
    """Of each round but the first one, which warms up."""
    found = [clock(alone) / clock(both) for alone, both in zip(turns["alone"][1:], turns["both"][1:], strict=True)]
    return f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})"


def described(turns: list[Turn]) -> str:
    """What one engine did: tokens a step, ms a step, and how its draft tokens fared."""
    answers = [answer for turn in turns[1:] for answer in turn.answers]
    steps = [ms for answer in answers for ms in answer.step_ms]
    tokens = sum(len(answer.token_ids) - answer.num_first for answer in answers)
    drafted, accepted = (
        sum(getattr(turn, f"num_{what}_tokens") for turn in turns[1:]) for what in ("draft", "accepted")
    )
    repeats = repeated_share([answer.token_ids for answer in answers])
    return (
        f"{tokens / len(steps):.2f} tokens/step, {statistics.median(steps):.1f} ms/step, "
        f"{accepted} of {drafted} right, repeats {repeats:.0%}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--layers", type=int, default=2, help="of the draft model, 1 to 8")
    parser.add_argument("--workloads", nargs="+", choices=("copy", "code", "prose"), default=["copy", "prose"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=1, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=96, help="of an output")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--policy", default="auto")
    args = parser.parse_args()
    tokenizer, folder = load_tokenizer(args.model), Path(tempfile.mkdtemp())
    draft_model = str(first_layers(DEMO_MODEL, args.layers))
    arguments = {
        "model": args.model, "max_model_len": 1024, "max_num_seqs": args.batch, "gpu_memory_utilization": 0.45,
        "block_size": 32, "num_gpu_blocks_override": 34 * args.batch + 2,  # no more memory than is used
    }  # fmt: skip
    with ExitStack() as stack:
        engines = {}
        for name, config in configs(draft_model, args.temperature, args.policy).items():
            engines[name] = stack.enter_context(ServingEngine(name, arguments, config, folder / f"{name}.log"))
            engines[name].wait()
        for name in args.workloads:
            made = prose(tokenizer) if name == "prose" else make_workload(name, tokenizer, NUM_PROMPTS, 200).prompts
            traffic = Traffic(
                prompts=made,
                temperature=args.temperature,
                max_tokens=args.tokens,
                at_a_time=args.batch,
                ignore_eos=True,
            )
            turns = serve_rounds(engines, [traffic] * (1 + args.rounds), lambda: None)
            wall, cpu = ratios(turns, lambda turn: turn.seconds), ratios(turns, lambda turn: turn.cpu_seconds)
            print(
                f"{name}, T {args.temperature:g}, batch {args.batch}, {args.layers} layers: {wall}, of CPU time {cpu}"
            )
            for engine, own in turns.items():
                print(f"  {engine}: {described(own)}, faults {sum(turn.num_faults for turn in own)}", flush=True)
            if args.temperature == 0:
                answers = [[answer.token_ids for turn in own for answer in turn.answers] for own in turns.values()]
                print("  outputs are the same" if answers[0] == answers[1] else "  OUTPUTS DIFFER", flush=True)
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
