"""What the protection of a lookup costs: this checkout's proposer and barrier against another's, by turns.

    git worktree add ../before e8bf1ad     # the last version without it
    python tests/bench/bench_protection.py ../before

Each version is in a process of its own; they take turns of `--steps` steps, each with the same histories, and the
first turn of each warms up. Time is that of all threads of the process, on the CPU, in microseconds per request and
step, with the batch that an adapter makes; the difference is taken turn by turn. A busy machine wants more `--rounds`.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from types import MappingProxyType

import numpy as np

K, VOCAB_SIZE, MAX_NEW, BEGIN = 5, 150_000, 6, 4096


def work(num_reqs: int, num_steps: int, num_rounds: int) -> None:
    """A version's process: a line of times for each line that it reads."""
    import torch  # noqa: F401  what an engine has loaded: its generator is kept, too
    from bench_prompt_lookup import code_text

    from vllm_specplugins.config import PromptLookupConfig
    from vllm_specplugins.draft import DraftBatch, Feedback, ProposerContext
    from vllm_specplugins.proposers.barrier import FaultBarrier
    from vllm_specplugins.proposers.prompt_lookup import PromptLookup

    try:
        from vllm_specplugins.proposers.read_only import Views, view
    except ImportError:  # the version before
        Views, view = list, np.asarray
    row_len = BEGIN + (num_rounds + 1) * num_steps * MAX_NEW
    texts = code_text(num_reqs * row_len, VOCAB_SIZE).reshape(num_reqs, row_len)
    request_ids = [f"cmpl-{row:032x}-0" for row in range(num_reqs)]
    limits, counts = np.full(num_reqs, K, np.int32), np.full(num_reqs, 2, np.int32)
    options = [MappingProxyType({})] * num_reqs  # as adapters keep them
    context = ProposerContext(VOCAB_SIZE, 1 << 20, num_reqs, K, tokenize=lambda text: [])
    alone, behind = (PromptLookup(PromptLookupConfig(min_ngram=2, max_ngram=8), context) for _ in range(2))
    barrier = FaultBarrier(behind, VOCAB_SIZE, K, 1000)
    feedback = Feedback(request_ids, counts, counts)
    calls = (alone.propose, lambda batch: barrier.propose(batch, feedback))

    def batch_of(ends):  # as adapters make it
        tokens = view(texts)
        if hasattr(Views, "of_rows"):
            return DraftBatch(request_ids, Views.of_rows(tokens, range(num_reqs), ends), limits, options)
        return DraftBatch(request_ids, Views(tokens[row, :end] for row, end in enumerate(ends)), limits, options)

    ends = np.full(num_reqs, BEGIN)
    rng = np.random.default_rng(0)
    for _ in sys.stdin:
        seconds = [0.0, 0.0]
        for _ in range(num_steps):
            ends += rng.integers(1, MAX_NEW + 1, num_reqs)
            for number, call in enumerate(calls):
                begin = time.process_time()
                call(batch_of(ends.tolist()))
                seconds[number] += time.process_time() - begin
        print(*(each / num_steps / num_reqs * 1e6 for each in seconds), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args.requests, args.steps, args.rounds)
    if args.before is None:
        parser.error("which checkout is the one before?")
    options = [f"--{name}={getattr(args, name)}" for name in ("requests", "steps", "rounds")]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--work", *options],
            env={**os.environ, "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for checkout in (args.before, Path(__file__).parents[2])
    ]
    rounds = []
    for number in range(args.rounds + 1):
        turns = []
        for process in processes:
            print("go", file=process.stdin, flush=True)
            turns.append([float(us) for us in process.stdout.readline().split()])
        if number:
            rounds.append(turns)
    for process in processes:
        process.stdin.close()
        process.wait()
    us = np.array(rounds)  # [rounds, before and after, alone and behind the barrier]
    for number, name in enumerate(("lookup alone", "behind the barrier")):
        more = us[:, 1, number] - us[:, 0, number]
        print(
            f"{name}: before {np.median(us[:, 0, number]):.2f}, now {np.median(us[:, 1, number]):.2f} us per request "
            f"and step at {args.requests}; difference {np.median(more):+.2f} ({more.min():+.2f} to {more.max():+.2f})"
        )


if __name__ == "__main__":
    main()
