"""Strings that a client can send, drawn from the constants of our code and of vLLM's, sent to a real server; by hand.

    python tests/soak/client_strings.py [--count 300] [--seed 1]

Each class sends `count` strings in another field. A request is answered as its twin with drafting off, and the engine
must live. Of the salts, a new one must draft exactly as a random one does, thus from no other tenant's text. Ends with
status 1 if there is a problem.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[2]
CONFIG = {"method": "suffix_lookup", "num_speculative_tokens": 8, "gate": "off"}
ARGUMENTS = ["--num-gpu-blocks-override", "400", "--per-request-spec-decode-metrics", "summary"]
ARGUMENTS += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
OFF = {"specplugins": '{"enabled":false}'}
PROMPTS = [f"def {name}(x):\n    return {name}(" for name in ("f", "size", "tree", "load", "main", "read")]
NUM_TOKENS, AT_A_TIME = 16, 12
TWO = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
Request = tuple[str, dict[str, Any], dict[str, str]]  # path, body, headers


@cache
def strings() -> list[str]:
    """The constants of our code and of vLLM's engine, alone and as the beginning of a longer string."""
    import vllm

    parts = [Path(vllm.__path__[0]) / "v1" / part for part in ("core", "engine", "worker")]
    files = [*ROOT.glob("vllm_specplugins/**/*.py"), *(path for part in parts for path in part.rglob("*.py"))]
    texts = (path.read_text() for path in files)
    constants = {constant for text in texts for constant in re.findall(r'"([^"\\\s{}]{1,40})(?=["{])', text)}
    assert {"_warmup_", "_v2_mixed_warmup", "default"} < constants
    return sorted(constants | {f"{constant}x" for constant in constants})


