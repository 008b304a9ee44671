"""Exit heads on disk: a folder that was spoilt somewhere is refused with one sentence, or loads as it says."""

import json
import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from rubbish import JSON, TEXTS, check_sentence, dictionary
from safetensors.torch import save
from spoil import spoilt

from vllm_specplugins.config import ConfigError
from vllm_specplugins.proposers.heads.exit_head import ExitHead, ExitHeadConfig
from vllm_specplugins.proposers.heads.trained import CONFIG_FILE

SIZES = {"exit_layer": 2, "hidden_size": 4, "vocab_size": 6}
CONFIG: dict[str, Any] = {**SIZES, "rms_norm_eps": 1e-5}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.bool, torch.float8_e4m3fn]
NAMES = ["norm.weight", "head.weight"]
SHAPES = [(4,), (6, 4), (4, 6), (2, 4), (6, 2), (), (0,), (0, 4), (6, 0), (1,) * 20]

configs = dictionary({name: st.just(value) for name, value in CONFIG.items()}).map(lambda found: {**CONFIG, **found})


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """A head's, mostly; sometimes of another shape, dtype or name."""
    whole = ExitHead(ExitHeadConfig(**CONFIG)).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
    if draw(st.booleans()):
        shapes = shapes | draw(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(SHAPES), max_size=2))
    dtype = draw(st.sampled_from(DTYPES))
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


@st.composite
def folders(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """The bytes of both files."""
    text = json.dumps(draw(configs | JSON)).encode()
    weights = save(draw(tensors()))
    if draw(st.booleans()):
        header = json.loads(weights[8 : 8 + struct.unpack("<Q", weights[:8])[0]])
        header[draw(st.sampled_from(NAMES) | TEXTS)] = draw(JSON)
        encoded = json.dumps(header).encode()
        weights = struct.pack("<Q", len(encoded)) + encoded + weights[-64:]
    return draw(spoilt(text)), draw(spoilt(weights))


@given(folders())
@example((b"[" * 200_000, b""))
@example((json.dumps(CONFIG | {"rms_norm_eps": float("nan")}).encode(), b""))
@example((json.dumps(CONFIG | {"vocab_size": 10**4299}).encode(), save({"norm.weight": torch.zeros(4)})))
@example((json.dumps(CONFIG).encode(), struct.pack("<Q", 200_000) + b"[" * 200_000))
@example((json.dumps(CONFIG).encode(), save({"norm.weight": torch.zeros((1,) * 200)})))
def test_loads_or_is_refused(files: tuple[bytes, bytes]) -> None:
    """Kills: a check that looks at names and forgets shapes or dtypes; a traceback of json's or safetensors'."""
    with TemporaryDirectory() as folder:
        (Path(folder) / CONFIG_FILE).write_bytes(files[0])
        (Path(folder) / ExitHead.file).write_bytes(files[1])
        try:
            ExitHead.check(folder, **SIZES)
        except ConfigError as error:
            check_sentence(error)
            return
        head = ExitHead.load(folder)
    assert all(tensor.dtype == torch.float32 for tensor in head.state_dict().values())
    assert head.logits(torch.ones(3, 4)).shape == (3, 6)
    assert 0 <= head.config.rms_norm_eps < float("inf")
