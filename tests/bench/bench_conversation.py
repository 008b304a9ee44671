"""Conversations of 8 turns with tool outputs, through the real server: what suffix_lookup gains from turn to turn.

    python tests/bench/bench_conversation.py [--conversations 6] [--turns 8] [--max-tokens 64] [--num-draft 8]

A tool shows the next lines of a file of the standard library and the log of its tests; the model, which is the demo
model, goes on with the file. What it said stays in the conversation. Each conversation is a tenant of its own, so that
none learns from another. By turn: tokens a step, accepted and drafted tokens, from the server's counters; the outputs
are compared with those of a server without speculation. It returns 1 where outputs differ, or the last turn has no more
tokens a step than the first.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_specplugins.tools.bench.library import library_files

MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo" / "model"
LINES = 10  # of the file that a turn shows
COUNTERS = ("generation_tokens", "spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens")


@contextmanager
def server(config: dict[str, Any] | None) -> Iterator[str]:
    """The address of a server that has come up."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "demo", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "4096"]
    if config is not None:
        command += ["--speculative-config", json.dumps(config)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                get(f"{address}/health")
                break
            except (urllib.error.URLError, ConnectionError):
                assert process.poll() is None, "the server did not come up"
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def get(url: str, asked: Any = None) -> str:
    data = None if asked is None else json.dumps(asked).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        text: str = answer.read().decode()
    return text


def counters(address: str) -> list[float]:
    lines = get(f"{address}/metrics").splitlines()
    return [
        sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}_total"))
        for name in COUNTERS
    ]


def tool_outputs(path: str, text: str, num_turns: int) -> Iterator[str]:
    """What tools say in each turn: lines of the file, and the log of its tests."""
    lines = text.splitlines()
    for turn in range(num_turns):
        shown = "\n".join(lines[turn * LINES : (turn + 1) * LINES])
        log = f"{path}: {turn + 1} of {num_turns} parts read, tests ... ok"
        yield f'\nTool: read_file {{"path": "{path}", "start": {turn * LINES + 1}, "lines": {LINES}}}\n{log}\n{shown}\n'


def converse(address: str, number: int, args: argparse.Namespace) -> tuple[list[str], list[list[float]]]:
    """A conversation's answers, and what the counters counted in each turn."""
    files = [(path, text) for path, text in library_files() if len(text.splitlines()) > (args.turns + 2) * LINES]
    path, text = files[(7 * number) % len(files)]
    said, answers, counts = f"User: Go on with {path}, part by part.\n", [], []
    for output in tool_outputs(path, text, args.turns):
        said += output
        before = counters(address)
        asked = {"model": "demo", "prompt": said, "max_tokens": args.max_tokens, "temperature": 0}
        answer = json.loads(get(f"{address}/v1/completions", {**asked, "cache_salt": f"conversation {number}"}))
        counts.append([after - count for after, count in zip(counters(address), before, strict=True)])
        answers.append(answer["choices"][0]["text"])
        said += answers[-1]
    return answers, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("conversations", 6), ("turns", 8), ("max-tokens", 64), ("num-draft", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", NO_PROXY="127.0.0.1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    played = []
    for config in (None, {"method": "suffix_lookup", "num_speculative_tokens": args.num_draft}):
        with server(config) as address:
            played.append([converse(address, number, args) for number in range(args.conversations)])
    plain, drafted = played
    same = [mine[0] == theirs[0] for mine, theirs in zip(drafted, plain, strict=True)]
    table = Table("turn", "tokens a step", "accepted", "drafted", title=f"{sum(same)} of {len(same)} the same")
    steps = []
    for turn, of_turn in enumerate(zip(*(counts for _, counts in drafted), strict=True), 1):
        generated, accepted, tried = map(sum, zip(*of_turn, strict=True))
        steps.append(generated / (generated - accepted))
        table.add_row(str(turn), f"{steps[-1]:.2f}", f"{accepted:.0f} of {generated:.0f}", f"{tried:.0f}")
    Console().print(table)
    return 0 if all(same) and steps[-1] > steps[0] else 1


if __name__ == "__main__":
    sys.exit(main())
