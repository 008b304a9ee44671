"""What a hostile client costs others, with real servers; run by hand, with nothing else on the machine.

    python tests/soak/bystanders.py grammar [--pairs 5]
    python tests/soak/bystanders.py remote [--pairs 5]
    python tests/soak/bystanders.py scrapes [--pairs 5]

`grammar`: the worst second of clients that stream while one sends hostile grammars, against the same requests without a
grammar; of a server with `grammar`, and of one without speculation, whose ratio is vLLM's own. `remote`: what others
accept of a second server's drafts while one client asks what that may refuse. `scrapes`: as `grammar`, while the
metrics of the engine's port are read ten times a second. Ends with status 1 if there is a problem.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from attacks import ANSWER_SECONDS, CONFIGS, LOGS, OURS, Asked, told
from hostile_requests import Body, posted

NODE = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/n"}},
    "required": ["next"],
    "additionalProperties": False,
}
ATTACKS: dict[str, Any] = {
    "a{300000}": {"regex": "a{300000}"},
    "recursive schema": {"json": {"$defs": {"n": NODE}, "$ref": "#/$defs/n"}},
    "endless grammar": {"grammar": 'root ::= "abcdefgh" root'},
}
SECONDS = 8.0
CLIENTS = 3
LEAST = 1 / 1.2  # of the others' speed
SCRAPES = 10  # a second
CONFIG = {"method": "prompt_lookup", "gate": "off"}
EVERY_S = 0.25  # a hostile request; without a pause, those that are drafted for would be asked more often than others


Beside = Callable[[float], Awaitable[None]]  # what goes on until this time


async def bystanders(num_pairs: int) -> list[str]:
    """Prints the worst second of the others, as a share of that without the attack, by attack and server."""
    problems = []
    servers = {"ours": Asked(OURS, "bystanders-ours", CONFIGS["compact"][0])}
    servers["without speculation"] = Asked(None, "bystanders-plain", CONFIGS["compact"][0])
    for name, server in servers.items():
        async with server.up():
            await load(server, asks(server, {}), 3.0)
            for attack, fields in ATTACKS.items():
                with_it, without = asks(server, {"structured_outputs": fields}), asks(server, {})
                worst = await compared(server, f"{name}, {attack}", with_it, without, num_pairs)
                if name == "ours" and worst < LEAST:
                    problems.append(f"{attack}: worst second {worst:.3f}")
    return problems


async def compared(server: Asked, name: str, with_it: Beside, without: Beside, num_pairs: int) -> float:
    """Prints and returns the others' worst second beside one thing, as a share of that beside the other."""
    ratios = []
    for pair in range(num_pairs):
        arms = {"with": with_it, "without": without}
        found = {arm: await load(server, arms[arm], SECONDS) for arm in sorted(arms, reverse=bool(pair % 2))}
        ratios.append([found["with"][part] / found["without"][part] for part in range(2)])
    worst, mean = (statistics.median(part) for part in zip(*ratios, strict=True))
    print(f"{name}: worst second {worst:.3f} of that without, mean {mean:.3f}; {ratios}", flush=True)
    return worst


def asks(server: Asked, fields: Body) -> Beside:
    """One client, with these fields."""

    async def beside(end: float) -> None:
        begin = time.monotonic()
        for number in range(int((end - begin) / EVERY_S)):
            await asyncio.sleep(max(0.0, begin + number * EVERY_S - time.monotonic()))
            if time.monotonic() < end:
                await server.ask("completions", posted({"prompt": "x", "ignore_eos": True, **fields}, 48))

    return beside


async def load(server: Asked, beside: Beside, seconds: float) -> tuple[float, float]:
    """Tokens of the others in their worst second, and in a mean one."""
    times: list[tuple[float, int]] = []
    end = time.monotonic() + seconds

    async def stream(number: int) -> None:
        prompt = f"def f{number}(x):\n    return"
        while time.monotonic() < end:
            body = {"prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True, "return_token_ids": True}
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ANSWER_SECONDS)) as session,
                session.post(f"{server.server.url}/v1/completions", data=posted(body), headers=JSON) as answer,
            ):
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        choices = json.loads(line[6:])["choices"]
                        times.append((time.monotonic(), sum(len(one.get("token_ids") or ()) for one in choices)))

    await asyncio.gather(beside(end), *map(stream, range(CLIENTS)))
    begin = end - seconds
    windows = [begin + 1 + 0.25 * step for step in range(int((seconds - 2) * 4))]
    counts = [sum(num for at, num in times if start <= at < start + 1) for start in windows]
    return min(counts) + 1e-9, statistics.mean(counts)


