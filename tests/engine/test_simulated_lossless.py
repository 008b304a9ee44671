"""`verify-lossless` of a lookup beside each drafter of vLLM's on the simulated device: scheduled asynchronously, in
graphs, and trimmed there where that can be."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import eagle_heads
import pytest
from conftest import ALL, INTERPRETED, graphs, verify_by_reference
from families import FAMILIES, make_model

if not INTERPRETED or not ALL:
    pytest.skip("SPECPLUGINS_TESTS=all, through Triton's interpreter: a minute each", allow_module_level=True)

from recorded import drafts_pay, replays, runner
from simulated_device.device import simulated_device
from transformers import Qwen2Config

from vllm_specplugins.engine.harness.samples import SETTINGS, draw
from vllm_specplugins.tools.lossless.grid import cell
from vllm_specplugins.tools.lossless.model import make_model as make_target
from vllm_specplugins.tools.lossless.model import write_parts
from vllm_specplugins.tools.lossless.report import PASSED, Judged, Report
from vllm_specplugins.tools.verify_lossless import NO_SPECULATION, Verification

NUM_REQS, K, OWN, NUM_SAMPLES = 16, 6, 3, 200
LAYERS = {"eagle3": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
LAYERS |= {name: {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 1]}} for name in ("dflash", "dspark")}


@pytest.fixture(scope="module")
def device(engine: Any) -> Iterator[None]:
    with simulated_device(is_cuda=True), pytest.MonkeyPatch.context() as patches:
        verify_by_reference(patches)
        yield
        engine.stop()


def written(method: str, folder: Path, patch: pytest.MonkeyPatch) -> tuple[Any, Path, dict[str, Any]]:
    """A tiny target as transformers knows it, its folder, and a stage that drafts for it."""
    model = make_target(0)
    own: dict[str, Any] = {"method": method, "num_speculative_tokens": OWN}
    if method == "mtp":
        patch.setitem(FAMILIES, "qwen2", Qwen2Config(**{**model.config.to_dict(), "model_type": "qwen2"}))
        model = make_model("qwen2")
        model.save_pretrained(folder / "plain")
        patch.setattr(eagle_heads, "checkpoint", lambda _: folder / "plain")
        return model, eagle_heads.mtp_model.__wrapped__(), own
    model.save_pretrained(folder / "target")
    write_parts(folder, 0)
    head = folder / method
    if method in LAYERS:
        patch.setitem(FAMILIES, "llama", model.config)
        make = eagle_heads.eagle_head if method == "eagle3" else eagle_heads.parallel_head
        head = make.__wrapped__(method)
        config = json.loads((head / "config.json").read_text())
        (head / "config.json").write_text(json.dumps(config | LAYERS[method]))
    return model, folder / "target", {**own, "model": str(head)}


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark"])
def test_lossless(engine: Any, device: None, tmp_path: Path, monkeypatch: Any, method: str) -> None:
    """Of the exact distribution. Fails if a token is verified as if it had been drawn from something."""
    model, target, stage = written(method, tmp_path, monkeypatch)
    stages = [{"method": "prompt_lookup", "min_ngram": 1}, stage]
    config = {"method": "cascade", "num_speculative_tokens": K, "stages": stages}
    settings = {**SETTINGS, "model": str(target), "seed": 0, "max_num_seqs": NUM_REQS}
    llm = engine(config, **{**settings, **graphs((1, 4, 8, NUM_REQS, (1 + K) * NUM_REQS))})
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    ours, manager, steps = runner(llm).speculator.specplugins, runner(llm).adaptive_verification, []
    assert (manager is None) == (method == "draft_model")
    if manager is not None:
        drafts_pay(llm, token_ms=0.1)
        reallocate = manager.reallocate_drafts
        manager.reallocate_drafts = lambda *args: steps.append(reallocate(*args)) or steps[-1]
    before = replays(ours._graphs_of[0])
    judged = Verification(model, [cell(1.0)], NUM_SAMPLES, 0, lambda: None).judge(partial(draw, llm), method)
    assert replays(ours._graphs_of[0]) > before
    trimmed = [len(set(cu_num_logits.diff().tolist())) > 1 for cu_num_logits, *_ in steps]
    assert sum(trimmed) >= len(trimmed) // 4, "drafts of all lengths are verified"
    _, *verdicts = Report([Judged(NO_SPECULATION, ""), *judged], {}).verdicts
    assert verdicts == [PASSED], judged
    [stats] = llm.collective_rpc("specplugins_stats")
    assert all(0 < own["accepted"] < own["verified"] for own in stats["stages"].values()), stats["stages"]
