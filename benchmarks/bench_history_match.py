"""How long a lookup of prompt lookup takes on a GPU, beside vLLM's n-gram kernels: two launches each, in CUDA graphs,
after 256 MiB of other memory. What ours reads is counted by tests/kernels/test_history_match.py.

    python benchmarks/bench_history_match.py
"""

import sys
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from vllm_specplugins.kernels.history_match import NO_MATCH, Texts, history_match

sys.path.insert(0, str(Path(__file__).parent))
from bench_rejection import copy_gb_per_s, recorded, times_ms

MIN_NGRAM, MAX_NGRAM = 2, 8
SAMPLE = 16_384  # tokens
SIZES = ((4_096, 1), (4_096, 256), (32_768, 32), (131_072, 1), (131_072, 32), (131_072, 256))


def sample_text() -> np.ndarray:
    """Words of the package's source as tokens: what repeats in code."""
    files = sorted((Path(__file__).parents[1] / "vllm_specplugins").rglob("*.py"))
    words = " ".join(path.read_text() for path in files).split(" ")
    return np.unique(words, return_inverse=True)[1].astype(np.int32)[:SAMPLE]


def timed(text: np.ndarray, num_tokens: int, num_reqs: int) -> tuple[float, float]:
    """Median us of a lookup of ours and of vLLM's, two kernels each, on texts of so many tokens, each moved by some."""
    from types import SimpleNamespace

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


def main() -> None:
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


if __name__ == "__main__":
    main()
