"""What a hostile client costs others, with real servers; run by hand, with nothing else on the machine.

    python tests/soak/bystanders.py grammar [--pairs 5]
    python tests/soak/bystanders.py remote [--pairs 5]

`grammar`: the worst second of clients that stream while one sends hostile grammars, against the same requests without a
grammar; of a server with `grammar`, and of one without speculation, whose ratio is vLLM's own. `remote`: what others
accept of a second server's drafts while one client asks what that may refuse. Ends with status 1 if there is a problem.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
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
EVERY_S = 0.25  # a hostile request; without a pause, those that are drafted for would be asked more often than others


async def bystanders(num_pairs: int) -> list[str]:
    """Prints the worst second of the others, as a share of that without the attack, by attack and server."""
    problems = []
    servers = {"ours": Asked(OURS, "bystanders-ours", CONFIGS["compact"][0])}
    servers["without speculation"] = Asked(None, "bystanders-plain", CONFIGS["compact"][0])
    for name, server in servers.items():
        async with server.up():
            await load(server, {}, 3.0)
            for attack, fields in ATTACKS.items():
                ratios = []
                for pair in range(num_pairs):
                    arms = {"with": {"structured_outputs": fields}, "without": {}}
                    order = sorted(arms, reverse=bool(pair % 2))
                    found = {arm: await load(server, arms[arm], SECONDS) for arm in order}
                    ratios.append([found["with"][part] / found["without"][part] for part in range(2)])
                worst, mean = (statistics.median(part) for part in zip(*ratios, strict=True))
                print(
                    f"{name}, {attack}: worst second {worst:.3f} of that without, mean {mean:.3f}; {ratios}", flush=True
                )
                if name == "ours" and worst < 1 / 1.2:
                    problems.append(f"{attack}: worst second {worst:.3f}")
    return problems


async def load(server: Asked, fields: Body, seconds: float) -> tuple[float, float]:
    """Tokens of the others in their worst second, and in a mean one, while one client asks with these fields."""
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

    async def hostile() -> None:
        for number in range(int(seconds / EVERY_S)):
            await asyncio.sleep(max(0.0, end - seconds + number * EVERY_S - time.monotonic()))
            if time.monotonic() < end:
                await server.ask("completions", posted({"prompt": "x", "ignore_eos": True, **fields}, 48))

    await asyncio.gather(hostile(), *map(stream, range(CLIENTS)))
    begin = end - seconds
    windows = [begin + 1 + 0.25 * step for step in range(int((seconds - 2) * 4))]
    counts = [sum(num for at, num in times if start <= at < start + 1) for start in windows]
    return min(counts) + 1e-9, statistics.mean(counts)


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("of", choices=("grammar", "remote"))
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    return told(asyncio.run((bystanders if args.of == "grammar" else remote)(args.pairs)))


if __name__ == "__main__":
    sys.exit(main())
