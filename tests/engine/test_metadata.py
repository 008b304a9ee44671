"""What vLLM's attention backends say of their metadata, and what is believed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_specplugins.engine.target.layers import updates_in_place


def group_of(builder: type, claims: bool = True) -> Any:
    made = builder.__new__(builder)
    return SimpleNamespace(supports_draft_decode_metadata_update=claims, get_metadata_builder=lambda: made)


def test_virtual_batches() -> None:
    """Chunked local attention on top of a backend that can update in place cannot. Kills: its inherited claim."""
    from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    theirs = CPUAttentionBackend.get_builder_cls()
    chunked = create_chunked_local_attention_backend(CPUAttentionBackend, 32).get_builder_cls()
    assert updates_in_place(group_of(theirs))
    assert not updates_in_place(group_of(theirs, claims=False))
    assert issubclass(chunked, theirs) and not updates_in_place(group_of(chunked))


def test_trimmed_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device trims drafts, it alone knows where a request's rows end. Kills: the scheduled ends."""
    verify = pytest.importorskip("vllm_specplugins.engine.v2.verification.verify")
    scheduled, real = torch.tensor([0, 3, 6]), torch.tensor([0, 1, 3], dtype=torch.int32)
    seen: list[Any] = []
    monkeypatch.setattr(verify, "compute_topk_scores", lambda *args, **_: seen.append(args[3]))
    monkeypatch.setattr(verify, "_flatten_sampled_kernel", {(2,): lambda *args: None})
    state = SimpleNamespace(max_num_token_ids=lambda rows: 1)
    for trims in (True, False):
        sampler: Any = verify.FusedRejectionSampler.__new__(verify.FusedRejectionSampler)
        sampler.enable_adaptive_verification, sampler._idx_mapping_np = trims, None
        sampler._expanded_idx_mapping = None
        sampler.sampler = SimpleNamespace(logprob_token_ids_state=state, logprobs_mode="raw_logprobs")
        sampler._get_logprobs_tensors(torch.zeros(2, 3), torch.ones(2), torch.zeros(6, 5), real, scheduled.numpy(), 1)
    assert torch.equal(seen[0], real) and seen[1] == scheduled.tolist()
