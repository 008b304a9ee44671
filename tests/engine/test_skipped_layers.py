"""An exit that leaves out layers in the middle, on both runners: models in which one layer adds nothing show whether
the others, and they alone, draft."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from cases import STRESS, cascade, generate
from conftest import INTERPRETED, RUNNER, counted, spec_metrics
from families import NUM_LAYERS, VOCAB_SIZE, checkpoint, with_idle_layer
from safetensors.torch import load_file
from test_early_exit import engine_config
from tree_attention import attend_by_reference

from vllm_specplugins.config import ConfigError
from vllm_specplugins.engine.target.model_source import may_skip
from vllm_specplugins.proposers.draft_sampler import ModelProposer
from vllm_specplugins.proposers.heads.exit_head import ExitHead, ExitHeadConfig
from vllm_specplugins.tools.base_model import load_tokenizer
from vllm_specplugins.tools.bench.workloads import PROMPTS
from vllm_specplugins.tools.data import token_rows
from vllm_specplugins.tools.files import CHAT_MODEL, every_nth

CHAT_DRAFTS = Path(__file__).with_name("chat_drafts.json")
IDLE = 1
OTHERS = [layer for layer in range(NUM_LAYERS) if layer != IDLE]
NUM_TOKENS = 16 if INTERPRETED else 21  # one from the prompt and whole steps of K + 1, so that no draft is cut
COUPLED = {"temperature": 0.9, "seed": 3}
FAMILIES = ["llama"] if INTERPRETED else ["llama", "gemma3", "qwen3_moe"]
on_v1 = pytest.mark.skipif(RUNNER == "v2", reason="the same code, and slow through the interpreter")


def skipping(layers: list[int], **other: Any) -> dict[str, Any]:
    return {"method": "early_exit", "layers": layers, "num_speculative_tokens": 4, **other}


def arguments(model: Path) -> dict[str, Any]:
    return {"model": str(model), "skip_tokenizer_init": True, "async_scheduling": False}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of mixed lengths, most longer than a sliding window."""
    rng = random.Random(0)
    lengths = [3 + 17 * i % (90 if INTERPRETED else 331) for i in range(4 if INTERPRETED else 10)]
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def all_accepted(llm: Any, prompts: list[list[int]], expected: list[list[int]], **sampling: Any) -> bool:
    """Whether outputs are the expected ones, and all drafts are accepted."""
    outputs, drafted, accepted = counted(llm, lambda: generate(llm, prompts, [8], max_tokens=NUM_TOKENS, **sampling))
    assert outputs == expected and drafted >= len(prompts) * (NUM_TOKENS - 1) * 4 // 5
    assert llm.collective_rpc("specplugins_stats")[0]["faults"] == {}
    return accepted == drafted


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_that_matter_accept_everything(engine: Any, prompts: Any, family: str) -> None:
    """Greedy and sampled. Kills: layers that are counted from another place, or run at the KV pages, windows or experts
    of those that stood in their place; first layers in place of the listed ones; a graph that draws with the
    parameters or logits with which it was recorded."""
    model = arguments(with_idle_layer(family, IDLE))
    expected = generate(engine(**model), prompts, [8], max_tokens=NUM_TOKENS)
    llm = engine(skipping(OTHERS, draft_sample_method="coupled"), **model)
    assert all_accepted(llm, prompts, expected)
    sampled = generate(llm, prompts, [8], max_tokens=NUM_TOKENS, **COUPLED)
    assert sampled != expected and all_accepted(llm, prompts, sampled, **COUPLED)
    if family == "llama" and not INTERPRETED:
        llm = engine(skipping(OTHERS, draft_sample_method="probabilistic"), **model)
        outputs = generate(llm, prompts, [8], max_tokens=NUM_TOKENS, **COUPLED)
        assert all_accepted(llm, prompts, outputs, **COUPLED)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_some_layers(engine: Any, prompts: Any, family: str) -> None:
    """A layer that matters is left out, under preemption and prefix-cache hits. Fails if drafts reach an output, or if
    all layers run."""
    blocks = {"num_gpu_blocks_override": STRESS["num_gpu_blocks_override"] + (22 if family == "gemma3" else 0)}
    model = {**STRESS, **blocks, **arguments(checkpoint(family))}
    expected = generate(engine(**arguments(checkpoint(family))), prompts, [8], max_tokens=NUM_TOKENS)
    llm = engine(skipping([0, *range(2, NUM_LAYERS)]), **model)
    for _ in range(2):  # then from the prefix cache
        assert generate(llm, prompts, [1, 8], max_tokens=NUM_TOKENS) == expected
    metrics = spec_metrics(llm)
    assert 0.02 < metrics["accepted_tokens"] / metrics["draft_tokens"] < 0.95
    assert llm.collective_rpc("specplugins_stats")[0]["faults"] == {}


