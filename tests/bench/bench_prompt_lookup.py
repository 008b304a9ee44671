"""What one request's step of prompt lookup costs, by how its text repeats itself.

    python tests/bench/bench_prompt_lookup.py

The whole proposer, drafting K tokens. A text's cost is the least time of the proposer's thread: a machine that does
other things interrupts it for longer. The text is Python's standard library, split into words. It refuses to report if
the tests of search and proposer fail.
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

import numba
import numpy as np
from rich.console import Console
from rich.table import Table

from vllm_specplugins.config import PromptLookupConfig
from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.proposers.prompt_lookup import PromptLookup

MIN_NGRAM, MAX_NGRAM, K = 2, 8, 31
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


def cpu_name():
    match = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else None
    return match[1] if match else platform.processor()


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
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    if subprocess.run([sys.executable, "-m", "pytest", "-q", *map(str, TESTS)]).returncode:
        sys.exit("The tests of search and proposer fail: no report.")
    console = Console()
    console.print(
        f"{cpu_name()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"
    )
    console.print(f"numpy {np.__version__}, numba {numba.__version__}")
    report_search(console, args)


if __name__ == "__main__":
    main()
