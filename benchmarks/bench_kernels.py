"""Kernels on a GPU, beside vLLM's Model Runner V2 in the same run, in CUDA graphs, after 256 MiB of other memory.

    python benchmarks/bench_kernels.py [verification lookup]

verification: every (B, K, V), one-hot and dense q, with and without top-p, in bfloat16 at temperature 0.8. lookup:
texts of code, two launches each. B: requests, K: drafts of each, V: vocabulary. "of limit": the share of the time that
a copy of the logits or texts, each once, would take. tests/kernels count what the kernels read.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from vllm_specplugins.kernels.history_match import NO_MATCH, Texts, history_match
from vllm_specplugins.kernels.rejection import rejection_sample
from vllm_specplugins.kernels.rejection.inputs import make_batch, to_device

TOP_P = 0.95
# How far twenty tokens of a row are above the bulk, in logits: with 20 top-p keeps some of them; with 12 some rows are
# flat and others are not; with 6 top-p keeps hundreds or thousands, in all groups.
PEAKS = {"peaked": 20, "mixed": 12, "flat": 6}
MIN_NGRAM, MAX_NGRAM = 2, 8
SAMPLE = 16_384  # tokens
TEXTS = ((4_096, 1), (4_096, 256), (32_768, 32), (131_072, 1), (131_072, 32), (131_072, 256))  # length, requests
# Its name, bytes that are read once, ours, and vLLM's.
Case = tuple[str, int, Callable[[], Any], Callable[[], Any]]


def bench_batch(num_reqs: int, num_draft: int, vocab_size: int, dense: bool, top_p: bool, peak: int) -> Any:
    """Rows with twenty tokens `peak` above the bulk, as in language models; every other request's drafts are likely."""
    batch = make_batch([num_draft] * num_reqs, vocab_size, dense=dense, dtype=torch.bfloat16,
                       temperature=torch.full((2 * num_reqs,), 0.8),
                       top_p=torch.full((2 * num_reqs,), TOP_P) if top_p else None)  # fmt: skip
    above = slice(100, None, vocab_size // 20)
    batch.target_logits[:, above] += peak
    if batch.draft_logits is not None:
        batch.draft_logits[:, :, above] += peak
    likely = batch.target_logits.argmax(-1).roll(1).view(num_reqs, -1)
    batch.draft_token_ids.view(num_reqs, -1)[::2] = likely[::2].int()
    return to_device(batch, "cuda")


def v2_verification(batch: Any) -> Callable[[], None]:
    """What vLLM's V2 sampler does: a float32 copy, the parameters one by one, then its rejection kernels."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample as theirs

    num_rows = batch.cu_num_logits.diff().long()
    expanded = batch.idx_mapping.repeat_interleave(num_rows)
    local = torch.arange(batch.max_num_draft + 1, device=expanded.device, dtype=torch.int32).repeat(len(num_rows))
    sampling = batch.sampling
    top_p = None if sampling.top_p is None else sampling.top_p[expanded.long()]

    def run() -> None:
        logits = torch.empty_like(batch.target_logits, dtype=torch.float32).copy_(batch.target_logits)
        apply_temperature(logits, expanded, sampling.temperature)
        if top_p is not None:
            logits = apply_top_k_top_p(logits, None, top_p)
        layout = batch.cu_num_logits, batch.positions, batch.idx_mapping, expanded, local
        parameters = sampling.temperature, sampling.seeds, batch.max_num_draft
        theirs(logits, batch.draft_logits, batch.draft_token_ids, *layout, *parameters)

    return run


def verifications(args: argparse.Namespace) -> Iterator[Case]:
    for num_reqs, num_draft, vocab_size in itertools.product(args.requests, args.drafts, args.vocabularies):
        for dense, (rows, top_p) in itertools.product([False, True], [("mixed", False), *((r, True) for r in PEAKS)]):
            batch = bench_batch(num_reqs, num_draft, vocab_size, dense, top_p, PEAKS[rows])
            num_rows = len(batch.target_logits) + dense * num_reqs * num_draft
            name = f"B {num_reqs}, K {num_draft}, V {vocab_size}, {'dense' if dense else 'one-hot'}, {rows}"
            ours = partial(rejection_sample, *batch, implementation="fused")
            yield name + f", top-p {TOP_P}" * top_p, 2 * num_rows * vocab_size, ours, v2_verification(batch)


def lookups(args: argparse.Namespace) -> Iterator[Case]:
    """Words of the package's source as tokens, moved by some for each request."""
    from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

    files = sorted((Path(__file__).parents[1] / "vllm_specplugins").rglob("*.py"))
    words = " ".join(path.read_text() for path in files).split(" ")
    sample = np.unique(words, return_inverse=True)[1].astype(np.int32)[:SAMPLE]
    for num_tokens, num_reqs in TEXTS:
        repeated = np.resize(sample, num_tokens + num_reqs)
        rows = torch.from_numpy(np.stack([repeated[row : row + num_tokens] for row in range(num_reqs)])).cuda()
        lengths = torch.full((num_reqs,), num_tokens, dtype=torch.int32, device="cuda")
        slots, one = torch.arange(num_reqs, device="cuda"), torch.ones_like(lengths)
        states = SimpleNamespace(all_token_ids=SimpleNamespace(gpu=rows), total_len=SimpleNamespace(gpu=lengths))
        ngram = SimpleNamespace(num_speculative_tokens=5, prompt_lookup_min=MIN_NGRAM, prompt_lookup_max=MAX_NGRAM)
        limits = SimpleNamespace(max_num_seqs=num_reqs), SimpleNamespace(max_model_len=num_tokens)
        config = SimpleNamespace(speculative_config=ngram, scheduler_config=limits[0], model_config=limits[1])
        speculator = NgramGPUSpeculator(config, torch.device("cuda"), states)
        batch, last = SimpleNamespace(num_reqs=num_reqs, idx_mapping=slots), rows[:, -1:].long().contiguous()
        texts = Texts(rows, lengths, torch.full((num_reqs, 2), NO_MATCH, dtype=torch.int32).cuda())
        given = texts, slots, torch.full_like(lengths, 5), 5, MIN_NGRAM, MAX_NGRAM
        theirs = partial(speculator.propose, batch, *[None] * 4, one, None, last, *[None] * 3)
        name = f"{num_tokens:,} tokens, {num_reqs} requests"
        yield name, 4 * num_tokens * num_reqs, partial(history_match, *given), theirs


def times_ms(call: Callable[[], Any], repeats: int) -> list[float]:
    """Sorted times; each after 256 MiB of other memory went through the caches."""
    call()
    other = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        other.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)