@on_v1
@pytest.mark.slow
def test_trained_head(engine: Any, prompts: Any, tmp_path: Path) -> None:
    """The model's norm and head as a trained one draft the same. Kills: a head that sees normed states, or those of
    other layers; a head for other layers that is accepted."""
    folder = with_idle_layer("llama", IDLE)
    weights = load_file(folder / "model.safetensors")
    sizes = {"hidden_size": weights["lm_head.weight"].shape[1], "vocab_size": VOCAB_SIZE, "rms_norm_eps": 1e-6}
    config = ExitHeadConfig(exit_layer=len(OTHERS), layers=tuple(OTHERS), **sizes)
    tensors = {"norm.weight": weights["model.norm.weight"], "head.weight": weights["lm_head.weight"]}
    ExitHead(config, tensors).save(tmp_path)
    expected = generate(engine(**arguments(folder)), prompts, [8], max_tokens=NUM_TOKENS)
    assert all_accepted(engine(skipping(OTHERS, exit_head=str(tmp_path)), **arguments(folder)), prompts, expected)
    wrong = skipping([0, 1, 3], exit_head=str(tmp_path))
    with pytest.raises(ConfigError, match=r"exit_head must be a head whose layers is \(0, 1, 3\), not \(0, 2, 3\)"):
        engine_config(wrong, **arguments(folder))


@on_v1
@pytest.mark.slow
def test_as_the_stage_between(engine: Any, prompts: Any) -> None:
    """Two layers check a lookup, and three of four check them. Fails if stages share a cut of the model."""
    expected = generate(engine(**arguments(checkpoint("llama"))), prompts, [8], max_tokens=NUM_TOKENS)
    stages = ({"method": "prompt_lookup"}, *({"method": "early_exit", "layers": layers} for layers in ([0, 2], OTHERS)))
    llm = engine(cascade("verify", stages=stages), **arguments(checkpoint("llama")))
    assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    [stats] = llm.collective_rpc("specplugins_stats")
    counts = [stage["kept"] for stage in stats["stages"].values()]
    assert stats["faults"] == {} and counts[1] > 0 and counts[2] > 0


def drafts_of(llm: Any, prompt: list[int], num_tokens: int, spoils: bool = False) -> tuple[list[int], list[list[int]]]:
    """The answer to a prompt, and each draft after the number of tokens before it; V1 drafts less at the end. If it
    `spoils` drafts, none is accepted, so that each token of the answer has one."""
    steps, draft_steps = list[list[int]](), ModelProposer.draft_steps

    def noted(self: Any, target: Any, num_steps: int, *rest: Any, **more: Any) -> Any:
        drafted = draft_steps(self, target, num_steps, *rest, **more)
        if num_steps and len(target.num_tokens) == 1:
            steps.append([int(target.num_tokens), *drafted.token_ids[0].tolist()])
        if spoils:
            drafted.token_ids ^= 1
        return drafted

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(ModelProposer, "draft_steps", noted)
        [output] = generate(llm, [prompt], [1], max_tokens=num_tokens)
    end = len(prompt) + num_tokens - 3
    return output, [step for step in steps if len(prompt) < step[0] < end]


