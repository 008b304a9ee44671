"""How many variants of the kernels a server can meet: launches over a grid of what requests ask for, none of them run.

In a process of its own, because one that has Triton's interpreter cannot compute the keys of compiled launches alone.
"""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
KERNELS = "vllm_specplugins.kernels"
DTYPES = ("bfloat16", "float16", "float32")
METHODS = ("one-hot", "dense", "block")
VOCAB_SIZES = (32_000, 128_256, 151_937)
# For each type of logits (the model's, and float32 where they are edited): a draw, a scan, a draw behind it; with a
# dense q one more scan and what weighs drafts, for "block" also what keeps them. For all together: accept, adjust.
MOST = {"one-hot": 8, "dense": 12, "block": 14}
IN_PLACE = 3  # more, of a step that reads tokens where they stand: the model's logits drawn, also truncated; accept


def serve(dtype: str, method: str, vocab_size: int, num_draft: int) -> None:
    """What a server launches: every combination of limits, edits or none, many batch sizes, with drafts and without."""
    import torch
    from vllm_specplugins.kernels.rejection import Sampling, rejection_sample
    from vllm_specplugins.kernels.rejection.adjust import adjust
    from vllm_specplugins.kernels.rejection.arguments import Layout
    from vllm_specplugins.kernels.rejection.block import block_rejection_sample
    from vllm_specplugins.kernels.rejection.step import sample_step

    num_states = 64
    limits = torch.zeros(num_states, dtype=torch.int32), torch.zeros(num_states), torch.zeros(num_states)
    q = None if method == "one-hot" else torch.empty(num_states, num_draft, vocab_size, dtype=getattr(torch, dtype))
    operation = block_rejection_sample if method == "block" else rejection_sample
    edits = edits_of(num_states, vocab_size)
    # Memory of one batch serves all: nothing reads it.
    padded = -(-vocab_size // 64) * 64  # as vLLM pads heads
    memory = torch.empty(17 * (num_draft + 1) + 1, padded, dtype=getattr(torch, dtype))[:, :vocab_size]
    indices = torch.zeros(17 * (num_draft + 1) + 2, dtype=torch.int64)
    for num_reqs, drafts, first in itertools.product((1, 2, 5, 16, 17), (0, num_draft), (0, 1)):
        rows = slice(first, first + num_reqs * (drafts + 1))  # vLLM slices large batches
        layout = indices[: num_reqs + 1].int(), indices[rows].int(), indices[rows], indices[first : first + num_reqs]
        run = operation if drafts else rejection_sample
        for chosen, edited in itertools.product(itertools.product((False, True), repeat=3), (False, True)):
            own = (limit if is_used else None for limit, is_used in zip(limits, chosen, strict=True))
            sampling = Sampling(torch.ones(num_states), indices[:num_states], *own)
            logits = memory[rows]
            if edited:
                logits = adjust(logits, *layout, edits, drafts, implementation="fused")
            run(logits, *layout, sampling, drafts, q if drafts else None, implementation="fused")
            if not edited:
                fed = indices[: len(logits)].int(), indices[: len(logits)], layout[3], indices[rows]
                step = Layout(layout[0], *fed, layout[0][:num_reqs], indices[:num_states].int())
                sample_step(logits, step, sampling, drafts, implementation="fused")


def edits_of(num_states: int, vocab_size: int):
    """All of V2's arrays, as it keeps them."""
    import torch
    from vllm_specplugins.kernels.rejection.adjust import Allowed, BadWords, Bias, Edits, MinTokens, Penalties

    def numbers(*shape: int, dtype=torch.int32) -> torch.Tensor:
        return torch.zeros(num_states, *shape, dtype=dtype)

    reals = (numbers(dtype=torch.float32) for _ in range(3))
    return Edits(
        Allowed(numbers(), numbers(1024)),
        Bias(numbers(), numbers(1024), numbers(1024, dtype=torch.float32)),
        MinTokens(numbers(), numbers(128), numbers()),
        Penalties(*reals, numbers((vocab_size + 31) // 32), numbers(vocab_size)),
        BadWords(numbers(), numbers(129), numbers(4096), numbers(1024), numbers()),
    )


def report() -> None:
    """A line of JSON for each server: how many variants of each kernel."""
    from launch_keys import recorded

    for dtype, method, vocab_size in itertools.product(DTYPES, METHODS, VOCAB_SIZES):
        for num_draft in (1, 5):
            with recorded(KERNELS) as keys:
                serve(dtype, method, vocab_size, num_draft)
            counts = dict(Counter(name for name, _ in keys))
            print(json.dumps({"dtype": dtype, "method": method, "V": vocab_size, "K": num_draft, "counts": counts}))


@pytest.fixture(scope="module")
def servers() -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_few_variants(servers: list[dict]) -> None:
    """Kills: a number of the batch that is compiled for; an index array's alignment; arrays that are there or not."""
    for server in servers:
        total, most = sum(server["counts"].values()), MOST[server["method"]]
        # Edits of an odd vocabulary have rows of another length than the model's.
        is_one_type = server["dtype"] == "float32" and server["V"] % 16 == 0
        assert total == (most // 2 + 1 if is_one_type else most) + IN_PLACE, server


if __name__ == "__main__":
    report()
