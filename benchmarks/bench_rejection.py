"""Time of verification on a GPU, beside what vLLM's Model Runner V2 does in its place, in the same run.

    python benchmarks/bench_rejection.py

Every (B, K, V), one-hot and dense q, with and without top-p, in bfloat16 at temperature 0.8; GB/s and the share of the
time that a copy of the logits' bytes, each once, would take. What the kernels read is counted by
tests/kernels/test_rejection_fused.py. B: requests, K: drafts of each, V: vocabulary.
"""

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from vllm_specplugins.kernels.rejection import rejection_sample
from vllm_specplugins.kernels.rejection.inputs import make_batch, to_device

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels"))

TOP_P = 0.95
# How far twenty tokens of a row are above the bulk, in logits: with 20 top-p keeps some of them; with 12 some rows are
# flat and others are not; with 6 top-p keeps hundreds or thousands, in all groups.
PEAKS = {"peaked": 20, "mixed": 12, "flat": 6}


def bench_batch(num_reqs, num_draft, vocab_size, dense, top_p, peak):
    """Rows with twenty tokens `peak` above the bulk, as in language models; every other request's drafts are likely."""
    batch = make_batch([num_draft] * num_reqs, vocab_size, dense=dense, dtype=torch.bfloat16,
                       temperature=torch.full((2 * num_reqs,), 0.8),
                       top_p=torch.full((2 * num_reqs,), TOP_P) if top_p else None)  # fmt: skip
    above = slice(100, None, vocab_size // 20)
    batch.target_logits[:, above] += peak
    if dense:
        batch.draft_logits[:, :, above] += peak
    likely = batch.target_logits.argmax(-1).roll(1).view(num_reqs, -1)
    batch.draft_token_ids.view(num_reqs, -1)[::2] = likely[::2]
    return to_device(batch, "cuda")


def v2_peer(batch):
    """What vLLM's V2 sampler does: a float32 copy, the parameters one by one, then its rejection kernels."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample as theirs

    num_rows = batch.cu_num_logits.diff().long()
    expanded = batch.idx_mapping.repeat_interleave(num_rows)
    local = torch.arange(batch.max_num_draft + 1, device=expanded.device, dtype=torch.int32).repeat(len(num_rows))
    sampling = batch.sampling
    top_p = None if sampling.top_p is None else sampling.top_p[expanded.long()]

    def run():
        logits = torch.empty_like(batch.target_logits, dtype=torch.float32).copy_(batch.target_logits)
        apply_temperature(logits, expanded, sampling.temperature)
        if top_p is not None:
            logits = apply_top_k_top_p(logits, None, top_p)
        layout = batch.cu_num_logits, batch.positions, batch.idx_mapping, expanded, local
        parameters = sampling.temperature, sampling.seeds, batch.max_num_draft
        theirs(logits, batch.draft_logits, batch.draft_token_ids, *layout, *parameters)

    return run


def times_ms(call, repeats):
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


def recorded(call):
    """The call as a CUDA graph, as an engine may run it."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def recorded_if_possible(call):
    """The call as a graph, and no mark; what waits for the device cannot be recorded, and is marked."""
    try:
        return recorded(call), ""
    except RuntimeError:
        torch.cuda.synchronize()
        return call, "*"


def copy_gb_per_s():
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / np.median(times_ms(lambda: target.copy_(source), 20)) / 1e6


def bytes_once(batch):
    """Each logit of the target once, and of the drafts where q is dense."""
    drafts = len(batch.target_logits) - len(batch.idx_mapping)
    rows = len(batch.target_logits) + (0 if batch.draft_logits is None else drafts)
    return rows * batch.target_logits.shape[-1] * batch.target_logits.itemsize


def report(console, args):
    bandwidth = copy_gb_per_s()
    table = Table(title=f"ms in a CUDA graph (* without); a copy runs at {bandwidth:.0f} GB/s; temperature 0.8")
    for column in ("B", "K", "V", "q", "rows", "top-p", "ours", "p90", "GB/s", "of limit", "vLLM V2", "/ ours"):
        table.add_column(column, justify="right")
    for size in itertools.product(args.requests, args.drafts, args.vocabularies):
        for dense, (rows, top_p) in itertools.product([False, True], [("mixed", False), *((r, True) for r in PEAKS)]):
            batch = bench_batch(*size, dense, top_p, PEAKS[rows])
            ms = times_ms(recorded(lambda batch=batch: rejection_sample(*batch, implementation="fused")), args.repeats)
            rate = bytes_once(batch) / np.median(ms) / 1e6
            peer, mark = recorded_if_possible(v2_peer(batch))
            theirs = np.median(times_ms(peer, args.repeats))
            cells = [f"{np.median(ms):.3f}", f"{np.quantile(ms, 0.9):.3f}", f"{rate:.0f}", f"{rate / bandwidth:.0%}"]
            cells += [f"{theirs:.3f}{mark}", f"{theirs / np.median(ms):.1f}"]
            table.add_row(*map(str, size), "dense" if dense else "one-hot", rows, str(TOP_P) if top_p else "-", *cells)
    console.print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 128_256, 151_936])
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    report(console, args)


if __name__ == "__main__":
    main()
