"""What an exit reaches whose layer is chosen while serving, against each layer that it may choose, on Model Runner V1.

    python examples/demo/widen.py examples/demo/model .cache/widened
    python tests/bench/bench_exit_choice.py --model .cache/widened

One engine answers each prompt, one request at a time, with its exit held at each candidate and with the choice left to
it, in another order for each prompt. Compared is CPU time, of the whole answers, for the same tokens. The bars: at
least 0.97 of the speed of the best layer, and more than that of the worst.
"""

import argparse
import os
import random
import sys
import time
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "demo"))
from prompts import load_prompts

CHOICE = 0  # in place of a layer


def held(choice: Any, layer: int) -> AbstractContextManager[Any]:
    """Takes the choice away, for as long as a `with` block lasts."""
    return nullcontext() if layer == CHOICE else patch.multiple(choice, begin_step=lambda: False, layer=layer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--layers", default="1,2,4")
    parser.add_argument("--num-draft", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    layers = [int(layer) for layer in args.layers.split(",")]
    config = {"method": "early_exit", "exit_layer": layers, "num_speculative_tokens": args.num_draft}
    llm = LLM(args.model, dtype="float32", max_model_len=2048, max_num_seqs=1, enforce_eager=True,
              enable_prefix_caching=False, speculative_config=config)  # fmt: skip
    chosen = llm.llm_engine.model_executor.driver_worker.worker._barrier.proposer.chosen
    order = random.Random(0)
    params = SamplingParams(temperature=args.temperature, seed=1, max_tokens=args.tokens, ignore_eos=True,
                            detokenize=False)  # fmt: skip
    seconds: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    steps: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    prompts = [(kind, text) for kind in ("continue", "edit") for text in load_prompts(kind, args.prompts)]
    for index, (kind, text) in enumerate(prompts[:1] + prompts):  # the first one warms up
        outputs = set()
        for layer in order.sample([CHOICE, *layers], len(layers) + 1):
            before = llm.collective_rpc("specplugins_stats")[0]["request_steps"]
            start = time.process_time()
            with held(chosen.choice, layer):
                [output] = llm.generate([text], params, use_tqdm=False)
            elapsed = time.process_time() - start
            outputs.add(tuple(output.outputs[0].token_ids))
            if index:
                seconds[kind][layer] += elapsed
                steps[kind][layer] += llm.collective_rpc("specplugins_stats")[0]["request_steps"] - before
        assert len(outputs) == 1, "a layer has changed a token"
        so_far = ", ".join(f"{layer or 'chosen'} {own:.1f} s" for layer, own in sorted(seconds[kind].items()))
        print(f"{index} of {len(prompts)} prompts; {kind}: {so_far}", file=sys.stderr, flush=True)
    assert not llm.collective_rpc("specplugins_stats")[0]["faults"]
    is_good = True
    for kind, own in seconds.items():
        best, worst = min(own[layer] for layer in layers), max(own[layer] for layer in layers)
        for layer in [*layers, CHOICE]:
            name = f"layer {layer}" if layer else "chosen"
            print(f"{kind:9}{name:9}{own[layer]:8.2f} s of CPU, {steps[kind][layer]} steps, "
                  f"{best / own[layer]:.3f} of the best layer's speed")  # fmt: skip
        is_good &= best / own[CHOICE] >= 0.97 and own[CHOICE] < worst
    print(f"steps by layer, where it was chosen: {chosen.choice.num_steps}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
