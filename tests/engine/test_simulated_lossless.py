"""`verify-lossless` of what drafts on the device: asynchronously scheduled, in graphs, its drafts trimmed there."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import INTERPRETED, graphs, verify_by_reference

if not INTERPRETED or os.environ.get("SPECPLUGINS_SIMULATED") != "all":
    pytest.skip("SPECPLUGINS_SIMULATED=all, through Triton's interpreter: minutes", allow_module_level=True)

from recorded import drafts_pay, replays, runner
from simulated_device.device import simulated_device

from vllm_specplugins.engine.harness.samples import SETTINGS, draw
from vllm_specplugins.tools.lossless.checkpoint import write_checkpoint
from vllm_specplugins.tools.lossless.grid import METHODS, cell
from vllm_specplugins.tools.lossless.report import PASSED, Judged, Report
from vllm_specplugins.tools.verify_lossless import NO_SPECULATION, Verification

NUM_REQS, NUM_SAMPLES = 16, 240
CELLS = [cell(1.0)]
CASES = [
    ("cascade-auto", {}),
    ("cascade-verify", {}),
    ("cascade-auto", {"rejection": "block"}),
    ("early_exit-probabilistic", {}),
    ("prompt_lookup", {}),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Verification, dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    model = write_checkpoint(folder, seed=0)
    settings = {**SETTINGS, "model": str(folder), "seed": 0, "max_num_seqs": NUM_REQS}
    return Verification(model, CELLS, NUM_SAMPLES, 0, lambda: None), settings


@pytest.fixture(scope="module")
def device(engine: Any) -> Iterator[None]:
    with simulated_device(is_cuda=True), pytest.MonkeyPatch.context() as patches:
        verify_by_reference(patches)
        yield
        engine.stop()


@pytest.mark.parametrize(("method", "more"), CASES)
def test_lossless(engine: Any, device: Any, checkpoint: Any, method: str, more: dict[str, Any]) -> None:
    """Of the exact distribution. Fails if what is trimmed depends on what was drawn, or if a token is verified with
    another's q."""
    verification, settings = checkpoint
    config = {key: value for key, value in METHODS[method].items() if key != "gate"}
    llm = engine(config | more, **{**settings, **graphs((1, 4, 8, NUM_REQS, 3 * NUM_REQS))})
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    drafts_pay(llm, token_ms=0.1)
    targets, steps = runner(llm).cudagraph_manager, []
    manager = runner(llm).adaptive_verification
    reallocate = manager.reallocate_drafts
    manager.reallocate_drafts = lambda *args: steps.append(reallocate(*args)) or steps[-1]
    before = replays(targets)
    judged = verification.judge(partial(draw, llm), method)
    assert replays(targets) > before
    trimmed = [len(set(cu_num_logits.diff().tolist())) > 1 for cu_num_logits, *_ in steps]
    assert sum(trimmed) > len(trimmed) // 4, "drafts of all lengths are verified"
    _, *verdicts = Report([Judged(NO_SPECULATION, ""), *judged], {}).verdicts
    assert set(verdicts) == {PASSED}, list(zip(judged, verdicts, strict=True))
    assert all(0 < own.num_accepted < own.num_drafted for own in judged)
