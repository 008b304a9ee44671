"""Servers with vLLM's defaults for an H100, an A100 and 24 GB, with LoRA and without: each method starts there with the
largest K that the server can carry, or is refused in a sentence of ours. No device, and no engine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import RUNNER

from vllm_specplugins.config import ConfigError
from vllm_specplugins.engine.frontend import scheduling
from vllm_specplugins.parsing import parse_config

pytestmark = pytest.mark.skipif(RUNNER == "v2", reason="the program chooses the runner: V2, as a GPU's vLLM does")
SIZES = {"H100": (1024, 8192), "A100": (256, 2048), "24 GB": (256, 2048)}
MASKS = {"H100": 20, "A100": 31, "24 GB": 23}  # K by one per cent of the device's memory, at a vocabulary of 151,936
WITH_LORA = 7  # 8192 / 1024 - 1, and 2048 / 256 - 1
LONG = ("prompt_lookup", "suffix_lookup", "grammar", "cascade", "documented, no K")
SHORT = {"early_exit": 5, "jump": 5, "remote": 5, "custom": 5, "medusa": 4}
GIVEN = {"K = 31": 31, "documented": 12, "tree": 15, "lookahead": 29}  # the user's, or the size of a tree
TREES = "tree", "lookahead"  # of a model with more context than their attention reads


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    program, folder = Path(__file__).with_name("server_defaults.py"), tmp_path_factory.mktemp("models")
    done = subprocess.run(
        [sys.executable, str(program), str(folder)], capture_output=True, text=True, timeout=600, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line.removeprefix("ROW ")) for line in done.stdout.splitlines() if line.startswith("ROW ")]


def wanted(row: dict[str, Any]) -> int | str:
    """K, or how the sentence of the refusal begins."""
    device, method, lora = row["device"], row["method"], row["lora"]
    if method in GIVEN:
        num_seqs, _ = SIZES[device]
        if not lora or GIVEN[method] <= WITH_LORA:
            return "max_model_len must be at most 4096" if method in TREES else GIVEN[method]
        least = num_seqs * (1 + GIVEN[method])
        return f"max_num_batched_tokens must be at least {least} with enable_lora, max_num_seqs {num_seqs} and"
    if method == "medusa" and lora:
        return "enable_lora must be false"
    return SHORT[method] if method in SHORT else min(MASKS[device], WITH_LORA if lora else 31)


@pytest.mark.slow
def test_each_starts_or_says_why_not(rows: list[dict[str, Any]]) -> None:
    """Fails if vLLM's check of LoRA answers instead of ours, if K is longer than the server can carry or shorter than
    it need be, or if a K of the user's is another one."""
    assert len(rows) == 3 * 2 * 2 * (len(LONG) + len(SHORT) + len(GIVEN))
    for row in rows:
        expected = wanted(row)
        if isinstance(expected, str):
            assert row["refused"] == "ConfigError" and row["why"].partition(": ")[2].startswith(expected), row
        else:
            assert row.get("k") == expected and row["v2"] and (row["seqs"], row["tokens"]) == SIZES[row["device"]], row


LLAMA_3 = SimpleNamespace(get_vocab_size=lambda: 128_256, max_model_len=8192)


def fitting(config: dict[str, Any], gib: float, monkeypatch: pytest.MonkeyPatch, **sizes: Any) -> int:
    server = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, "enable_lora": False, **sizes}
    monkeypatch.setattr(scheduling, "_device_bytes", lambda: int(gib * 2**30))
    return scheduling.fitting_server(parse_config(config), SimpleNamespace(**server), LLAMA_3).length


@pytest.mark.parametrize(
    ("gib", "sizes", "length"),
    [
        (80, {}, 25),
        (200, {}, 31),
        (1, {}, 5),  # never below that
        (0, {}, 31),  # nobody knows the device
        (80, {"enable_lora": True}, 7),
        (80, {"enable_lora": True, "max_num_batched_tokens": 2048}, 1),
        (80, {"max_num_seqs": 64}, 31),
    ],
)
def test_default_length(
    gib: float, sizes: dict[str, Any], length: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails if a limit is not looked at, or if the log does not name both copies of the bitmasks."""
    with caplog.at_level("INFO", "vllm.specplugins"):
        assert fitting({"method": "prompt_lookup"}, gib, monkeypatch, **sizes) == length
    assert len(caplog.messages) == (length < 31)
    for sentence in caplog.messages if not sizes else ():
        assert (
            f"num_speculative_tokens defaults to {length} instead of 31 on this server: for max_num_seqs 1024"
            in sentence
        )
        assert "0.49 GiB on the device and on the host, more than 1% of the device's memory" in sentence


def test_stages_are_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage's K is a limit, below the cascade's; a user's K of the method stays, or is refused."""
    lora = {"enable_lora": True, "max_num_batched_tokens": 4096}
    cascade = {"method": "cascade", "stages": ["prompt_lookup", {"method": "early_exit", "exit_layer": 1}]}
    assert fitting(cascade, 80, monkeypatch, **lora) == 3
    assert fitting({"method": "prompt_lookup", "num_speculative_tokens": 31}, 1, monkeypatch) == 31
    with pytest.raises(ConfigError, match=r"^prompt_lookup: max_num_batched_tokens must be at least 5120 with enable_"):
        fitting({"method": "prompt_lookup", "num_speculative_tokens": 4}, 80, monkeypatch, **lora)
    with pytest.raises(ConfigError, match=r"at least 2048 with enable_lora, max_num_seqs 1024 and 1 draft tokens"):
        fitting({"method": "prompt_lookup"}, 80, monkeypatch, **{**lora, "max_num_batched_tokens": 2047})
