"""Time and memory traffic of verification, beside vLLM's own in the same run.

    python tests/bench/bench_rejection.py

On a GPU: every (B, K, V), one-hot and dense q, with and without top-p, in bfloat16 at temperature 0.8: ours, vLLM's
Model Runner V2 and V1 paths with their sampling parameters; GB/s and
the share of the time that a copy of the logits' bytes, each once, would take. Without a GPU: the bytes that the kernels
move, counted in Triton's interpreter and checked, and the reference beside vLLM's V1 sampler on the CPU. It refuses to
report if the operation's tests fail. B: requests, K: drafts of each, V: vocabulary.
"""

import argparse
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from vllm_specplugins.kernels.rejection import rejection_sample
from vllm_specplugins.kernels.rejection.testing import Batch

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from batches import make_batch

KERNEL_TESTS = Path(__file__).parents[1] / "kernels"
BYTES_LIMITS = {("one-hot", "-"): 1.1, ("dense", "-"): 2.2}
TOP_P = 0.95
# How far twenty tokens of a row are above the bulk, in logits: with 20 top-p keeps some of them; with 12 some rows are
# flat and others are not; with 6 top-p keeps hundreds or thousands, in all groups.
PEAKS = {"peaked": 20, "mixed": 12, "flat": 6}


def bench_batch(num_reqs, num_draft, vocab_size, dense, top_p, device, dtype=torch.bfloat16, peak=12):
    """Rows with twenty tokens `peak` above the bulk, as in language models; every other request's drafts are likely."""
    batch = make_batch([num_draft] * num_reqs, vocab_size, dense=dense, dtype=dtype,
                       temperature=torch.full((2 * num_reqs,), 0.8),
                       top_p=torch.full((2 * num_reqs,), TOP_P) if top_p else None)  # fmt: skip
    above = slice(100, None, vocab_size // 20)
    batch.target_logits[:, above] += peak
    if dense:
        batch.draft_logits[:, :, above] += peak
    likely = batch.target_logits.argmax(-1).roll(1).view(num_reqs, -1)
    batch.draft_token_ids.view(num_reqs, -1)[::2] = likely[::2]
    moved = [value.to(device) if isinstance(value, torch.Tensor) else value for value in batch]
    sampling = {k: None if v is None else v.to(device) for k, v in vars(batch.sampling).items()}
    return Batch(*moved)._replace(sampling=type(batch.sampling)(**sampling))


def v1_peer(batch):
    """vLLM's V1 rejection sampler on the same batch, or None where vLLM cannot be imported."""
    try:
        from vllm.platforms import current_platform
        from vllm.v1.sample.logits_processor import LogitsProcessors
        from vllm.v1.sample.metadata import SamplingMetadata
        from vllm.v1.sample.rejection_sampler import RejectionSampler
        from vllm.v1.sample.sampler import Sampler
        from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    except ImportError:
        return None
    if not v1_peer.registered:
        current_platform.register_triton_kernel_overrides()  # as a worker does
        v1_peer.registered = True
    states, device = batch.idx_mapping.long(), batch.target_logits.device
    num_reqs, num_draft = len(states), batch.max_num_draft
    rows = torch.arange(len(batch.target_logits), device=device).view(num_reqs, -1)
    drafts = batch.draft_token_ids.view(num_reqs, -1)[:, 1:]
    metadata = SpecDecodeMetadata.make_dummy(drafts.tolist(), device)
    metadata.target_logits_indices = rows[:, :-1].flatten().int()
    metadata.bonus_logits_indices = rows[:, -1].int()
    sampling = SamplingMetadata(
        temperature=batch.sampling.temperature[states], all_greedy=False, all_random=True,
        top_p=None if batch.sampling.top_p is None else batch.sampling.top_p[states], top_k=None, generators={},
        max_num_logprobs=None, no_penalties=True, prompt_token_ids=None, frequency_penalties=torch.empty(0),
        presence_penalties=torch.empty(0), repetition_penalties=torch.empty(0), output_token_ids=[],
        allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    )  # fmt: skip
    sampler = RejectionSampler(Sampler())
    probs = None
    if batch.draft_logits is not None:
        heat = sampling.temperature[:, None, None]
        probs = (batch.draft_logits[states, :num_draft].float() / heat).softmax(-1).flatten(0, 1).contiguous()
    return lambda: sampler(metadata, probs, batch.target_logits, sampling)


v1_peer.registered = False


def v2_peer(batch):
    """What vLLM's V2 sampler does: a float32 copy, the parameters one by one, then its rejection kernels. GPU only."""
    try:
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
        from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample as theirs
    except ImportError:
        return None
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


PEERS = {"vLLM V2": v2_peer, "vLLM V1": v1_peer}


def times_ms(call, repeats):
    """Sorted times; each after 256 MiB of other memory went through a GPU's caches."""
    call()
    if not torch.cuda.is_available():
        result = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            result.append((time.perf_counter() - start) * 1e3)
        return sorted(result)
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


def report_times(console, args, device, implementation, dtype):
    bandwidth = copy_gb_per_s() if device == "cuda" else None
    of_gpu = f"in a CUDA graph (* without one); a copy runs at {bandwidth or 0:.0f} GB/s"
    kind = of_gpu if bandwidth else "of the CPU reference"
    table = Table(title=f"ms, median and p90 {kind}; temperature 0.8, {dtype}")
    ours = ("ours", "p90", "GB/s", "of limit") if bandwidth else ("ours", "p90")
    peers = [name for name in PEERS if bandwidth or name == "vLLM V1"]
    for column in ("B", "K", "V", "q", "rows", "top-p", *ours, *itertools.chain(*((name, "/ ours") for name in peers))):
        table.add_column(column, justify="right")
    for size in itertools.product(args.requests, args.drafts, args.vocabularies):
        for dense, (rows, top_p) in itertools.product([False, True], [("mixed", False), *((r, True) for r in PEAKS)]):
            batch = bench_batch(*size, dense, top_p, device, dtype, PEAKS[rows])
            call = lambda batch=batch: rejection_sample(*batch, implementation=implementation)  # noqa: E731
            ms = times_ms(recorded(call) if bandwidth else call, args.repeats)
            cells = [f"{np.median(ms):.3f}", f"{np.quantile(ms, 0.9):.3f}"]
            if bandwidth:
                rate = bytes_once(batch) / np.median(ms) / 1e6
                cells += [f"{rate:.0f}", f"{rate / bandwidth:.0%}"]
            for name in peers:
                peer = PEERS[name](batch)
                peer, mark = recorded_if_possible(peer) if peer and bandwidth else (peer, "")
                peer_ms = np.median(times_ms(peer, args.repeats)) if peer else None
                cells += [f"{peer_ms:.3f}{mark}", f"{peer_ms / np.median(ms):.1f}"] if peer else ["-", "-"]
            table.add_row(*map(str, size), "dense" if dense else "one-hot", rows, str(TOP_P) if top_p else "-", *cells)
    console.print(table)


def print_bytes():
    """A line of JSON a variant; runs in a process with the interpreter."""
    sys.path.insert(0, str(KERNEL_TESTS))
    from interpreted import bytes_moved

    for (dense, top_p), vocab_size in itertools.product(itertools.product([False, True], repeat=2), [32_000, 128_256]):
        batch = bench_batch(4, 4, vocab_size, dense, top_p, "cpu")
        with bytes_moved() as moved:
            rejection_sample(*batch, implementation="fused")
        read = batch.target_logits.numel() * batch.target_logits.itemsize
        shares = {name: count / read for name, count in moved.items()}
        q, cut = "dense" if dense else "one-hot", str(TOP_P) if top_p else "-"
        print(json.dumps({"q": q, "top_p": cut, "V": vocab_size, **shares}), flush=True)


def report_bytes(console):
    """Reads of the target's logits; exits if a variant moves more than its limit."""
    done = subprocess.run([sys.executable, __file__, "--print-bytes"], capture_output=True, text=True,
                          env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)  # fmt: skip
    table = Table(
        title="bytes moved, in reads of the target's logits: B 4, K 4 (distinct: a launch's own re-reads cached)"
    )
    for column in ("V", "q", "top-p", "all", "distinct", "limit"):
        table.add_column(column, justify="right")
    too_many = []
    for line in map(json.loads, done.stdout.splitlines()):
        limit = BYTES_LIMITS.get((line["q"], line["top_p"]))
        table.add_row(f"{line['V']:,}", line["q"], line["top_p"], f"{line['all']:.3f}", f"{line['distinct']:.3f}",
                      str(limit or "-"))  # fmt: skip
        if limit and line["all"] > limit:
            too_many.append(line)
    console.print(table)
    if too_many:
        sys.exit(f"More bytes than the limit: {too_many}.")


def cpu_name():
    match = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else None
    return match[1] if match else platform.processor()


def main():
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64, 256] if on_gpu else [1, 8])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 4, 8] if on_gpu else [4])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 128_256, 151_936])
    parser.add_argument("--repeats", type=int, default=50 if on_gpu else 7)
    parser.add_argument("--untested", action="store_true", help="leave out the tests of the operation")
    parser.add_argument("--print-bytes", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.print_bytes:
        print_bytes()
        return
    tests = [*map(str, sorted(KERNEL_TESTS.glob("test_rejection*.py"))), str(KERNEL_TESTS / "test_compiled.py")]
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", *tests]
    if not args.untested and subprocess.run(command).returncode:
        sys.exit("The tests of verification fail: no report.")
    console = Console(width=None if sys.stdout.isatty() else 160)
    device = torch.cuda.get_device_name() if on_gpu else f"{cpu_name()}, {torch.get_num_threads()} threads"
    console.print(
        f"{device}, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    if on_gpu:
        report_times(console, args, "cuda", "fused", torch.bfloat16)
    else:
        report_bytes(console)
        report_times(console, args, "cpu", "reference", torch.float32)


if __name__ == "__main__":
    main()