@pytest.mark.long
def test_chat_model(engine: Any) -> None:
    """22 of 30 layers draft for held-out answers of the chat model: on both runners the tokens that V1 drafted when it
    wrote the file. Fails if a runner drafts another token, or on V1 if fewer than 75 % of all tokens are right."""
    recorded, model = json.loads(CHAT_DRAFTS.read_text()), {"model": str(CHAT_MODEL), "async_scheduling": False}
    prompts = token_rows([PROMPTS], load_tokenizer(str(CHAT_MODEL)), 640)
    heldout = sorted(set(range(len(prompts))) - set(every_nth(len(prompts), 30)))  # not asked by `calibrate --layers`
    config = skipping(recorded["layers"], num_speculative_tokens=3, draft_sample_method="greedy", gate="off")
    llm, right = engine(config, **model, enforce_eager=True), list[bool]()
    for index, (output, drafts) in recorded["answers"].items():
        assert int(index) in heldout and drafts_of(llm, prompts[int(index)], 64) == (output, drafts)
    if RUNNER == "v1":
        for index in heldout:
            output, drafts = drafts_of(llm, prompts[index], 64, spoils=True)
            right += [draft[1] == [*prompts[index], *output][draft[0]] for draft in drafts]
        print(f"{sum(right)} of {len(right)} drafted tokens are right")
        assert sum(right) >= 0.75 * len(right)


@pytest.mark.skipif(RUNNER != "v2", reason="trees are V2's")
def test_tree(engine: Any, prompts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens are accepted as of all layers. Fails if a tree's pass has the KV pages of other layers."""
    model = arguments(with_idle_layer("llama", IDLE))
    expected = generate(engine(**model), prompts, [8], max_tokens=NUM_TOKENS)
    attend_by_reference(monkeypatch)
    counts = []
    for layers in ({"layers": OTHERS}, {"exit_layer": NUM_LAYERS}):
        llm = engine({"method": "early_exit", **layers, "tree": 7, "gate": "off"}, **model)
        outputs, _, accepted = counted(llm, lambda: generate(llm, prompts, [8], max_tokens=NUM_TOKENS))  # noqa: B023
        assert outputs == expected
        counts.append(accepted)
    assert counts[0] == counts[1] > len(prompts)


@pytest.mark.parametrize(
    ("architecture", "allowed"),
    {
        **dict.fromkeys(["LlamaForCausalLM", "MistralForCausalLM", "Qwen3MoeForCausalLM", "Gemma3ForCausalLM"], True),
        **dict.fromkeys(["GptOssForCausalLM", "DeepseekV3ForCausalLM", "Phi3ForCausalLM"], True),
        **dict.fromkeys(["Gemma4ForCausalLM", "HYV3ForCausalLM", "DeepseekV4ForCausalLM", "SolarForCausalLM"], False),
    }.items(),
)
def test_skippable_by_source(architecture: str, allowed: bool) -> None:
    """Fails if a layer is left out that others read, or if a family is refused where none does."""
    from vllm.model_executor.models import ModelRegistry

    assert may_skip(ModelRegistry.models[architecture].module_name) is allowed


def test_refused_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the engine starts, in one sentence. Fails if experts may be counted where some do not run."""
    admission = "vllm_specplugins.engine.target.admission"
    experts = {**arguments(checkpoint("qwen3_moe")), "compilation_config": {"fast_moe_cold_start": True}}
    engine_config(skipping(OTHERS), **experts)  # newer PyTorch does without
    monkeypatch.setattr("vllm.utils.torch_utils.HAS_OPAQUE_TYPE", False)
    engine_config({"method": "early_exit", "exit_layer": 2}, **experts)
    with pytest.raises(ConfigError, match=r"^early_exit: fast_moe_cold_start must be false with layers, not true.*\.$"):
        engine_config(skipping(OTHERS), **experts)
    llama = arguments(checkpoint("llama"))
    with pytest.raises(ConfigError, match=r"^early_exit: layers must be from 0 to 3, the last layer .*, not 4\.$"):
        engine_config(skipping([0, 4]), **llama)
    with pytest.raises(ConfigError, match=r"^early_exit: pipeline_parallel_size must be 1.*, not 2[.:]"):
        engine_config(skipping(OTHERS), **llama, pipeline_parallel_size=2)
    monkeypatch.setattr(f"{admission}.may_skip", lambda module: False)
    with pytest.raises(ConfigError, match=r"^early_exit: remove layers: the model must be one .* LlamaForCausalLM\.$"):
        engine_config(skipping(OTHERS), **llama)
    engine_config(skipping([0, 1]), **llama)  # the first layers
