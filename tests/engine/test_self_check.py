"""On a device our kernels are checked and warmed before they serve; here with a CPU that passes for one."""

from typing import Any

import pytest
from conftest import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="of V2, in the interpreter")
WITHOUT_TAPES = "has a device of its own, that is a CPU"
CONFIG = {"method": "early_exit", "exit_layer": 1, "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}
PROMPTS = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [9, 8]}]


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of our operations run in Triton, as on a GPU, and engines prepare for it."""
    import torch
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm_specplugins.kernels import implementations
    from vllm_specplugins.kernels.rejection import drafts

    from vllm_specplugins.engine import self_check

    monkeypatch.setattr(CPUWorker, "_should_warm_up_model", lambda self: True)
    monkeypatch.setattr(self_check, "device", lambda: torch.device("cpu"))
    for module in (implementations, drafts):
        monkeypatch.setattr(module, "implementation_of", lambda logits, wanted, *on_cpu: wanted or "fused")


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def parameters() -> list[Any]:
    """What requests ask for: each limit alone and with others, edits, seeds, logprobs, a grammar, temperature 0."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    limits = [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "min_p": 0.05}, {"logit_bias": {3: 2.0}}]
    asked = [{"temperature": 0.8, "seed": 3, **limit} for limit in limits]
    asked += [{"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}, {"logprobs": 2}]
    asked += [{"structured_outputs": StructuredOutputsParams(regex="[a-f ]{40}"), "min_p": 0.01}]
    return [SamplingParams(max_tokens=4, ignore_eos=True, **values) for values in asked]


def test_only(on_a_device: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code of the program is the result. Fails if the exit code does not depend on the result, or if an engine
    starts as well."""
    import torch
    from vllm_specplugins.kernels.self_check import Finding, Shapes

    from vllm_specplugins.config import ConfigError
    from vllm_specplugins.engine import self_check

    monkeypatch.setattr(self_check, "shapes_of", lambda _: Shapes(300, torch.float32, 1, samples=False))
    monkeypatch.setenv(self_check.VARIABLE, "1")
    self_check.stop_if_only(None)
    monkeypatch.setenv(self_check.VARIABLE, "only")
    for problem, code in (("", 0), ("differs from its reference", 1)):
        found = [Finding("verification", problem), Finding("edits", "")]
        monkeypatch.setattr(self_check, "check_device", lambda *_, found=found: iter(found))
        with pytest.raises(SystemExit) as ended:
            self_check.stop_if_only(None)
        assert ended.value.code == code and len(capsys.readouterr().out.splitlines()) == 2
    monkeypatch.setattr(self_check, "device", lambda: None)
    with pytest.raises(SystemExit) as ended:
        self_check.stop_if_only(None)
    assert ended.value.code == 0 and "a CPU" in capsys.readouterr().out
    monkeypatch.setenv(self_check.VARIABLE, "yes")
    with pytest.raises(ConfigError, match="must be 0, 1 or only, not 'yes'"):
        self_check.stop_if_only(None)


@pytest.mark.long
def test_warm(engine: Any, on_a_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What serving launches was launched before. Kills: a variant that is left out; one that a batch size adds. In
    bfloat16, where variants are most; test_warm_up.py has the others.
    """
    from launch_keys import recorded

    monkeypatch.setenv("VLLM_SPECPLUGINS_SELF_CHECK", "0")
    with recorded("vllm_specplugins.kernels") as warmed:
        llm = engine(CONFIG, max_num_seqs=3, dtype="bfloat16")
    with recorded("vllm_specplugins.kernels") as served:
        for chosen in parameters():
            llm.generate(PROMPTS[:1], chosen, use_tqdm=False)
        llm.generate([*PROMPTS, *PROMPTS[:1]], parameters()[-3:], use_tqdm=False)
    kernels = "_draw_kernel", "_weigh_kernel", "_adjust_kernel"
    assert {name for name, _ in served} >= set(kernels)
    assert served <= warmed, sorted(served - warmed)


@pytest.mark.parametrize("failing", ["verification", "rows"])
def test_falls_back(engine: Any, on_a_device: None, failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that differs leaves all to vLLM. Kills: a sampler of ours that stays; drafts that go on."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
    from vllm_specplugins.kernels.self_check import Finding

    from vllm_specplugins.engine.v2.verification import self_check

    found = [Finding(failing, "differs from its reference")]
    monkeypatch.setattr(self_check, "check_device", lambda *_: iter(found))
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    llm = engine(CONFIG, max_num_seqs=3 + len(failing))  # an engine of its own
    runner = runner_of(llm)
    assert type(runner.rejection_sampler) is RejectionSampler and type(runner.sampler) is Sampler
    outputs = [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, greedy, use_tqdm=False)]
    biased = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logit_bias={11: 100.0}, min_p=0.1)
    assert llm.generate(PROMPTS[:1], biased, use_tqdm=False)[0].outputs[0].token_ids == [11] * 4
    assert llm.collective_rpc("specplugins_stats")[0]["drafted_tokens"] == 0
    plain = engine(None, max_num_seqs=3)
    assert outputs == [tuple(o.outputs[0].token_ids) for o in plain.generate(PROMPTS, greedy, use_tqdm=False)]
