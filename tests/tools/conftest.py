"""A tiny Llama with the demo model's tokenizer, text for it, and engines that are made up."""

import json
import os
import random
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo" / "model"
WORDS = ["alpha", "beta", "gamma", "delta", "river", "stone", "window", "table", "return", "import"]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """More only wait for each other in a model this small; and the weights of two runs must be the same bits."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 layers, of which the later ones change what the first leaves: its exit is bad until a head is trained."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=3072, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(50)
        model.lm_head.weight.mul_(50)
        for layer in model.model.layers[1:]:
            layer.mlp.down_proj.weight.mul_(200)
        model.model.norm.weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    return folder


class MadeUpEngine:
    """In place of those that `bench` and `calibrate` start (harness/serving.py)."""

    dtype: ClassVar[str] = "float32"
    configs: ClassVar[list[Any]]  # of all that were started
    asked: ClassVar[dict[str, list[Any]]]  # the traffic of each

    def __init__(self, name: str, arguments: dict[str, Any], config: Any, log: Path, forced: Any = None):
        self.name, self.model, self.config, self.round = name, Path(arguments["model"]), config, 0
        self.configs.append(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def receive(self) -> Any:
        from vllm_specplugins.engine.harness.traffic import Machine

        return Machine("a made-up machine", self.dtype, "V1")

    def send(self, traffic: Any) -> None:
        self.traffic, self.num_tokens = traffic, 0
        self.round += 1
        self.asked[self.name].append(traffic)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """made_up(ask, **attributes): commands start engines of the class that is returned, which answer so; whatever is
    told of the machine's memory, there is enough."""
    from vllm_specplugins.tools.bench import command

    def made_up(ask: Callable[[Any, object], Any], **attributes: Any) -> Any:
        own = {"ask": ask, "configs": [], "asked": defaultdict(list), **attributes}
        monkeypatch.setattr(command, "serving_engine", made := type("Engine", (MadeUpEngine,), own))
        return made

    enough = SimpleNamespace(available=64 << 30, total=64 << 30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: enough)
    return made_up


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refused(arguments): the one sentence with which the command line refuses these, after the command's name."""
    from vllm_specplugins.__main__ import main

    def refused(*arguments: object) -> str:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = int(stop.code or 0)
        name, _, error = capsys.readouterr().err.partition(": ")
        assert name in ("vllm-specplugins", *(f"vllm-specplugins {word}" for word in arguments[:1]))
        assert status == 2 and error.startswith("error: ") and error.endswith(".\n") and error.count("\n") == 1
        return error

    return refused


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of 32 random tokens."""
    file, rng = tmp_path_factory.mktemp("prompts") / "made.jsonl", random.Random(0)
    rows = [{"prompt": rng.choices(range(3, 3072), k=32)} for _ in range(64)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="session")
def text_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two files of random words."""
    folder, rng = tmp_path_factory.mktemp("text"), random.Random(0)
    files = [folder / "one.txt", folder / "two.txt"]
    for file in files:
        file.write_text(" ".join(rng.choices(WORDS, k=1500)))
    return files
