"""Cost of a prompt-lookup step, beside vLLM's own n-gram proposer in the same run, and of texts that repeat themselves.

    python tests/bench/bench_prompt_lookup.py

A step has 1 to 6 new tokens of each request and drafts K for it. Both sides are whole proposers, read the tokens from
the engine's matrix and end in Python lists; the peer is measured in every eighth step, twice, and the second time
counts. "cold" is ours after other data went through the caches, which slows Python itself, too. What a text may cost at
worst is the least time of the proposer's thread: a machine that does other things interrupts it for longer. The text is
Python's standard library, split into words. It refuses to report if the tests of search and proposer fail.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
from rich.console import Console
from rich.table import Table

from vllm_specplugins.config import PromptLookupConfig
from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.proposers.prompt_lookup import PromptLookup

MIN_NGRAM, MAX_NGRAM, K, MAX_NEW = 2, 8, 31, 6
PEER_EVERY = 8
EVICTION_BYTES = 64 << 20
TESTS = [
    Path(__file__).parents[1] / name for name in ("kernels/test_history_match.py", "proposers/test_prompt_lookup.py")
]
CONTEXT = ProposerContext(150_000, 1 << 20, 64, K, tokenize=lambda text: [])


def code_text(num_tokens, vocab_size):
    """Words, spaces and punctuation of the standard library; ids by first appearance, modulo vocab_size."""
    ids, text = {}, []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        if "site-packages" not in path.parts:
            words = re.findall(r"\w+|\s+|[^\w\s]", path.read_text(errors="ignore"))
            text += [ids.setdefault(word, len(ids)) % vocab_size for word in words]
            if len(text) >= num_tokens:
                break
    return np.resize(np.array(text, np.int32), num_tokens)


def make_peer(max_model_len, max_num_reqs):
    """vLLM's proposer, made as the engine makes it; None where vLLM cannot be imported."""
    try:
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer
    except ImportError:
        return None
    speculative = SimpleNamespace(prompt_lookup_min=MIN_NGRAM, prompt_lookup_max=MAX_NGRAM, num_speculative_tokens=K)
    return NgramProposer(
        SimpleNamespace(
            speculative_config=speculative,
            model_config=SimpleNamespace(max_model_len=max_model_len),
            scheduler_config=SimpleNamespace(max_num_seqs=max_num_reqs),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
    )


def make_proposer():
    return PromptLookup(PromptLookupConfig(min_ngram=MIN_NGRAM, max_ngram=MAX_NGRAM), CONTEXT)


def hard_texts(num_tokens):
    """Texts in which many places match long, and what one ends with."""
    rng = np.random.default_rng(0)
    fill = np.zeros(num_tokens, np.int32)
    yield "random", rng.integers(0, 150_000, num_tokens, dtype=np.int32)
    yield "code", code_text(num_tokens, 150_000)
    yield "one token", fill
    yield "two tokens at random", rng.integers(0, 2, num_tokens, dtype=np.int32)
    for period in (MAX_NGRAM - 1, MAX_NGRAM):
        text = fill.copy()
        text[::period] = 1
        text[-MAX_NGRAM:] = 0
        yield f"one other in {period}, none at the end", text


def time_search(text, repeats):
    """us, the least of some, of a first step and of the next one."""
    least = [np.inf, np.inf]
    for number in range(repeats):
        proposer = make_proposer()
        batch = DraftBatch([str(number)], [text], np.full(1, K, np.int32), [{}])
        for step in range(2):
            start = time.thread_time()
            proposer.propose(batch)
            least[step] = min(least[step], (time.thread_time() - start) * 1e6)
    return least


def time_steps(history_len, num_reqs, num_steps, vocab_size):
    """us per request and step, as lists: ours warm, ours with cold caches, the peer's warm."""
    row_len = history_len + num_steps * MAX_NEW
    token_ids = code_text(num_reqs * row_len, vocab_size).reshape(num_reqs, row_len)
    num_tokens = np.full(num_reqs, history_len, np.int32)
    proposer = make_proposer()
    request_ids, limits, options = (
        [str(row) for row in range(num_reqs)],
        np.full(num_reqs, K, np.int32),
        [{}] * num_reqs,
    )
    peer = make_peer(row_len + K, num_reqs)
    sampled = [[0]] * num_reqs  # the peer only looks at which are empty
    unrelated = np.zeros(EVICTION_BYTES // 8)
    rng = np.random.default_rng(0)

    def ours():
        histories = [row[:end] for row, end in zip(token_ids, ends, strict=True)]
        draft = proposer.propose(DraftBatch(request_ids, histories, limits, options))
        [tokens[:count] for tokens, count in zip(draft.token_ids.tolist(), draft.num_draft.tolist(), strict=True)]

    def theirs():
        peer.propose(K, sampled, num_tokens, token_ids)

    def us_per_request(call):
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) / num_reqs * 1e6

    warm_us, cold_us, peer_us = [], [], []
    for step in range(num_steps):
        num_tokens += rng.integers(1, MAX_NEW + 1, num_reqs, dtype=np.int32)
        ends = num_tokens.tolist()
        if step % PEER_EVERY == 0:
            if peer is not None:
                theirs()
                peer_us.append(us_per_request(theirs))
            unrelated += 1
            cold_us.append(us_per_request(ours))
        else:
            warm_us.append(us_per_request(ours))
    return warm_us, cold_us, peer_us


def cpu_name():
    match = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else None
    return match[1] if match else platform.processor()


def report_steps(console, args):
    table = Table(title=f"us per request and step: {args.requests} requests, K={K}, n {MIN_NGRAM}-{MAX_NGRAM}")
    for column in ("history", "ours", "p90", "cold", "p90", "vLLM", "p90", "vLLM / ours"):
        table.add_column(column, justify="right")
    for history_len in args.histories:
        warm, cold, peer = time_steps(history_len, args.requests, args.steps, 150_000)
        cells = [f"{np.quantile(us, q):.2f}" for us in (warm, cold, peer) if us for q in (0.5, 0.9)]
        ratio = [f"{np.median(peer) / np.median(warm):.1f}"] if peer else []
        table.add_row(f"{history_len:,}", *cells, *ratio)
    console.print(table)


def report_search(console, args):
    table = Table(title="us of one request's step, the least of some: its first, the next")
    for column in ("text", *(f"{length:,} tokens" for length in args.histories)):
        table.add_column(column, justify="left" if column == "text" else "right")
    found = {}
    for length in args.histories:
        for name, text in hard_texts(length):
            found.setdefault(name, []).append(time_search(text, args.repeats))
    for name, cells in found.items():
        table.add_row(name, *(f"{first:.0f}, {again:.0f}" for first, again in cells))
    console.print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--histories", type=int, nargs="+", default=[1_024, 8_192, 32_768, 131_072])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    if subprocess.run([sys.executable, "-m", "pytest", "-q", *map(str, TESTS)]).returncode:
        sys.exit("The tests of search and proposer fail: no report.")
    peer_version = sys.modules["vllm"].__version__ if make_peer(64, 1) else "not importable"
    console = Console()
    console.print(
        f"{cpu_name()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"
    )
    console.print(f"numpy {np.__version__}, numba {numba.__version__}, vLLM {peer_version}")
    report_steps(console, args)
    report_search(console, args)


if __name__ == "__main__":
    main()
