"""The memory that a start with defaults leaves to the KV cache: computed, for models of served shapes.

What speculation adds is allocated by the code that serves, on PyTorch's device "meta", where nothing takes any memory.
The target's weights and activations are arithmetic, and the same for all methods.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import numpy as np
import pytest
import torch
from conftest import RUNNER
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.skipif(RUNNER == "v1", reason="of V2")
WITHOUT_TAPES = "has a device of its own"
META, GB, BLOCK = torch.device("meta"), 10**9, 16
CONTEXT, GRAPH = 0.5 * GB, 1 << 20  # of CUDA and PyTorch; of a drafting graph, at the least
NUM_SIZES = 51  # that vLLM records graphs of: 1, 2, 4, 8 to 256 by 8, to 512 by 16


@dataclass(frozen=True)
class Shape:
    """A model in bfloat16, and how it is served."""

    num_weights: float
    hidden: int
    inner: int
    layers: int
    vocab: int
    max_model_len: int
    num_slots: int = 1024
    num_tokens: int = 8192
    gpu: float = 80 * GB
    utilisation: float = 0.92

    @property
    def kv(self) -> int:
        """Bytes of a token: eight heads of 128, keys and values."""
        return self.layers * 8 * 128 * 2 * 2

    def available(self, buffers: float, peak: float) -> float:
        """Bytes for the KV cache."""
        activations = self.num_tokens * 2 * (2 * self.hidden + 3 * self.inner)
        sampler = 6 * self.num_slots * self.vocab  # of the logits a copy in float32
        penalties = self.num_slots * self.vocab * 4
        held = self.num_tokens * self.hidden * 2
        used = 2 * self.num_weights + penalties + CONTEXT + buffers + max(activations, held + sampler, peak)
        return self.gpu * self.utilisation - used


LLAMA = Shape(8.03e9, 4096, 14336, 32, 128_256, 131_072)
QWEN = Shape(8.19e9, 4096, 12288, 36, 151_936, 40_960)


class Memory(TorchDispatchMode):
    """The bytes of a device's tensors, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and tensor.device == META:
                self._add(tensor.untyped_storage(), given)
        return results

    def _add(self, storage: Any, given: set[int]) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        finalize(storage, self._drop, key, storage.nbytes())

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


@contextmanager
def on_meta(patches: pytest.MonkeyPatch) -> Iterator[Memory]:
    import vllm.v1.worker.cpu.shm  # noqa: F401  (buffers without pinned memory)
    from vllm_specplugins.kernels import implementations, rejection
    from vllm_specplugins.kernels.rejection import drafts

    for module in (implementations, drafts, rejection):
        patches.setattr(module, "implementation_of", lambda logits, wanted, *on_cpu: "fused")
    with Memory() as memory:
        yield memory


def buffers_of(shape: Shape, num_draft: int, ours: bool, patches: pytest.MonkeyPatch) -> int:
    """What a lookup allocates at start, vLLM's `ngram_gpu` without ours; 0 drafts: nobody's."""
    from vllm.v1.worker.gpu.states import RequestState
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    from vllm_specplugins.config import PromptLookupConfig
    from vllm_specplugins.engine.v2.feedback import draft_tracker
    from vllm_specplugins.engine.v2.speculators.token_histories import TokenHistories

    patches.setattr(torch.cuda, "Stream", lambda *_: None)
    patches.setattr(
        draft_tracker, "new_accept_probs", lambda slots, most, device: torch.ones(slots + 1, most, device=device)
    )
    with on_meta(patches) as memory:
        width, rows = num_draft + 1, shape.num_slots * (num_draft + 1)
        sizes = shape.num_slots, shape.max_model_len, shape.num_tokens, num_draft, shape.vocab
        states = RequestState(*sizes, META, use_dense_all_token_ids=num_draft > 0)
        kept: list[Any] = [states, StructuredOutputsWorker(rows, shape.vocab, META, width, 1)]
        if ours:
            kept.append(TokenHistories(states, num_draft, PromptLookupConfig(), META))
            kept.append(draft_tracker.DraftTracker(1, states, num_draft, META))
        return memory.now + (NUM_SIZES * GRAPH if ours else 0)


