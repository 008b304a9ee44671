"""Early exit: the handle on the target's layers over its paged KV cache, on both runners."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import NUM_TOKENS, PROMPT_LOOKUP, early_exit, generate
from conftest import DEMO_MODEL, NUM_LAYERS, RUNNER, spec_metrics
from families import checkpoint
from parts import with_embeddings, write_head
from recorded import runner
from safetensors.torch import load_file
from torch import nn
from transformers import GPT2Config, JambaConfig, Lfm2Config, Mamba2Config, MambaConfig, OPTConfig

from vllm_specplugins.config import ConfigError
from vllm_specplugins.engine.frontend import spec_config
from vllm_specplugins.engine.target.admission import check_target
from vllm_specplugins.engine.target.layers import Cut, FirstLayers
from vllm_specplugins.engine.target.model_source import may_be_cut
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.proposers.heads.exit_head import ExitHead, ExitHeadConfig

FEW_LAYERS = NUM_LAYERS // 2


def engine_config(speculative_config: Any, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    defaults = {"model": str(DEMO_MODEL), "max_model_len": 512, "enforce_eager": True}
    return EngineArgs(**{**defaults, **arguments}, speculative_config=speculative_config).create_engine_config()


def own_head(folder: Path, layer: int, **other: int) -> Path:
    """The model's own norm and head as a trained exit head, or one of other sizes."""
    weights = load_file(DEMO_MODEL / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    sizes = {"exit_layer": layer, "hidden_size": embedding.shape[1], "vocab_size": len(embedding), **other}
    config = ExitHeadConfig(rms_norm_eps=1e-5, **sizes)
    tensors = {"norm.weight": weights["model.norm.weight"], "head.weight": embedding}
    if other:
        tensors = {name: torch.zeros(like.shape) for name, like in ExitHead(config).state_dict().items()}
    ExitHead(config, tensors).save(folder)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(RUNNER == "v2", reason="the same code")
def test_exit_head(engine: Any, prompts: Any, expected: Any, tmp_path: Path) -> None:
    """The model's norm and head as a trained head give the same drafts. Fails if a head reads normed states."""

    def counted(**head: str) -> dict[str, float]:
        llm = engine({**early_exit(FEW_LAYERS), **head})
        before = spec_metrics(llm)
        assert generate(llm, prompts[:8], [8], max_tokens=NUM_TOKENS) == expected[:8]
        return {name: value - before[name] for name, value in spec_metrics(llm).items()}

    assert counted() == counted(exit_head=str(own_head(tmp_path, FEW_LAYERS)))


@pytest.mark.slow
@pytest.mark.skipif(RUNNER == "v2", reason="the same code")
def test_one_pass(engine: Any, prompts: Any, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of one pass are those that the exit says behind a text that ends in the embeddings; one pass a step. Fails
    if the layers run once for each token, or if states are handed to code that was compiled for tokens.
    """
    llm = engine(with_embeddings(tmp_path, NUM_LAYERS // 2, 4))
    layers, lengths = runner(llm).drafter.adapter.first_layers, []
    monkeypatch.setitem(
        layers._run, Cut(tuple(range(NUM_LAYERS // 2)), True), lambda token_ids, positions, tensors: None
    )
    of_states = FirstLayers.of_states

    def counted(self: Any, first: int, end: int, states: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        lengths.append(len(states))
        return of_states(self, first, end, states, *rest, **named)

    monkeypatch.setattr(FirstLayers, "of_states", counted)
    before = llm.collective_rpc("specplugins_stats")[0]["request_steps"]
    assert generate(llm, prompts[:4], [1], max_tokens=NUM_TOKENS) == expected[:4]
    steps = llm.collective_rpc("specplugins_stats")[0]["request_steps"] - before
    assert 0 <= steps - len(lengths) <= 4 and max(lengths) == 4


@pytest.mark.parametrize(
    ("field", "family"), [("pipeline_parallel_size", "llama"), ("data_parallel_size", "qwen3_moe")]
)
def test_refused_engines(field: str, family: str) -> None:
    """Fails if engines of experts, which run each layer together, may draft at different times."""
    with pytest.raises(ConfigError, match=rf"^early_exit: {field} must be .*, not 2[.:]"):
        engine_config(early_exit(FEW_LAYERS), model=str(checkpoint(family)), skip_tokenizer_init=True, **{field: 2})


@pytest.mark.parametrize("size", [1, 2])
def test_engines_of_experts_draft_alike(size: int) -> None:
    """By a lookup. Fails if each of several chooses its K: they run each layer together, and would wait for ever."""
    experts = {"model": str(checkpoint("qwen3_moe")), "skip_tokenizer_init": True}
    gated = {"method": "prompt_lookup"}
    plan = engine_config(gated, **experts, data_parallel_size=size).speculative_config.plan
    assert plan.scheduler_chooses is (RUNNER == "v2" and size == 1)


def test_engines_of_a_dense_model() -> None:
    """Fails if they are refused: they know nothing of each other."""
    config = engine_config(early_exit(FEW_LAYERS), data_parallel_size=2)
    assert config.speculative_config.runs_target


@pytest.mark.parametrize(
    ("config", "kind"),
    [(MambaConfig(), "mamba1"), (JambaConfig(), "mamba1"), (Mamba2Config(), None), (Lfm2Config(), None)],
    ids=["state-space", "hybrid", "state-space-2", "convolution"],
)
def test_refused_targets(tmp_path: Path, config: Any, kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models whose layers cannot be run alone, before any weight is loaded; all methods on a CPU, where vLLM 0.32
    says something else of Mamba 2 and of LFM 2 as soon as anything is drafted, by its own n-grams, too; and on any
    device those whose state vLLM does not wind back. Fails if prompt lookup is refused others there."""
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(tmp_path)
    arguments = {"model": str(tmp_path), "skip_tokenizer_init": True}
    for spec in (early_exit(1), PROMPT_LOOKUP):
        with pytest.raises(ConfigError, match=rf"^{spec['method']}: model must have attention .* on a CPU.*\.$"):
            engine_config(spec, **arguments)
    platform = type("Other", (), {"is_cpu": lambda self: False})()
    monkeypatch.setattr(spec_config, "current_platform", platform)
    if kind:
        with pytest.raises(ConfigError, match=rf"^prompt_lookup: model must have no states of kind {kind},.*\.$"):
            engine_config(PROMPT_LOOKUP, **arguments)
        return
    with pytest.raises(ConfigError, match=r"^early_exit: model must be a text-only decoder .*hybrid.*\.$"):
        engine_config(early_exit(1), **arguments)
    engine_config(PROMPT_LOOKUP, **arguments)


@pytest.mark.parametrize(
    ("config", "name"), [(GPT2Config(), "GPT2LMHeadModel"), (OPTConfig(), "OPTForCausalLM")], ids=["gpt2", "opt"]
)
def test_refused_bodies(tmp_path: Path, config: Any, name: str) -> None:
    """Models whose body has its layers elsewhere, before any weight is loaded."""
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"^early_exit: model must be a decoder whose body .*, not {name}\.$"):
        engine_config(early_exit(1), model=str(tmp_path), skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("architecture", "cuttable"),
    {
        **dict.fromkeys(["LlamaForCausalLM", "MistralForCausalLM", "Qwen3MoeForCausalLM", "Gemma2ForCausalLM"], True),
        **dict.fromkeys(["DeepseekV3ForCausalLM", "GptOssForCausalLM", "DeepseekV32ForCausalLM"], True),
        **dict.fromkeys(["FalconForCausalLM", "BloomForCausalLM", "TransformersForCausalLM"], False),
        **dict.fromkeys(["Gemma3nForCausalLM", "Plamo3ForCausalLM", "NemotronHForCausalLM"], False),
    }.items(),
)
def test_cuttable_by_source(architecture: str, cuttable: bool) -> None:
    """Kills: a base class in another module, or a package's own files, that are not looked at; any `end_layer`."""
    from vllm.model_executor.models import ModelRegistry

    assert may_be_cut(ModelRegistry.models[architecture].module_name) is cuttable
    assert may_be_cut("somebody.elses.model"), "the worker decides"


def test_refused_by_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    """For a model class of the user, the log has one sentence before vLLM's tracebacks."""
    with pytest.raises(ConfigError, match=r"^early_exit: model must be .*, not Linear\.$") as refusal:
        FirstLayers(nn.Linear(1, 1), parse_config({"method": "early_exit"}))
    assert [record.message for record in caplog.records] == [f"The engine stops: {refusal.value}"]


@pytest.mark.parametrize("has_residual", [False, True])
def test_without_norm(has_residual: bool) -> None:
    """What an exit head with a norm of its own gets, of families whose norms take the residual or do not."""

    class Body(nn.Module):
        start_layer, end_layer = 0, 2

        def __init__(self) -> None:
            super().__init__()
            self.layers = [lambda states: states + 1] * 2
            self.norm = nn.LayerNorm(3)

        def forward(self, token_ids: Any, positions: Any, tensors: Any) -> Any:
            states = token_ids.float()
            for layer in self.layers[self.start_layer : self.end_layer]:
                states = layer(states)
            return self.norm(states, states)[0] if has_residual else self.norm(states)

    target = nn.Module()
    target.model = Body()
    tokens = torch.tensor([[3, 4, 5]])
    expected = (tokens + 1.0) * (2 if has_residual else 1)
    assert torch.equal(
        FirstLayers(target, parse_config({"method": "early_exit"}))(1, tokens, tokens, normed=False), expected
    )


def test_refused_multimodal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real ones need torchvision even to be configured."""
    config = engine_config(early_exit(1))
    monkeypatch.setattr(type(config.model_config), "is_multimodal_model", True)
    with pytest.raises(ConfigError, match=r"^early_exit: model must be .*, not a multimodal model\.$"):
        check_target(config, config.speculative_config.plugin_config)


def jump_of(folder: Path, **head: int) -> dict[str, Any]:
    return write_head(folder, **{"early_layers": 0, "late_layer": 1, "scale": 0.0, **head})  # type: ignore[arg-type]


def look_ahead_of(folder: Path, **embeddings: int) -> dict[str, Any]:
    return with_embeddings(folder, 1, 4, **embeddings)


def exit_of(folder: Path, **head: int) -> dict[str, Any]:
    return {**early_exit(1), "exit_head": str(own_head(folder, 1, **head))}


@pytest.mark.parametrize(
    ("made", "other", "words"),
    [
        (exit_of, {"exit_layer": 2}, "a head whose exit_layer is 1, not 2"),
        (exit_of, {"hidden_size": 128}, "a head whose hidden_size is 256, not 128"),
        (exit_of, {"vocab_size": 99}, "a head whose vocab_size is 3072, not 99"),
        (lambda _: {**early_exit(1), "exit_head": "/nowhere"}, {}, "a folder with the config.json of a head, not"),
        (jump_of, {"num_layers": NUM_LAYERS + 1}, f"a head whose num_layers is {NUM_LAYERS}, not {NUM_LAYERS + 1}"),
        (jump_of, {"hidden_size": 128}, "a head whose hidden_size is 256, not 128"),
        (jump_of, {"late_layer": NUM_LAYERS + 1}, f"a head whose late_layer is from early_layers to {NUM_LAYERS}, not"),
        (jump_of, {"early_layers": NUM_LAYERS}, "a head whose late_layer is from early_layers to"),
        (look_ahead_of, {"num_embeddings": 2}, "a set of embeddings of at least 3, one less than num_speculative_"),
        (look_ahead_of, {"hidden_size": 128}, "a set of embeddings whose hidden_size is 256, not 128"),
        (look_ahead_of, {"exit_layer": 2}, "a set of embeddings whose exit_layer is 1, not 2"),
    ],
)
def test_refused_parts(made: Any, other: dict[str, int], words: str, tmp_path: Path) -> None:
    """Before the engine starts, in one sentence. Fails if a size is not compared."""
    with pytest.raises(ConfigError, match=rf"^(jump|early_exit): \w+ must be {words}[^\n]*\.$"):
        engine_config(made(tmp_path, **other))


def memory(llm: Any) -> dict[str, Any]:
    """What an engine keeps: blocks, KV cache and weights in bytes."""
    own = runner(llm)
    caches = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in own.kv_caches}
    return {
        "blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        "cache": sum(caches.values()),
        "weights": sum(weight.nbytes for weight in own.get_model().parameters()),
    }


def test_memory_and_lookahead_slots(engine: Any) -> None:
    """Drafting uses only the target's cache and weights, and K slots after the last token are reserved for drafts."""
    plain = memory(engine())
    llm = engine(early_exit(FEW_LAYERS))
    assert memory(llm) == plain
    config = llm.llm_engine.vllm_config
    assert config.num_lookahead_tokens == config.num_speculative_tokens == 4


@pytest.mark.parametrize("layer", [0, -1, NUM_LAYERS + 1, "2", 10**9, None, 1.0, True])
def test_bad_layers(layer: Any) -> None:
    with pytest.raises(ConfigError, match=r"^early_exit: exit_layer must be an integer from 1 to .*, not .*\.$"):
        engine_config(early_exit(layer))