def recorded(call: Callable[[], Any]) -> tuple[Callable[[], Any], str]:
    """The call as a CUDA graph, and no mark; what waits for the device cannot be recorded, and is marked."""
    call()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
        return graph.replay, ""
    except RuntimeError:
        torch.cuda.synchronize()
        return call, "*"


def copy_gb_per_s() -> float:
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return float(2 * source.numel() / np.median(times_ms(lambda: target.copy_(source), 20)) / 1e6)


KINDS = {"verification": verifications, "lookup": lookups}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], default=list(KINDS))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 128_256, 151_936])
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    bandwidth = copy_gb_per_s()
    title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a copy runs at {bandwidth:.0f} GB/s"
    table = Table("us, * without a graph", "ours", "p90", "GB/s", "of limit", "vLLM", "/ ours", title=title)
    for kind in args.kinds:
        for name, num_bytes, ours, theirs in KINDS[kind](args):
            ms, (peer, mark) = times_ms(recorded(ours)[0], args.repeats), recorded(theirs)
            middle, its = float(np.median(ms)), float(np.median(times_ms(peer, args.repeats)))
            rate = num_bytes / middle / 1e6
            figures = f"{1000 * middle:.1f}", f"{1000 * np.quantile(ms, 0.9):.1f}", f"{rate:.0f}"
            table.add_row(name, *figures, f"{rate / bandwidth:.0%}", f"{1000 * its:.1f}{mark}", f"{its / middle:.1f}")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
