"""The time of the hook that forces a log (harness/forced.py), of a step of no speculation, on a CPU.

    python benchmarks/bench_forced.py --model MODEL [--rounds 8] [--batch 1]

Two engines without speculation serve the same prompts in turns, and one of them is forced to emit a log. The hook's
functions are timed alone, too, on logits of the model's shape, since two processes differ by some percent whatever they
do. It returns 1 where the functions take more than 1 % of a step.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from vllm_specplugins.engine.harness.forced import _Log, _OnV1
from vllm_specplugins.engine.harness.serving import LOGGED, serve_rounds, serving_engine
from vllm_specplugins.engine.harness.traffic import Forced, Traffic
from vllm_specplugins.tools.base_model import load_config
from vllm_specplugins.tools.bench.figures import Spread

BAR = 0.01
PROMPT, OUTPUT = 64, 64  # tokens


def hook_us(outputs: list[list[int]], vocab_size: int) -> float:
    """Median us of a call beside the sampler, which does nothing here, for one row of logits of each request."""
    names = [str(index) for index in range(len(outputs))]
    params = {name: SimpleNamespace(extra_args={LOGGED: index}) for index, name in enumerate(names)}
    lengths = np.full(len(names), PROMPT + 3)
    runner = SimpleNamespace(
        _sample=lambda logits, metadata: None,
        input_batch=SimpleNamespace(
            req_ids=names, num_tokens_no_spec=lengths, num_prompt_tokens=np.full(len(names), PROMPT)
        ),
        requests={name: SimpleNamespace(sampling_params=own) for name, own in params.items()},
    )
    _OnV1(runner, _Log(outputs, None, torch.device("cpu")))
    logits, times = torch.zeros(len(names), vocab_size), []
    for _ in range(2000):
        began = time.perf_counter()
        runner._sample(logits, None)
        times.append(1e6 * (time.perf_counter() - began))
    assert logits.argmax(1).tolist() == [output[3] for output in outputs]
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()
    vocab_size, rng = load_config(args.model).get_text_config().vocab_size, random.Random(0)
    prompts, outputs = (
        [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(args.batch)] for length in (PROMPT, OUTPUT)
    )
    asked = {"prompts": prompts, "max_tokens": OUTPUT, "ignore_eos": True, "logged": range(args.batch)}
    arguments = {"model": args.model, "max_model_len": PROMPT + OUTPUT, "max_num_seqs": args.batch}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        engines = {}
        for name, log in {"none": None, "forced": Forced(outputs)}.items():
            engine = serving_engine("none", arguments, None, Path(folder) / name, log)
            engines[name] = stack.enter_context(engine)
            print(engine.receive(), flush=True)
        traffic = Traffic(**asked, temperature=0.0, at_a_time=args.batch)
        turns = serve_rounds(engines, [traffic] * (1 + args.rounds), lambda: None)
    assert all([answer.token_ids for answer in turn.answers] == outputs for turn in turns["forced"])
    plain, forced = (
        [turn.step_ms * turn.cpu_seconds / turn.seconds for turn in turns[name][1:]] for name in ("none", "forced")
    )
    ratio = Spread.of([its / own for its, own in zip(forced, plain, strict=True)])
    step_ms, us = statistics.median(plain), hook_us(outputs, vocab_size)
    low, high = ratio.interval()
    print(
        f"a step of {args.batch}: {step_ms:.2f} ms of CPU time, forced {ratio.median:.4f} of it ({low:.4f}-{high:.4f})"
    )
    print(f"the hook alone: {us:.0f} us, {us / 10 / step_ms:.2f} % of a step")
    return int(us > 1000 * BAR * step_ms)


if __name__ == "__main__":
    sys.exit(main())
