"""Hostile requests to a real server with `grammar` behind a lookup, whose memory is limited; run by hand.

    python tests/soak/attacks.py [--configs auto guidance outlines lm-format-enforcer compact thinking] [--seed 1]

Each of some hundred requests must be refused (400 and the like), or be served with the text that a server without
speculation answers, or be answered with the status of that server. The engine must live, and answer a plain request as
before. Ends with status 1 if there is a problem.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import aiohttp
from hostile_requests import Body, posted, requests
from server import HERE, Server

LOGS = HERE.parents[1] / ".cache" / "attacks"
OURS = {
    "method": "cascade",
    "num_speculative_tokens": 31,
    "stages": [{"method": "prompt_lookup"}, {"method": "grammar"}],
}
MEMORY_GIB = 12  # of addresses, of each process
ANSWER_SECONDS = 45
AT_A_TIME = 4
GRAMMATICAL = "structured outputs", "response formats", "tools"
THINKING = ["--reasoning-parser-plugin", str(HERE / "reasoner.py"), "--reasoning-parser", "one_line"]
BACKEND = "--structured-outputs-config.backend"
# By name, arguments of the server and the classes of requests that it gets; () are all but "thinking".
CONFIGS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "auto": ([], ()),
    "compact": ([BACKEND, "xgrammar", "--structured-outputs-config.disable_any_whitespace", "true"], GRAMMATICAL),
    "guidance": ([BACKEND, "guidance"], GRAMMATICAL),
    "outlines": ([BACKEND, "outlines"], GRAMMATICAL),
    "lm-format-enforcer": ([BACKEND, "lm-format-enforcer"], GRAMMATICAL),
    "thinking": (THINKING, ("thinking", "structured outputs")),
}
PLAIN = {"prompt": "class Tree:\n    def", "max_tokens": 40, "ignore_eos": True}
Answer = tuple[int, Any]  # status, 0 where none came; what the choices say


class Asked:
    """A server that is asked by HTTP, and started again where it dies."""

    def __init__(self, config: dict[str, Any] | None, name: str, arguments: Iterable[str] = ()):
        self.server = Server(config, LOGS / f"{name}.log")
        self.server.command += ["--num-gpu-blocks-override", "300", *arguments]
        self.server.command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        self.server.command = ["bash", "-c", f'ulimit -v {MEMORY_GIB << 20}; exec "$@"', "-", *self.server.command]
        self.starts, self.peak, self._starting = 0, 0, asyncio.Lock()

    async def ask(self, path: str, body: bytes) -> Answer:
        timeout, headers = aiohttp.ClientTimeout(ANSWER_SECONDS), {"Content-Type": "application/json"}
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(f"{self.server.url}/v1/{path}", data=body, headers=headers) as answer,
            ):
                return answer.status, said(await answer.read())
        except (TimeoutError, aiohttp.ClientError):
            return 0, None

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        """While the server runs, its memory is watched."""
        await self.server.start()
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            self.server.stop()

    async def answers(self, bodies: list[tuple[str, Body]]) -> list[Answer]:
        """Some at a time; those that get no answer are asked again, each by itself. A server that ends is replaced."""
        places = asyncio.Semaphore(AT_A_TIME)

        async def one(path: str, body: Body) -> Answer:
            async with places:
                await self.revive()
                return await self.ask(path, posted(body))

        found = await asyncio.gather(*(one(*asked) for asked in bodies))
        for index in [index for index, answer in enumerate(found) if answer[0] == 0]:
            await self.revive()
            found[index] = await self.ask(bodies[index][0], posted(bodies[index][1]))
        await self.revive()
        return found

    async def revive(self) -> None:
        """Starts another server if this one has ended."""
        async with self._starting:
            if not await self.server.healthy():
                self.server.kill()
                await self.server.start()
                self.starts += 1

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(AssertionError):
                self.peak = max(self.peak, await asyncio.to_thread(self.server.rss))
            await asyncio.sleep(0.5)


def said(answer: bytes) -> Any:
    """Returns the text of an answer's choices, or the words of a refusal."""
    try:
        found = json.loads(answer)
    except ValueError:
        return answer.decode(errors="replace").count("data: ")
    if not isinstance(found, dict) or "choices" not in found:
        return found.get("error", found) if isinstance(found, dict) else found
    return [(choice.get("text") or _message(choice.get("message"))) for choice in found["choices"]]


def _message(message: Any) -> Any:
    calls = [call.get("function") for call in (message or {}).get("tool_calls") or ()]
    return message and (message.get("content"), calls)


def classes(seed: int, wanted: tuple[str, ...]) -> Iterator[tuple[str, list[tuple[str, Body]]]]:
    by_class: dict[str, list[tuple[str, Body]]] = defaultdict(list)
    for name, path, body in requests(seed):
        by_class[name].append((path, body))
    yield from ((name, by_class[name]) for name in by_class if name in wanted or (not wanted and name != "thinking"))


async def attack(name: str, seed: int, only: tuple[str, ...]) -> list[str]:
    """All classes of one configuration, or only these; returns the problems."""
    arguments, wanted = CONFIGS[name]
    wanted = only or wanted
    problems, asked = list[str](), list(classes(seed, wanted))
    ours, plain = Asked(OURS, f"{name}-ours", arguments), Asked(None, f"{name}-plain", arguments)
    async with ours.up(), plain.up():
        before = await ours.ask("completions", posted(PLAIN))
        for kind, bodies in asked:
            began = time.monotonic()
            answers = await ours.answers(bodies)
            if (after := await ours.ask("completions", posted(PLAIN))) != before:
                problems.append(f"{kind}: a plain request got {after} instead of {before}")
            statuses = Counter(status for status, _ in answers)
            print(f"{name}, {kind}: {dict(statuses)}, {time.monotonic() - began:.0f} s", flush=True)
            problems += await judge(plain, kind, bodies, answers)
            print(f"{name}, {kind}: {len(problems)} problems so far, {problems[-3:]}", flush=True)
    for words, server in (("", ours), ("without speculation ", plain)):
        print(f"{name}: {words}at most {server.peak >> 20} MiB, ended {server.starts} times", flush=True)
    return [f"{name}, {problem}" for problem in problems]


async def judge(plain: Asked, kind: str, bodies: list[tuple[str, Body]], answers: list[Answer]) -> list[str]:
    """The problems of one class: neither refused, nor served with the right text, nor failed as without speculation."""
    doubtful = [index for index, answer in enumerate(answers) if not 400 <= answer[0] < 500]
    greedy = [not body.get("temperature") and "use_beam_search" not in body for _, body in bodies]
    served = [index for index in doubtful if answers[index][0] != 200 or greedy[index]]
    rest = await plain.answers([bodies[index] for index in served])
    return [
        f"{kind}: {brief(answers[index])} instead of {brief(right)}: {posted(bodies[index][1])[:300]!r}"
        for index, right in zip(served, rest, strict=True)
        if answers[index] != right and not answers[index][0] == right[0] != 200
    ]


def brief(answer: Answer) -> str:
    return f"{answer[0]} {str(answer[1])[:200]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--classes", nargs="*", default=[], help="of requests, as hostile_requests.py names them")
    args = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    return told(
        [problem for name in args.configs for problem in asyncio.run(attack(name, args.seed, tuple(args.classes)))]
    )


def told(problems: list[str]) -> int:
    """Prints the problems and returns the exit status."""
    for problem in problems:
        print(f"PROBLEM {problem}")
    print(f"{len(problems)} problems" if problems else "no problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