def completion(prompt: str, **fields: Any) -> Request:
    body = {"model": "demo", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return "completions", body | fields, {}


def chat(prompt: str, **fields: Any) -> Request:
    messages = [{"role": "user", "content": prompt}]
    return "chat/completions", {"model": "demo", "messages": messages, "max_tokens": 60, "temperature": 0} | fields, {}


def of_tool(prompt: str, string: str, is_named: bool) -> Request:
    tool = {"type": "function", "function": {"name": string, "parameters": TWO, "description": string}}
    choice = {"type": "function", "function": {"name": string}} if is_named else "required"
    return chat(prompt, tools=[tool], tool_choice=choice)


def of_id(prompt: str, string: str, is_response: bool) -> Request:
    if is_response:
        return "responses", {"model": "demo", "input": prompt, "max_output_tokens": NUM_TOKENS, "temperature": 0,
                             "request_id": string}, {}  # fmt: skip
    path, body, _ = completion(prompt, request_id=string)
    is_sendable = string.isascii() and string.isprintable()
    return path, body, {"X-Request-Id": string} if is_sendable else {}


Make = Callable[[str, str, int], Request]  # of a prompt, a string and a number
CLASSES: dict[str, Make] = {
    "ids": lambda prompt, string, number: of_id(prompt, string, bool(number % 2)),
    "models": lambda prompt, string, number: completion(prompt, model=string),
    "stop strings": lambda prompt, string, number: completion(prompt, stop=[string, *PROMPTS[:1]][: 1 + number % 2]),
    "tools": lambda prompt, string, number: of_tool(prompt, string, bool(number % 2)),
    "options": lambda prompt, string, number: completion(
        prompt,
        vllm_xargs=[
            {"specplugins": json.dumps({string: string})},
            {f"specplugins.{string}": string},
            {string: string, "specplugins": "{}"},
            {"specplugins": json.dumps({"stages": [string]})},
            {"specplugins": json.dumps({"reference": string, "max_draft": 3})},
        ][number % 5],
    ),
    "texts": lambda prompt, string, number: chat(
        string if number % 2 else prompt, user=string, prediction={"type": "content", "content": string}
    ),
    "roles": lambda prompt, string, number: chat(
        prompt, messages=[{"role": string if number % 2 else "user", "name": string, "content": prompt}]
    ),
    "words and choices": lambda prompt, string, number: completion(
        prompt, **({"bad_words": [string]} if number % 2 else {"structured_outputs": {"choice": [string, "b"]}})
    ),
}


class Probes:
    """Requests to one server, and what was wrong."""

    def __init__(self, url: str, session: aiohttp.ClientSession):
        self._url, self._session, self._places = url, session, asyncio.Semaphore(AT_A_TIME)
        self.problems: list[str] = []

    async def ask(self, request: Request) -> tuple[int, Any, tuple[int, int]]:
        """Returns the status, what was said, and the numbers of draft and of accepted tokens, if they are known."""
        path, body, headers = request
        async with self._places, self._session.post(f"{self._url}/v1/{path}", json=body, headers=headers) as answer:
            found = await answer.json(content_type=None)
        if answer.status != 200:
            return answer.status, None, (0, 0)
        summary = (found.get("metrics") or {}).get("speculative_decoding") or {}
        told = summary.get("num_draft_tokens", 0), summary.get("num_accepted_draft_tokens", 0)
        if "output" in found:
            return 200, [part.get("content") and part["content"][0].get("text") for part in found["output"]], told
        said = [choice.get("text") or _of_message(choice.get("message")) for choice in found["choices"]]
        return 200, [said, [choice["finish_reason"] for choice in found["choices"]]], told

    async def twins(self, name: str, request: Request) -> int:
        """Asks a request and its twin without drafts, and returns the status."""
        path, body, headers = request
        options = body.get("vllm_xargs") or {}
        status, said, _ = await self.ask(request)
        kept = {key: value for key, value in options.items() if not key.startswith("specplugins")}
        twin_status, twin, drafted = await self.ask((path, {**body, "vllm_xargs": {**kept, **OFF}}, headers))
        is_refused_option = bool(options) and status == 400
        if drafted[0] or not (is_refused_option or (status, said) == (twin_status, twin)) or status >= 500:
            self.problems.append(f"{name}: {status} {said} instead of {twin_status} {twin}: {body}")
        return status

    async def salts(self, salts: list[str]) -> Counter[Any]:
        """A new salt drafts as a random one; asked again, it may draft from its own text."""
        right = {prompt: await self.ask(completion(prompt, cache_salt=f"{uuid.uuid4()}")) for prompt in PROMPTS}
        statuses = Counter[Any]()

        async def one(number: int, salt: str) -> None:
            prompt = PROMPTS[number % len(PROMPTS)]
            first, again = [await self.ask(completion(prompt, cache_salt=salt)) for _ in range(2)]
            statuses[first[0]] += 1
            statuses["accept more from their own text"] += again[2][1] > first[2][1]
            is_refused = first[0] == again[0] == 400  # vLLM takes no path
            if not is_refused and (first != right[prompt] or again[1] != first[1]):
                self.problems.append(f"salts: {first} and {again} instead of {right[prompt]}: {salt!r}")

        await asyncio.gather(*(one(number, salt) for number, salt in enumerate(salts)))
        return statuses


def _of_message(message: Any) -> Any:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return message.get("content"), calls


async def run(count: int, seed: int) -> list[str]:
    from attacks import LOGS, Asked

    LOGS.mkdir(parents=True, exist_ok=True)
    rng, server = random.Random(seed), Asked(CONFIG, "client-strings", ARGUMENTS)
    async with server.up(), aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        probes = Probes(server.server.url, session)
        for name in ("salts", *CLASSES):
            drawn, began = rng.sample(strings(), min(count, len(strings()))), time.monotonic()
            if name == "salts":
                statuses = await probes.salts(drawn)
            else:
                asked = (
                    probes.twins(name, CLASSES[name](PROMPTS[number % len(PROMPTS)], string, number))
                    for number, string in enumerate(drawn)
                )
                statuses = Counter(await asyncio.gather(*asked))
            spent, num = time.monotonic() - began, len(probes.problems)
            print(f"{name}: {len(drawn)} strings, {dict(statuses)}, {num} problems so far, {spent:.0f} s", flush=True)
        if not await server.server.healthy():
            probes.problems.append("the engine has ended")
        await server.server.poll()
        print(f"{dict(server.server.totals)}, {server.server.tracebacks()} tracebacks in the log", flush=True)
        return probes.problems


def main() -> int:
    from attacks import told

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    return told(asyncio.run(run(args.count, args.seed)))


if __name__ == "__main__":
    sys.exit(main())