async def scrapes(num_pairs: int) -> list[str]:
    """Prints the others' speed while a client reads the port of the engine's metrics."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ["VLLM_SPECPLUGINS_METRICS_PORT"] = str(port)
    server, read = Asked(CONFIG, "bystanders-scrapes"), [0]

    async def beside(end: float) -> None:
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < end:
                async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
                    read[0] += bool(await answer.read())
                await asyncio.sleep(1 / SCRAPES)

    async with server.up():
        await load(server, asks(server, {}), 3.0)
        worst = await compared(server, f"{SCRAPES} scrapes a second", beside, nothing, num_pairs)
    print(f"{read[0]} scrapes", flush=True)
    return [f"scrapes: worst second {worst:.3f}"] if worst < LEAST else []


async def nothing(end: float) -> None: ...


JSON = {"Content-Type": "application/json"}
QUESTIONS: dict[str, Body] = {  # that a drafter with a shorter context may refuse, or answer in vain
    "none": {},
    "long prompts": {"prompt": [5, 6, 7, 8] * 110, "max_tokens": 4},
    "high ids": {"prompt": [8190, 8191] * 4, "max_tokens": 4},
    "many at once": {"prompt": "x", "n": 12, "max_tokens": 12},
    "of one token": {"prompt": [9], "max_tokens": 1},
}


async def remote(num_rounds: int) -> list[str]:
    """Prints how many tokens of a real server's drafts another client's requests accept, by what the attacker asks."""
    drafter = Asked(None, "remote-drafter", ["--max-model-len", "128"])
    accepted: dict[str, list[float]] = {name: [] for name in QUESTIONS}
    async with drafter.up():
        url = f"{drafter.server.url}/v1"
        config = {"method": "remote", "url": url, "model": "demo", "num_speculative_tokens": 8, "gate": "off"}
        ours = Asked(config, "remote-ours", ["--per-request-spec-decode-metrics", "summary"])
        async with ours.up():
            await accepted_beside(ours, {}, 3.0)
            for _ in range(num_rounds):
                for name, fields in QUESTIONS.items():
                    accepted[name].append(await accepted_beside(ours, fields, SECONDS))
            healthy = await ours.server.healthy() and await drafter.server.healthy()
    medians = {name: statistics.median(numbers) for name, numbers in accepted.items()}
    print(f"accepted tokens of a request of 60: {medians}; {accepted}", flush=True)
    problems = [] if healthy else ["a server died"]
    return problems + [f"{name}: {number}" for name, number in medians.items() if number < 0.8 * medians["none"]]


async def accepted_beside(server: Asked, fields: Body, seconds: float) -> float:
    """Tokens that requests of one client accept, each, while another one asks with these fields."""
    end, found = time.monotonic() + seconds, list[int]()

    async def hostile() -> None:
        while fields and time.monotonic() < end:
            await server.ask("completions", posted({"ignore_eos": True, **fields}))
            await asyncio.sleep(0.1)

    async def plain() -> None:
        body = posted({"prompt": "class Tree:\n    def", "max_tokens": 60, "ignore_eos": True})
        while time.monotonic() < end:
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{server.server.url}/v1/completions", data=body, headers=JSON) as answer,
            ):
                summary = (await answer.json())["metrics"]["speculative_decoding"]
                found.append(summary["num_accepted_draft_tokens"])

    await asyncio.gather(hostile(), plain())
    return statistics.mean(found)


RUNS = {"grammar": bystanders, "remote": remote, "scrapes": scrapes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("of", choices=RUNS)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    return told(asyncio.run(RUNS[args.of](args.pairs)))


if __name__ == "__main__":
    sys.exit(main())
