"""Doors that few use: two API servers before one engine, which both split streams, /inference/v1/generate with salts,
run-batch, and a metrics port that is read ten times a second; by hand.

    python tests/soak/doors.py [--requests 300] [--only server]

Texts must be those that the same server answers with drafting off, no salt may draft from another one's texts, and the
engine must live. Ends with status 1 if there is a problem.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from server import ENVIRONMENT, HERE, MODEL, Server

FOLDER = HERE.parents[1] / ".cache" / "doors"
CONFIG = {"method": "suffix_lookup", "num_speculative_tokens": 8, "gate": "off"}
OFF = {"specplugins": {"enabled": False}}
SALTS = ("a", "b", "c" * 200, "_v2_", "", None)
SCRAPES = 10  # a second
ROUND = 24  # requests of a round with scrapes, and of one without
AT_A_TIME = 8
SPLIT = "xLAMToolParser parses streams token by token"  # which each API server logs


async def posted(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    async with session.post(url, json=body) as answer:
        return await answer.json() if answer.status == 200 else (answer.status, (await answer.text())[:200])


def generated(answer: Any) -> Any:
    return answer["choices"][0]["token_ids"] if isinstance(answer, dict) else answer


class Doors:
    def __init__(self, server: Server, port: int, session: aiohttp.ClientSession):
        self.server, self.port, self.session = server, port, session
        self.problems, self.places = list[str](), asyncio.Semaphore(AT_A_TIME)

    async def generate(self, prompt: list[int], salt: str | None, extra: dict[str, Any], tokens: int = 24) -> Any:
        params = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "extra_args": extra}
        body: dict[str, Any] = {"model": "demo", "token_ids": prompt, "sampling_params": params}
        if salt is not None:
            body["cache_salt"] = salt
        async with self.places:
            return generated(await posted(self.session, f"{self.server.url}/inference/v1/generate", body))

    async def texts(self, num_requests: int) -> None:
        """Each prompt with each salt, some twice; and without drafts."""
        prompts = [[7 + number % 40, 20, 7 + number % 40, 21 + number % 13] * 3 for number in range(num_requests)]
        unique = {json.dumps(prompt): prompt for prompt in prompts}
        right = dict(
            zip(unique, await asyncio.gather(*(self.generate(p, None, OFF) for p in unique.values())), strict=True)
        )
        asked = [self.generate(prompt, SALTS[at % len(SALTS)], {}) for at, prompt in enumerate(prompts)]
        for prompt, found in zip(prompts, await asyncio.gather(*asked), strict=True):
            if found != right[json.dumps(prompt)] and not (isinstance(found, tuple) and found[0] == 400):
                self.problems.append(f"{found} instead of {right[json.dumps(prompt)]}")
        print(f"{num_requests} generations: {len(self.problems)} problems", flush=True)

    async def scrapes(self, rounds: int) -> None:
        """CPU seconds of the server per round, with and without a reader of the port, one after the other."""
        spent: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * rounds):
            reading = asyncio.create_task(self._read()) if number % 2 else None
            before, began = self._cpu(), time.monotonic()
            await asyncio.gather(*(self.generate([9, 8, 7, at], None, {}, 60) for at in range(ROUND)))
            spent[bool(number % 2)].append(self._cpu() - before)
            if reading is not None:
                reading.cancel()
                print(f"{self.read} scrapes in {time.monotonic() - began:.1f} s", flush=True)
        plain, read = (sorted(spent[key])[rounds // 2] for key in (False, True))
        print(f"CPU seconds of {ROUND} x 60 tokens: {plain:.2f} without scrapes, {read:.2f} with", flush=True)

    async def _read(self) -> None:
        self.read = 0
        while True:
            async with self.session.get(f"http://127.0.0.1:{self.port}/metrics") as answer:
                self.read += bool(await answer.read())
            await asyncio.sleep(1 / SCRAPES)

    def _cpu(self) -> float:
        times = [process.cpu_times() for process in self.server.processes()]
        return float(sum(each.user + each.system for each in times))


def run_batch(config: dict[str, Any]) -> list[str]:
    """vLLM's run-batch, with options in the lines: some valid, some not."""
    options: list[Any] = [None, {"max_draft": 2}, {"enabled": False}, {"max_draft": -1}, {"tenant": "b"}, "x"]
    with tempfile.TemporaryDirectory() as folder:
        wanted, answered = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        messages = [{"role": "user", "content": "def f(x):"}]
        plain = {"model": "demo", "messages": messages, "max_tokens": 12, "temperature": 0}
        bodies = [{**plain, **({"vllm_xargs": {"specplugins": json.dumps(it)}} if it else {})} for it in options]
        lines = [
            {"custom_id": str(at), "method": "POST", "url": "/v1/chat/completions", "body": body}
            for at, body in enumerate(bodies)
        ]
        wanted.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        command = [sys.executable, "-m", "vllm.entrypoints.openai.run_batch", "-i", str(wanted), "-o", str(answered)]
        command += ["--model", str(MODEL), "--served-model-name", "demo", "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", "512", "--speculative-config", json.dumps(config)]
        command += ["--chat-template", "{{ messages[0].content }}"]
        ran = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=900)
        if ran.returncode or not answered.exists():
            return [f"run-batch ended with {ran.returncode}: {ran.stderr[-400:]}"]
        found = {line["custom_id"]: line for line in map(json.loads, answered.read_text().splitlines())}
    texts = [found[str(at)]["response"]["body"]["choices"][0]["message"]["content"] for at in range(3)]
    refused = [found[str(at)]["error"] or found[str(at)]["response"]["status_code"] for at in range(3, len(options))]
    print(f"run-batch: {texts[0]!r}, refused: {refused}", flush=True)
    return [] if len(set(texts)) == 1 and texts[0] else [f"run-batch: {texts}"]


async def run(num_requests: int) -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ["VLLM_SPECPLUGINS_METRICS_PORT"] = str(port)
    log = FOLDER / "doors.log"
    log.unlink(missing_ok=True)
    server = Server(CONFIG, log)
    server.command[1:3] = ["-m", "vllm.entrypoints.cli.main", "serve"]  # the other program starts one API server
    server.command += ["--api-server-count", "2", "--enable-scale-out"]
    server.command += ["--enable-auto-tool-choice", "--tool-call-parser", "xlam"]
    await server.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
            doors = Doors(server, port, session)
            await doors.texts(num_requests)
            await doors.scrapes(5)
            if not await server.healthy():
                doors.problems.append("the engine has ended")
            if (num := log.read_text(errors="replace").count(SPLIT)) != 2:
                doors.problems.append(f"{num} of 2 API servers split streams")
            if server.tracebacks():
                doors.problems.append(f"{server.tracebacks()} tracebacks in the log")
            return doors.problems
    finally:
        server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--only", choices=("server", "batch"))
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    problems = [] if args.only == "batch" else asyncio.run(run(args.requests))
    problems += [] if args.only == "server" else run_batch(CONFIG)
    for problem in problems:
        print(f"PROBLEM {problem}")
    print(f"{len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
