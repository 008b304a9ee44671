"""Servers under hostile schemas that a probe asks every ten seconds: an engine that says nothing while /health is 200.

    python tests/soak/probed.py [--minutes 120] [--methods prompt_lookup cascade] [--seed 1]

vLLM issue 49210: no token for 17 hours. Each server gets its share of the time, in which clients sample at
temperature 1 under every hostile schema, regular expression and grammar. A probe must be answered within PROBE_SECONDS;
where one is not, the stacks of the server's processes go into a file, if py-spy is installed. Of a late probe, the CPU
time of the server's processes tells a busy machine (little) from a busy engine. Ends with status 1 if there is a
problem.
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import psutil
from attacks import CONFIGS, LOGS, OURS, PLAIN, Asked, told
from hostile_requests import Body, posted, structured

EVERY_SECONDS, PROBE_SECONDS = 10.0, 5.0
CLIENTS, MAX_TOKENS = 3, 200
METHODS: dict[str, dict[str, Any] | None] = {
    "prompt_lookup": {"method": "prompt_lookup"},
    "cascade": OURS,
    "none": None,  # what vLLM alone does
}
# Free white space: at temperature 1 a model may emit it for as long as it is asked (vLLM issue 38696).
FREE = {"type": "object", "properties": {"name": {"type": "string"}, "tags": {"type": "array"}}, "required": ["name"]}


def hostile_bodies(seed: int) -> list[Body]:
    """The requests, in an order by seed."""
    fields = [fields for _, fields in structured(seed)] + [{"json": FREE}] * 20
    random.Random(seed).shuffle(fields)
    return [{"structured_outputs": each, "temperature": 1.0, "seed": number} for number, each in enumerate(fields)]


def late(seconds: float, cpu_seconds: float, status: int) -> str | None:
    """A problem in words: a probe that was refused, or that was answered late.

    >>> late(5.2, 1.0, 200)
    'a probe got status 200 after 5.2 s, in which the server computed for 1.0 s'
    >>> late(4.9, 4.9, 200)
    """
    if status == 200 and seconds <= PROBE_SECONDS:
        return None
    return f"a probe got status {status} after {seconds:.1f} s, in which the server computed for {cpu_seconds:.1f} s"


def cpu_seconds(server: Asked) -> float:
    """What the processes of a server have computed so far."""
    total = 0.0
    for process in server.server.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:2])
    return total


def stacks(server: Asked) -> str:
    """The stacks of a server's processes, of the thread that runs."""
    if (spy := shutil.which("py-spy")) is None:
        return "py-spy is not installed"
    shown = [
        subprocess.run([spy, "dump", "--nonblocking", "--pid", str(process.pid)], capture_output=True, text=True).stdout
        for process in server.server.processes()
    ]
    return "\n".join(shown)


async def soak(name: str, seconds: float, seed: int) -> list[str]:
    """The problems of one server."""
    server, problems, statuses, probes = Asked(METHODS[name], f"probed-{name}", CONFIGS["auto"][0]), [], Counter(), []
    bodies = itertools.cycle(hostile_bodies(seed))

    async def client(end: float) -> None:
        while time.monotonic() < end:
            await server.revive()
            status, _ = await server.ask("completions", posted(next(bodies), MAX_TOKENS))
            statuses[status] += 1

    async def probe(end: float) -> None:
        while time.monotonic() < end:
            began, computed = time.monotonic(), cpu_seconds(server)
            status, _ = await server.ask("completions", posted({**PLAIN, "max_tokens": 2}))
            probes.append(time.monotonic() - began)
            if problem := late(probes[-1], cpu_seconds(server) - computed, status):
                problems.append(f"{name}: {problem}")
                print(problems[-1], flush=True)
                (LOGS / f"stacks-{name}-{len(problems)}.txt").write_text(await asyncio.to_thread(stacks, server))
            await asyncio.sleep(max(0.0, EVERY_SECONDS - probes[-1]))

    async with server.up():
        end = time.monotonic() + seconds
        clients = [asyncio.create_task(client(end)) for _ in range(CLIENTS)]
        await probe(end)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.gather(*clients)
        totals = await counted(server)
    problems += [f"{name}: the server ended {server.starts} times"] * (server.starts > 0)
    worst = sorted(probes)[-3:]
    print(
        f"{name}: {seconds:.0f} s, answers {dict(statuses)}, {len(probes)} probes, the slowest "
        f"{', '.join(f'{each:.1f}' for each in worst)} s, {dict(totals)}, {server.peak >> 20} MiB at most",
        flush=True,
    )
    return problems


async def counted(server: Asked) -> Counter[str]:
    await server.server.poll()
    return server.server.totals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0, help="of all servers together (120)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["prompt_lookup", "cascade"])
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    share = 60 * args.minutes / len(args.methods)
    return told([problem for name in args.methods for problem in asyncio.run(soak(name, share, args.seed))])


if __name__ == "__main__":
    sys.exit(main())
