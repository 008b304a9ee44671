"""Cost of a prompt-lookup step, beside vLLM's own n-gram proposer in the same run, and of taking in long texts.

    python tests/bench/bench_prompt_lookup.py

A step takes in 1 to 6 tokens of each request and drafts K for it. Both sides are whole proposers, read the tokens from
the engine's matrix and end in Python lists; the peer is measured in every eighth step, twice, and the second time
counts. "cold" is ours after other data went through the caches, which slows Python itself, too. A burst is requests
that all begin at once, beside as many that decode; what counts is the longest single call of the proposer, in time
of its own thread: a machine that does other things interrupts it for longer. The text
is Python's standard library, split into words. It refuses to report if the tests of index and proposer fail.
"""

import argparse
import hashlib
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
from vllm_specplugins.structures.ngram_index import NgramIndex

MIN_NGRAM, MAX_NGRAM, K, MAX_NEW = 2, 8, 5, 6
PEER_EVERY = 8
EVICTION_BYTES = 64 << 20
TESTS = [Path(__file__).parents[1] / name for name in ("structures", "proposers/test_prompt_lookup.py")]
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


def take_in(proposer, histories, options=None):
    """One step of requests "0", "1", ...; whether all is taken in, and ms of CPU of the call."""
    names = [str(number) for number in range(len(histories))]
    limits = np.full(len(names), K, np.int32)
    batch = DraftBatch(names, list(histories), limits, options or [{}] * len(names))
    start = time.thread_time()
    proposer.propose(batch)
    ms = (time.thread_time() - start) * 1e3
    waiting = [
        request.index.num_left(text) for request, text in zip(proposer._requests.values(), histories, strict=True)
    ]
    waiting += [shared.reference.index.num_left(shared.reference.text) for shared in proposer._references.values()]
    return not any(waiting), ms


def time_burst(texts, num_decoding, references):
    """ms of CPU of each call while the texts arrive at once beside requests that decode, and from when they end until
    their memory is free."""
    proposer = make_proposer()
    decoding = [np.resize(texts[0], 2_000 + row) for row in range(num_decoding)]
    while not take_in(proposer, decoding)[0]:
        pass
    options = [{}] * num_decoding + references
    times, done = [], False
    while not done:
        done, ms = take_in(proposer, [*decoding, *texts], options)
        times.append(ms)
    start = time.thread_time()
    proposer.forget([str(number) for number in range(num_decoding, num_decoding + len(texts))])
    times_after = [(time.thread_time() - start) * 1e3]
    while proposer._allowance.num_dropped_bytes:
        times_after.append(take_in(proposer, decoding)[1])
    return times, times_after


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
    while not take_in(proposer, [row[:history_len] for row in token_ids])[0]:
        pass
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


def time_prompt(text, repeats):
    """Median M tokens/s and bytes per token of indexing a whole prompt."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        index = NgramIndex(MIN_NGRAM, MAX_NGRAM)
        index.take_in(text)
        seconds.append(time.perf_counter() - start)
    return len(text) / np.median(seconds) / 1e6, index.num_bytes / len(text)


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


def report_prompts(console, args):
    table = Table(title="taking in a prompt")
    for column in ("text", "vocabulary", "tokens", "M tokens/s", "bytes/token"):
        table.add_column(column, justify="right")
    rng = np.random.default_rng(0)
    for num_tokens in (8_192, 131_072):
        for vocab_size in (32_000, 150_000):
            texts = {
                "random": rng.integers(0, vocab_size, num_tokens, dtype=np.int32),
                "code": code_text(num_tokens, vocab_size),
            }
            for name, text in texts.items():
                rate, num_bytes = time_prompt(text, args.repeats)
                table.add_row(name, f"{vocab_size:,}", f"{num_tokens:,}", f"{rate:.1f}", f"{num_bytes:.1f}")
    console.print(table)


def report_bursts(console, args):
    table = Table(
        title=f"long texts that arrive at once, beside {args.requests} requests that decode: ms of CPU a call"
    )
    for column in ("arrives", "steps", "median", "p99", "longest", "when they end"):
        table.add_column(column, justify="left" if column == "arrives" else "right")
    rng = np.random.default_rng(0)
    code, noise = code_text(131_072, 150_000), rng.integers(0, 150_000, 131_072, dtype=np.int32)
    twice = np.concatenate([noise[:65_536]] * 2)
    short = code[:100]
    for name, texts, references in (
        ("1 prompt of code", [code], [{}]),
        ("32 prompts of code", [code] * 32, [{}] * 32),
        ("32 random prompts", [noise] * 32, [{}] * 32),
        ("32 random prompts, said twice", [twice] * 32, [{}] * 32),
        ("32 references", [short] * 32, [{"reference": np.roll(noise, row)} for row in range(32)]),
        ("32 times one reference", [short] * 32, [{"reference": noise}] * 32),
    ):
        for options in references:  # as the front end sends them
            if "reference" in options:
                text = options["reference"].tobytes()
                options["reference_digest"] = hashlib.blake2b(text, digest_size=16).digest()
        times, times_after = time_burst(texts, args.requests, references)
        cells = (np.median(times), np.quantile(times, 0.99), max(times), max(times_after))
        table.add_row(f"{name}, 131,072 tokens", str(len(times)), *(f"{cell:.2f}" for cell in cells))
    console.print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--histories", type=int, nargs="+", default=[1_024, 8_192, 32_768, 131_072])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    if subprocess.run([sys.executable, "-m", "pytest", "-q", *map(str, TESTS)]).returncode:
        sys.exit("The tests of index and proposer fail: no report.")
    peer_version = sys.modules["vllm"].__version__ if make_peer(64, 1) else "not importable"
    console = Console()
    console.print(
        f"{cpu_name()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"
    )
    console.print(f"numpy {np.__version__}, numba {numba.__version__}, vLLM {peer_version}")
    report_steps(console, args)
    report_prompts(console, args)
    report_bursts(console, args)


if __name__ == "__main__":
    main()
