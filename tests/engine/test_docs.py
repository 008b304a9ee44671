"""The code blocks of README and docs, run as a user would; test_verify_lossless.py runs the proposer of
write-a-proposer.md against an engine."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import forked
import pytest
from conftest import ALL, DEMO_MODEL, RUNNER
from doc_blocks import PAGES, ROOT, Folder, blocks, check, check_data
from openai_server import served

pytestmark = [pytest.mark.slow, pytest.mark.skipif(RUNNER == "v2", reason="a user types the same on both runners")]
PROPOSER = ROOT / "docs" / "write-a-proposer.md"
NAME = "Qwen/Qwen3-8B"  # the demo model serves under this name
SERVED_BY = {"structured-output.md": "structured-output.md"}  # of the two servers; else getting-started.md's
# Commands that run, and what shortens those that run with SPECPLUGINS_TESTS=all alone.
RUN: dict[str, list[str]] = {"doctor": [], "check": [], "build-store": [], "replay": ["--requests", "2"]}
LONG = {
    "verify-lossless": ["--samples", "200"],
    "train-jump": ["--steps", "2", "--batch-tokens", "256", "--row-tokens", "64"],
    "train-exit-head": ["--steps", "2", "--batch-tokens", "256", "--row-tokens", "64", "--exit-layer", "1"],
    "bench": ["--rounds", "1", "--num-prompts", "1", "--output-len", "8"],
    "calibrate": ["--rounds", "1", "--num-prompts", "1", "--output-len", "16", "--prompt-tokens", "32"],
}
LOG = ["--methods", "prompt_lookup", "--max-concurrency", "1", "--rate", "0.9"]  # ngram_gpu needs a GPU


@pytest.fixture(scope="module")
def server() -> Iterator[Callable[[str], str]]:
    """server(page): host and port of the server that the page's requests go to."""
    with ExitStack() as stack:
        started: dict[str, str] = {}

        def address(page: str) -> str:
            name = SERVED_BY.get(page, "getting-started.md")
            if name not in started:
                [*_, code] = [block.code for block in blocks(ROOT / "docs" / name) if "vllm serve" in block.code]
                options = re.search(r"--speculative-config.*", code.replace("\\\n", " "), re.DOTALL)[0]
                words = subprocess.run(
                    ["bash", "-c", f"printf '%s\\0' {options}"], capture_output=True, text=True, check=True
                ).stdout.split("\0")[:-1]
                client = stack.enter_context(served(Path(DEMO_MODEL), *words, "--served-model-name", NAME))
                started[name] = f"{client.base_url.host}:{client.base_url.port}"
            return started[name]

        yield address


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks(page: Path, server: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a block with an option, a field, a file or a request that does not exist; a command that fails."""
    listed = blocks(page)
    asks = any("curl" in block.code for block in listed)
    folder = Folder(tmp_path, Path(DEMO_MODEL), server(page.name) if asks else "127.0.0.1:9")
    files(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("REDIS_URL", "redis://localhost:6379")  # the secret of a recipe
    for block in listed:
        if block.language != "bash":
            check_data(block)
            continue
        output, commands = folder.run(block.code)
        for command in commands:
            check(command)
            if command[0] == "curl" and "/metrics" not in " ".join(command):
                assert answers(output), output
            if command[0] == "vllm-specplugins":
                run(command[1:], tmp_path)


def answers(output: str) -> bool:
    """Whether curl's output begins with the text of an answer, or a tool call."""
    answer, _ = json.JSONDecoder().raw_decode(output[output.index("{") :])
    [choice] = answer["choices"]
    message = choice.get("message", {})
    return bool(choice.get("text") or message.get("content") or message.get("tool_calls"))


def files(folder: Path) -> None:
    """The files that commands name."""
    [proposer, *_] = [block.code for block in blocks(PROPOSER) if block.language == "python"]
    (folder / "my_proposer.py").write_text(proposer)
    rows = [{"prompt": "def area(w, h):\n", "output": "    return w * h\n" * 8} for _ in range(8)]
    (folder / "FILES").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = [{"prompt": list(range(40, 72)), "output": list(range(index, index + 8))} for index in range(40, 44)]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    (folder / "LEARNED").symlink_to("JUMP")


def run(words: list[str], folder: Path) -> None:
    """Runs a command of ours as it is printed, with the demo model."""
    command = words[0]
    if command not in RUN and not (ALL and command in LONG):
        return
    words = [DEMO_MODEL if word in (NAME, "MODEL") else word for word in words]
    arguments = ["-m", "vllm_specplugins", *words, *LONG.get(command, [])]
    arguments += LOG * ("--trace" in words)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = forked.run(arguments, environment, folder)
    assert done.returncode == 0, f"{words}: {done.stdout[-1500:]}{done.stderr[-1500:]}"


def test_the_readmes_example(tmp_path: Path) -> None:
    """As it is printed, in a file; only the model has a name, and nothing is compiled, which takes minutes. Kills: an
    example that fails where vLLM starts processes that read the file again, or has no statistics.
    """
    [code] = [block.code for block in blocks(ROOT / "README.md") if block.language == "python"]
    assert code.count('"MODEL"') == 1
    [stats] = ast.literal_eval(program(tmp_path, code.replace('"MODEL"', repr(str(DEMO_MODEL)))))
    assert sum(stats["draft_lengths"]) > 0 and stats["faults"] == {}  # the demo model ends with its first token


@pytest.mark.long
def test_the_stores_calls(tmp_path: Path) -> None:
    """Kills: a call of docs/methods/suffix_lookup.md that an engine does not take."""
    page = ROOT / "docs" / "methods" / "suffix_lookup.md"
    [code] = [block.code for block in blocks(page) if block.language == "python"]
    config = {"method": "suffix_lookup", "store_path": str(tmp_path / "store.bin")}
    llm = f"llm = LLM({str(DEMO_MODEL)!r}, speculative_config={config})"
    begin = f"from vllm import LLM\nif __name__ == '__main__':\n    {llm}\n"
    [stats] = ast.literal_eval(program(tmp_path, begin + re.sub("^", "    ", code, flags=re.MULTILINE)))
    assert stats["0 suffix_lookup"]["bytes"] > 0


def program(folder: Path, code: str) -> Any:
    """The line with a list of dictionaries that a program prints."""
    (folder / "example.py").write_text(code)
    environment = {name: text for name, text in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    eager = {"TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}
    command = [sys.executable, str(folder / "example.py")]
    done = subprocess.run(command, capture_output=True, text=True, env={**environment, **eager})
    assert done.returncode == 0, done.stderr[-2000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    return line
