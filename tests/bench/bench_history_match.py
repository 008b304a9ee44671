"""What a step of prompt lookup reads on a device, and how long that takes at the memory's full bandwidth.

Ours is counted in Triton's interpreter, vLLM's n-gram kernel by its source: for each n from min to max a load of each
place, and one more of each place that still matches. Predicted, not measured: bytes / bandwidth. What a kernel loads
again it may find in a cache; "once" is each byte counted once. On a GPU both are timed instead, in CUDA graphs, behind
256 MiB of other memory.

    TRITON_INTERPRET=1 python tests/bench/bench_history_match.py
    python tests/bench/bench_history_match.py       # on a GPU
"""

import sys
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from vllm_specplugins.kernels.history_match import NO_MATCH, Match, Texts, history_match

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from interpreted import INTERPRETED, bytes_moved

BANDWIDTH = 3.35e12  # bytes a second: H100 SXM, its data sheet
MIN_NGRAM, MAX_NGRAM = 2, 8
SAMPLE = 16_384  # tokens that are counted
SIZES = ((4_096, 1), (4_096, 256), (32_768, 32), (131_072, 1), (131_072, 32), (131_072, 256))


def sample_text() -> np.ndarray:
    """Words of the package's source as tokens: what repeats in code."""
    files = sorted((Path(__file__).parents[2] / "vllm_specplugins").rglob("*.py"))
    words = " ".join(path.read_text() for path in files).split(" ")
    return np.unique(words, return_inverse=True)[1].astype(np.int32)[:SAMPLE]


def ours(text: np.ndarray) -> tuple[float, float]:
    """Bytes a token: all, and once. Checked against the reference."""
    one, max_draft = torch.zeros(1, dtype=torch.int64), torch.full((1,), 5, dtype=torch.int32)
    tokens, length = torch.from_numpy(text)[None], torch.tensor([len(text)], dtype=torch.int32)

    def found_by(implementation: str) -> Match:
        texts = Texts(tokens, length, torch.full((1, 2), NO_MATCH, dtype=torch.int32))
        return history_match(texts, one, max_draft, 5, MIN_NGRAM, MAX_NGRAM, implementation=implementation)

    with bytes_moved() as moved:
        found = found_by("fused")
    expected = found_by("reference")
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


def timed(text: np.ndarray, num_tokens: int, num_reqs: int) -> tuple[float, float]:
    """Median us of a lookup of ours and of vLLM's, two kernels each, on texts of so many tokens, each moved by some."""
    from types import SimpleNamespace

    from bench_rejection import recorded, times_ms
    from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

    repeated = np.resize(text, num_tokens + num_reqs)
    rows = torch.from_numpy(np.stack([repeated[row : row + num_tokens] for row in range(num_reqs)])).cuda()
    lengths = torch.full((num_reqs,), num_tokens, dtype=torch.int32, device="cuda")
    slots, one = torch.arange(num_reqs, device="cuda"), torch.ones_like(lengths)
    states = SimpleNamespace(all_token_ids=SimpleNamespace(gpu=rows), total_len=SimpleNamespace(gpu=lengths))
    spec = SimpleNamespace(num_speculative_tokens=5, prompt_lookup_min=MIN_NGRAM, prompt_lookup_max=MAX_NGRAM)
    config = SimpleNamespace(
        speculative_config=spec,
        scheduler_config=SimpleNamespace(max_num_seqs=num_reqs),
        model_config=SimpleNamespace(max_model_len=num_tokens),
    )
    speculator = NgramGPUSpeculator(config, torch.device("cuda"), states)
    batch, last = SimpleNamespace(num_reqs=num_reqs, idx_mapping=slots), rows[:, -1:].long().contiguous()
    max_draft, distances = torch.full_like(lengths, 5), torch.full((num_reqs, 2), NO_MATCH, dtype=torch.int32).cuda()

    def mine() -> None:
        history_match(Texts(rows, lengths, distances), slots, max_draft, 5, MIN_NGRAM, MAX_NGRAM)

    def other() -> None:
        speculator.propose(batch, None, None, None, None, one, None, last, None, None, None)

    mine_ms, other_ms = (np.median(times_ms(recorded(call), 50)) for call in (mine, other))
    return 1000 * float(mine_ms), 1000 * float(other_ms)


def measure() -> None:
    """On a GPU."""
    from bench_rejection import copy_gb_per_s

    bandwidth = copy_gb_per_s() * 1e9
    title = f"us a lookup, {torch.cuda.get_device_name()}; a copy runs at {bandwidth / 1e12:.2f} TB/s"
    table = Table(title=title)
    for name in ("tokens", "requests", "texts, MB", "read once, us", "ours, us", "vLLM, us"):
        table.add_column(name, justify="right")
    for num_tokens, num_reqs in SIZES:
        num_bytes = 4 * num_tokens * num_reqs
        found = (f"{us:.1f}" for us in timed(sample_text(), num_tokens, num_reqs))
        floor = f"{num_bytes / bandwidth * 1e6:.1f}"
        table.add_row(f"{num_tokens:,}", str(num_reqs), f"{num_bytes / 1e6:.1f}", floor, *found)
    Console(width=110).print(table)


def main() -> None:
    if torch.cuda.is_available():
        measure()
        return
    if not INTERPRETED:
        sys.exit("TRITON_INTERPRET=1 must be set: bytes are counted in the interpreter.")
    text = sample_text()
    (all_ours, once_ours), (all_theirs, once_theirs) = ours(text), theirs(text)
    table = Table(title=f"A step's reads, n-grams of {MIN_NGRAM} to {MAX_NGRAM}, predicted at {BANDWIDTH / 1e12} TB/s")
    for name in ("tokens", "requests", "texts, MB", "ours, us", "vLLM, us", "vLLM, once, us"):
        table.add_column(name, justify="right")
    for num_tokens, num_reqs in SIZES:
        total = num_tokens * num_reqs
        times = (f"{each * total / BANDWIDTH * 1e6:.1f}" for each in (all_ours, all_theirs, once_theirs))
        table.add_row(f"{num_tokens:,}", str(num_reqs), f"{4 * total / 1e6:.1f}", *times)
    console = Console(width=110)
    console.print(table)
    console.print(f"bytes a token: ours {all_ours:.2f} ({once_ours:.2f} once), vLLM {all_theirs:.2f}; a text has 4")


if __name__ == "__main__":
    main()
