"""What a step of prompt lookup reads on a device, and how long that takes at the memory's full bandwidth.

Ours is counted in Triton's interpreter, vLLM's n-gram kernel by its source: for each n from min to max a load of each
place, and one more of each place that still matches. Predicted, not measured: bytes / bandwidth. What a kernel loads
again it may find in a cache; "once" is each byte counted once.

    TRITON_INTERPRET=1 python tests/bench/bench_history_match.py
"""

import sys
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from vllm_specplugins.kernels.history_match import Texts, history_match

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from interpreted import INTERPRETED, bytes_moved

BANDWIDTH = 3.35e12  # bytes a second: H100 SXM, its data sheet
MIN_NGRAM, MAX_NGRAM = 2, 8
SAMPLE = 16_384  # tokens that are counted
SIZES = ((4_096, 1), (4_096, 256), (32_768, 32), (131_072, 1), (131_072, 32), (131_072, 256))
SLOT_BYTES = (11, 22)  # of a token in structures/ngram_index.py


def sample_text() -> np.ndarray:
    """Words of the package's source as tokens: what repeats in code."""
    files = sorted((Path(__file__).parents[2] / "vllm_specplugins").rglob("*.py"))
    words = " ".join(path.read_text() for path in files).split(" ")
    return np.unique(words, return_inverse=True)[1].astype(np.int32)[:SAMPLE]


def ours(text: np.ndarray) -> tuple[float, float]:
    """Bytes a token: all, and once. Checked against the reference."""
    one, wanted = torch.zeros(1, dtype=torch.int64), torch.full((1,), 5, dtype=torch.int32)
    texts = Texts(torch.from_numpy(text)[None], torch.tensor([len(text)], dtype=torch.int32))
    arguments = texts, one, wanted, 5, MIN_NGRAM, MAX_NGRAM
    with bytes_moved() as moved:
        found = history_match(*arguments, implementation="fused")
    expected = history_match(*arguments, implementation="reference")
    if not all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True)):
        sys.exit("the kernel differs from its reference: nothing to report")
    return moved["all"] / len(text), moved["distinct"] / len(text)


def theirs(text: np.ndarray) -> tuple[float, float]:
    """The same of vLLM 0.32's `_ngram_scan_kernel`."""
    loads = 0
    for n in range(MIN_NGRAM, MAX_NGRAM + 1):
        places = np.arange(len(text) - n)
        for j in range(n):
            loads += len(places)
            places = places[text[places + j] == text[len(text) - n + j]]
    return 4 * loads / len(text), 4.0


def main() -> None:
    if not INTERPRETED:
        sys.exit("TRITON_INTERPRET=1 must be set: bytes are counted in the interpreter.")
    text = sample_text()
    (all_ours, once_ours), (all_theirs, once_theirs) = ours(text), theirs(text)
    table = Table(title=f"A step's reads, n-grams of {MIN_NGRAM} to {MAX_NGRAM}, predicted at {BANDWIDTH / 1e12} TB/s")
    for name in ("tokens", "requests", "texts, MB", "ours, us", "vLLM, us", "vLLM, once, us", "an index, MB"):
        table.add_column(name, justify="right")
    for num_tokens, num_reqs in SIZES:
        total = num_tokens * num_reqs
        times = (f"{each * total / BANDWIDTH * 1e6:.1f}" for each in (all_ours, all_theirs, once_theirs))
        index = "-".join(f"{size * total / 1e6:.0f}" for size in SLOT_BYTES)
        table.add_row(f"{num_tokens:,}", str(num_reqs), f"{4 * total / 1e6:.1f}", *times, index)
    console = Console(width=110)
    console.print(table)
    console.print(f"bytes a token: ours {all_ours:.2f} ({once_ours:.2f} once), vLLM {all_theirs:.2f}; a text has 4")


if __name__ == "__main__":
    main()
