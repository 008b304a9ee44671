"""A target that sees: prompts with and without an image, whose tokens have positions of three parts.

vLLM imports torchvision for it, which the environment for CPUs lacks.
"""

import random
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from conftest import INTERPRETED
from scripted import CONFIG as SCRIPTED

from vllm_specplugins.config import ConfigError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM needs torchvision for this model"),
]
WITHOUT_TAPES = "what draws the line here is the host"
NUM_TOKENS = 12 if INTERPRETED else 24
NUM_PROMPTS = 4


def start(engine: Any, config: dict[str, Any] | None) -> Any:
    from multimodal import vision_checkpoint

    return engine(config, model=str(vision_checkpoint()), limit_mm_per_prompt={"image": 1, "video": 0})


def prompts() -> list[dict[str, Any]]:
    """The same text without an image, and with several."""
    from multimodal import IMAGE, VISION_END, VISION_START
    from PIL import Image

    rng = random.Random(0)
    text = [rng.randrange(IMAGE) for _ in range(20)]
    made: list[dict[str, Any]] = [{"prompt_token_ids": text}]
    for seed, shape in enumerate([(56, 84, 3), (56, 84, 3), (28, 112, 3)]):
        pixels = np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)
        token_ids = [*text[:7], VISION_START, IMAGE, VISION_END, *text[7:]]
        made.append({"prompt_token_ids": token_ids, "multi_modal_data": {"image": Image.fromarray(pixels)}})
    return made


def generate(llm: Any, extra_args: list[dict[str, Any]]) -> list[Any]:
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, extra_args=extra) for extra in extra_args
    ]
    return list(llm.generate(prompts(), params, use_tqdm=False))


def test_identity(engine: Any) -> None:
    """Drafts of which two in three tokens are right, behind texts and images. Fails if verified rows have the positions
    of another row, or a text's in place of an image's."""
    plain = generate(start(engine, None), [{}] * NUM_PROMPTS)
    outputs = [list(output.outputs[0].token_ids) for output in plain]
    assert len({tuple(output) for output in outputs}) == NUM_PROMPTS, "the images matter"
    options = [
        {"specplugins": {"script": output, "num_prompt_tokens": len(result.prompt_token_ids), "depth": 5}}
        for result, output in zip(plain, outputs, strict=True)
    ]
    llm = start(engine, SCRIPTED)
    assert [list(output.outputs[0].token_ids) for output in generate(llm, options)] == outputs
    [stats] = llm.collective_rpc("specplugins_stats")
    assert stats["faults"] == {} and NUM_TOKENS < stats["accepted_tokens"] < stats["drafted_tokens"]


def test_exits_are_refused(engine: Any) -> None:
    """Fails if a model whose positions an exit does not know is drafted for by one."""
    with pytest.raises(ConfigError, match=r"model must be a text-only decoder .* not a multimodal model"):
        start(engine, {"method": "early_exit", "exit_layer": 2, "num_speculative_tokens": 4})