def peak_of(shape: Shape, num_draft: int, trims: bool, patches: pytest.MonkeyPatch) -> int:
    """Of the warm-up, which vLLM's profile sees."""
    from launch_keys import recorded
    from test_warm_up import make_server

    from vllm_specplugins.engine.v2.verification.self_check import warm_up

    runner, speculator = make_server("one-hot", torch.bfloat16, shape.vocab, num_draft)
    runner.max_num_reqs, runner.max_num_tokens, runner.device = shape.num_slots, shape.num_tokens, META
    runner.speculative_config.draws, speculator.enable_adaptive_verification = False, trims
    runner.speculative_config.runs_target = False

    def compute_logits(hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.empty(len(hidden_states), shape.vocab, dtype=torch.bfloat16, device=META)

    runner.model = SimpleNamespace(compute_logits=compute_logits)
    with on_meta(patches) as memory, recorded("vllm_specplugins.kernels", runs=False):
        warm_up(runner, speculator)
    return memory.peak


def kv_bytes(shape: Shape, num_draft: int, ours: bool, patches: pytest.MonkeyPatch, trims: bool = True) -> float:
    peak = peak_of(shape, num_draft, trims, patches) if ours else 0
    return shape.available(buffers_of(shape, num_draft, ours, patches), peak)


@pytest.mark.parametrize(
    ("model", "num_slots", "least"), [(m, n, s) for m in (LLAMA, QWEN) for n, s in ((1024, 0.97), (256, 0.99))]
)
def test_kv_blocks(model: Shape, num_slots: int, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """`prompt_lookup` at its default K on 80 GB, beside no speculation and vLLM's `ngram_gpu` of the same K. Fails if
    the warm-up has more rows than a trimmed step, if all of them are edited at once, or if a buffer grows."""
    shape = replace(model, num_slots=num_slots)
    ours, none, ngram = (kv_bytes(shape, *own, monkeypatch) for own in ((31, True), (0, False), (31, False)))
    print(
        f"{model.vocab} {num_slots}: {ours / none:.4f} of none's, {ours / ngram:.4f} of ngram_gpu's, {none / GB:.1f} GB"
    )
    assert ours >= least * none and ours >= 0.99 * ngram


@pytest.mark.parametrize(
    ("num_tokens", "trims", "starts"),
    [(2048, True, 31), (2048, False, 31), (8192, True, 31), (8192, False, 5)],
    ids=["server", "server, untrimmed", "offline", "offline, untrimmed"],
)
def test_24_gb(num_tokens: int, trims: bool, starts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-8B on 24 GB with 0.95 of it, where vLLM starts if one request of its whole context has room. So it does
    with the default K, but for vLLM's offline default where nothing trims: a step may verify 8,192 rows there. Fails if
    what speculation takes grows so far that another default has to give way."""
    card = {"num_slots": 256, "num_tokens": num_tokens, "gpu": 24_564 * (1 << 20), "utilisation": 0.95}
    shape = replace(QWEN, **card)
    room = {k: kv_bytes(shape, k, True, monkeypatch, trims) // shape.kv for k in (31, 5)}
    assert kv_bytes(shape, 0, False, monkeypatch) // shape.kv > shape.max_model_len
    assert max(k for k in room if room[k] >= shape.max_model_len) == starts, room


@pytest.mark.parametrize(("trims", "edits", "most"), [(False, True, 512), (False, False, 2000), (True, True, 2000)])
def test_edits_in_pieces(trims: bool, edits: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host knows the rows of each request. Fails if the copy of what is edited has all rows of a step."""
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    from vllm_specplugins.engine.v2.verification.verify import FusedRejectionSampler

    sampler: Any = object.__new__(FusedRejectionSampler)
    sampler.enable_adaptive_verification, sampler.editor = trims, SimpleNamespace(edits_any=lambda slots: edits)
    monkeypatch.setattr(RejectionSampler, "_verify_in_chunks", lambda self, *args: args[5])
    batch = SimpleNamespace(idx_mapping_np=np.arange(3))
    assert sampler._verify_in_chunks(None, batch, None, None, None, 2000, 0, None) == most


def test_what_a_start_tells(caplog: pytest.LogCaptureFixture) -> None:
    """Fails if the log omits a buffer, or has other units."""
    from vllm_specplugins.engine.v2.memory import tell_buffers

    tokens, mask = (torch.empty(size, dtype=torch.int32, device=META) for size in (1 << 27, 1 << 28))
    texts = SimpleNamespace(histories=SimpleNamespace(token_ids=tokens), references=tokens[: 1 << 24])
    runner: Any = SimpleNamespace(num_speculative_steps=31, max_num_reqs=1024)
    runner.structured_outputs_worker = SimpleNamespace(grammar_bitmask=mask)
    with caplog.at_level("INFO", "vllm.specplugins"):
        tell_buffers(runner, SimpleNamespace(lookups=SimpleNamespace(texts=texts), draft_logits=None))
    assert caplog.messages == [
        "Speculation with num_speculative_tokens=31 and max_num_seqs=1024 takes 1.56 GiB beyond the KV cache: tokens "
        "of all requests 0.50, references 0.06, grammar bitmask 1.00."
    ]
