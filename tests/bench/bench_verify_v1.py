"""Time that Model Runner V1 spends between logits and tokens on a CPU: ours beside vLLM's, in the same run.

    python tests/bench/bench_verify_v1.py [--threads 1] [--requests 1 4 8 32]

Every (temperature, truncation, K, B, V): the whole of `Verifier.sample` beside vLLM's Sampler (K = 0: nothing was
drafted) or RejectionSampler, interleaved, in ms. Float32 logits, fresh before every call, since vLLM changes them in
place. vLLM's RejectionSampler does not apply min-p to drafted rows, so there it does less than ours, and on a
CPU it reads a top-k that was never written for them, so that case is left out.
B: requests, K: drafts of each, V: vocabulary.
"""

import argparse
import itertools
import os
import platform
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import torch
import vllm
from bench_rejection import KERNEL_TESTS, cpu_name
from rich.console import Console
from rich.table import Table
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessors, MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_specplugins.engine.v1.verify import Verifier

TRUNCATIONS = {
    "-": {},
    "top-p": {"top_p": 0.95},
    "top-k, top-p": {"top_p": 0.95, "top_k": 50},
    "min-p": {"min_p": 0.05},
}


def sampling_metadata(num_reqs: int, temperature: float, truncation: dict) -> SamplingMetadata:
    processors = []
    if "min_p" in truncation:
        processor = MinPLogitsProcessor(
            SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=num_reqs)), torch.device("cpu"), False
        )
        processor.min_p = torch.full((num_reqs, 1), truncation["min_p"])
        processor.min_p_count = num_reqs
        processors.append(processor)
    columns = {"top_p": torch.float32, "top_k": torch.int32}
    limits = {
        name: torch.full((num_reqs,), truncation[name], dtype=dtype) if name in truncation else None
        for name, dtype in columns.items()
    }
    return SamplingMetadata(
        temperature=torch.full((num_reqs,), temperature) if temperature else None,
        all_greedy=temperature == 0, all_random=temperature > 0, **limits, generators={}, max_num_logprobs=None,
        no_penalties=True, prompt_token_ids=None, frequency_penalties=torch.empty(0),
        presence_penalties=torch.empty(0), repetition_penalties=torch.empty(0), output_token_ids=[],
        allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(processors),
    )  # fmt: skip


def make_logits(num_reqs: int, num_draft: int, vocab_size: int) -> torch.Tensor:
    """Rows with twenty tokens above the bulk, as a language model has them."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(num_reqs * (num_draft + 1), vocab_size, generator=rng) * 3
    logits[:, 100 :: vocab_size // 20] += 12
    return logits


def calls(num_reqs: int, num_draft: int, vocab_size: int, temperature: float, truncation: dict):
    """The logits, and two functions of logits: ours and vLLM's."""
    logits = make_logits(num_reqs, num_draft, vocab_size)
    metadata = sampling_metadata(num_reqs, temperature, truncation)
    sampler = Sampler()
    drafts = None
    if num_draft:
        # Every other request's drafts are likely.
        likely = logits.argmax(-1).view(num_reqs, -1)[:, :-1]
        likely[1::2] = 7
        drafts = SpecDecodeMetadata.make_dummy(likely.tolist(), torch.device("cpu"))
        rows = torch.arange(len(logits)).view(num_reqs, -1)
        drafts.target_logits_indices, drafts.bonus_logits_indices = rows[:, :-1].flatten().int(), rows[:, -1].int()
    runner = SimpleNamespace(
        speculative_config=SimpleNamespace(plugin_config=SimpleNamespace(common=SimpleNamespace(rejection="token"))),
        sampler=sampler,
        device=torch.device("cpu"),
        input_batch=SimpleNamespace(
            num_reqs=num_reqs,
            req_ids=[str(index) for index in range(num_reqs)],
            num_tokens_no_spec=np.arange(num_reqs, dtype=np.int32) + 100,
            sampling_metadata=metadata,
        ),
    )
    seeds = {request_id: 77 * int(request_id) for request_id in runner.input_batch.req_ids}
    verifier = Verifier(runner, seeds.__getitem__)
    if num_draft:
        rejection_sampler = RejectionSampler(sampler)
        theirs = lambda logits: rejection_sampler(drafts, None, logits, metadata)  # noqa: E731
    else:
        theirs = lambda logits: sampler(logits, metadata)  # noqa: E731
    return logits, (lambda logits: verifier.sample(logits, drafts)), theirs


def interleaved_ms(logits: torch.Tensor, functions, repeats: int, inner: int) -> list[list[float]]:
    """Times of each function, means of `inner` calls with a fresh copy of the logits each."""
    times = [[] for _ in functions]
    for _ in range(repeats + 1):
        for function, found in zip(functions, times, strict=True):
            total = 0.0
            for _ in range(inner):
                fresh = logits.clone()
                start = time.perf_counter()
                function(fresh)
                total += time.perf_counter() - start
            found.append(total / inner * 1e3)
    return [found[1:] for found in times]


@torch.inference_mode()  # as a runner does
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 128_256])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--truncations", nargs="+", choices=TRUNCATIONS, default=list(TRUNCATIONS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    tests = ["-q", "--import-mode=importlib", str(KERNEL_TESTS / "test_rejection_host.py")]
    if subprocess.run([sys.executable, "-m", "pytest", *tests]).returncode:
        sys.exit("The tests of verification fail: no report.")
    torch.set_num_threads(args.threads)
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()  # as a worker does
    table = Table(title="ms between a step's logits and its tokens: medians, and p90 of ours")
    for column in ("T", "truncation", "K", "B", "V", "vLLM", "ours", "p90", "ours / vLLM"):
        table.add_column(column, justify="right")
    slower = []
    sizes = itertools.product(args.drafts, args.requests, args.vocabularies)
    for (num_draft, num_reqs, vocab_size), temperature in itertools.product(sizes, args.temperatures):
        for name in args.truncations if temperature else ["-"]:
            if num_draft and "top_k" in TRUNCATIONS[name]:
                continue
            logits, *functions = calls(num_reqs, num_draft, vocab_size, temperature, TRUNCATIONS[name])
            inner = max(1, (4 << 20) // (2 * logits.numel()))
            times = interleaved_ms(logits, functions, args.repeats, min(inner, 50))
            ours, theirs = map(np.median, times)
            cell = (f"{temperature}", name, f"{num_draft}", f"{num_reqs}", f"{vocab_size:,}")
            found = (theirs, ours, np.quantile(times[0], 0.9))
            table.add_row(*cell, *(f"{ms:.3f}" for ms in found), f"{ours / theirs:.2f}")
            if ours > theirs:
                slower.append(cell)
    console = Console(width=120)
    console.print(
        f"{cpu_name()}, {args.threads} threads, load {os.getloadavg()[0]:.1f}, Python"
        f" {platform.python_version()}, torch {torch.__version__}, vLLM {vllm.__version__}"
    )
    console.print(table)
    console.print(f"slower than vLLM: {slower or 'nowhere'}")


if __name__ == "__main__":
    sys.exit(main())
