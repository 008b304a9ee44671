"""Soak: real servers under everything that clients and proposers can do to them, for as long as asked.

    python tests/soak [--minutes 10] [--seed N] [--method NAME ...]

A server without speculation answers each of a list of requests first; then servers with methods of ours are asked the
same, under bursts, aborts, hostile options, a proposer full of faults, a cache that is far too small, and SIGKILL. No
request may be lost, no token wrong, no server dead; memory must be flat, and speculation on at the end. Ends by the
clock, and with status 1 if there is a problem. Logs stay in .cache/soak.
"""

import argparse
import asyncio
import random
import secrets
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from catalogue import catalogue
from memory import Memory
from report import Phase, show
from server import Server
from traffic import Book, Traffic

FOLDER = Path(__file__).parents[2] / ".cache" / "soak"
MIN_PREEMPTIONS = 200
MAX_EXTRA_SLOPE = 10.0  # MiB a minute beyond that of the server without speculation
CALM_SECONDS = 90.0  # until drafts are accepted again
PLAIN_SHARE = 0.2  # of the time


def methods(chaos: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What --method chooses from; `chaos` is the planted proposer's configuration."""
    lookup, early_exit = {"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": 1}
    cascade = {"method": "cascade", "num_speculative_tokens": 4, "time_budget_ms": 150}
    return {
        "cascade": {**cascade, "policy": "first", "stages": [lookup, chaos, early_exit]},
        "custom": {**chaos, "num_speculative_tokens": 4, "time_budget_ms": 150},
        "prompt_lookup": {**lookup, "num_speculative_tokens": 4},
        "early_exit": {**early_exit, "num_speculative_tokens": 3},
        "verify": {**cascade, "policy": "verify", "stages": [chaos, early_exit]},
        "extend": {**cascade, "policy": "extend", "gate": "off", "stages": [lookup, early_exit, chaos]},
    }


DEFAULT_METHODS = ["cascade", "custom", "prompt_lookup"]


class Soak:
    """One run; see the module."""

    def __init__(self, minutes: float, seed: int, names: list[str]):
        self._began = time.monotonic()
        self._seconds, self._seed, self._names = minutes * 60, seed, names
        self._rng = random.Random(seed)
        self._cases, self._book = catalogue(seed), Book()
        self._journal, self._calm = FOLDER / "journal", FOLDER / "calm"

    async def run(self) -> list[Phase]:
        """The phases, each ended by the clock: without speculation, then by method, the first one with a kill."""
        chaos = {
            "method": "custom",
            "proposer": "chaos:Chaos",
            "options": {
                "seed": self._seed,
                "rate": 0.02,
                "nap_s": 0.4,
                "journal": str(self._journal),
                "calm": str(self._calm),
            },
        }
        phases = [await self._phase("no speculation", None, PLAIN_SHARE, 0)]
        # A method that is killed and started again counts twice.
        weights = [2.0] + [1.0] * (len(self._names) - 1)
        end = PLAIN_SHARE
        for number, (name, weight) in enumerate(zip(self._names, weights, strict=True)):
            end += (0.97 - PLAIN_SHARE) * weight / sum(weights)
            phases.append(await self._phase(name, methods(chaos)[name], end, num_kills=number == 0))
        return phases

    async def _phase(self, name: str, config: dict[str, Any] | None, end: float, num_kills: int) -> Phase:
        phase, began = Phase(name), time.monotonic()
        server = Server(config, FOLDER / f"{name.replace(' ', '_')}.log")
        traffic = Traffic(server, self._cases, self._book, config is not None, random.Random(self._rng.random()))
        self._journal.write_text("")
        self._calm.touch()
        try:
            await self._drive(phase, server, traffic, self._began + end * self._seconds, num_kills)
        except Exception as error:
            phase.problems.append(f"{type(error).__name__}: {error}")
        finally:
            phase.problems += traffic.problems
            phase.counts, phase.totals, phase.seconds = traffic.counts, server.totals, time.monotonic() - began
            phase.tracebacks = server.tracebacks()
            phase.faults = Counter(self._journal.read_text().splitlines())
            await traffic.close()
            server.stop()
        say(f"{name}: {phase.seconds:.0f} s, {phase.counts['answered']} answers, {len(phase.problems)} problems")
        return phase

    async def _drive(self, phase: Phase, server: Server, traffic: Traffic, end: float, num_kills: int) -> None:
        say(f"{phase.name}: started in {await server.start():.0f} s")
        phase.starts = 1
        await traffic.enter_references()
        self._calm.unlink()
        memory = Memory()
        watching = [asyncio.create_task(memory.watch(server)), asyncio.create_task(_poll(server))]
        running = asyncio.create_task(traffic.run(end - 5))
        try:
            for _ in range(num_kills):
                await asyncio.sleep(max(0.0, (end - time.monotonic()) * 0.35))
                watching.pop(0).cancel()
                say(f"{phase.name}: killed with {traffic.in_flight} requests in flight")
                server.kill()
                say(f"{phase.name}: started again in {await server.start():.0f} s")
                phase.starts += 1
                memory = Memory()
                watching.insert(0, asyncio.create_task(memory.watch(server)))
            await running
        finally:
            for task in (running, *watching):
                task.cancel()
        phase.mib, phase.slope = memory.last(), memory.slope()
        await self._check_end(phase, server, traffic)

    async def _check_end(self, phase: Phase, server: Server, traffic: Traffic) -> None:
        """Nothing is left over of any request, and, without faults, drafts are accepted."""
        self._calm.touch()
        gauges = await server.poll()
        for name, value in gauges.items():
            if value > 0.001:
                phase.problems.append(f"{name} is {value:g} when nobody asks")
        before, began = server.totals["spec_decode_num_accepted_tokens"], time.monotonic()
        if phase.name != "no speculation":
            while phase.calm_accepted == 0 and time.monotonic() - began < CALM_SECONDS:
                await traffic.calm()
                await server.poll()
                phase.calm_accepted = server.totals["spec_decode_num_accepted_tokens"] - before
            if phase.calm_accepted == 0:
                phase.problems.append("speculation is off at the end")
        if not await server.healthy():
            phase.problems.append("the server is not well at the end")


async def _poll(server: Server) -> None:
    while True:
        await asyncio.sleep(2)
        if server.up.is_set():
            try:
                await server.poll()
            except OSError:
                continue  # killed meanwhile


def problems_of(phases: list[Phase], book: Book) -> list[str]:
    """All of them, with those that only the phases together show."""
    found = [f"{phase.name}: {problem}" for phase in phases for problem in phase.problems]
    preemptions = sum(phase.totals["num_preemptions"] for phase in phases)
    if preemptions < MIN_PREEMPTIONS:
        found.append(f"{preemptions} preemptions; at least {MIN_PREEMPTIONS} are wanted")
    if len(book.unstable) > 3:
        found.append(f"without speculation {len(book.unstable)} requests were answered in more than one way")
    for phase in phases[1:]:
        if phase.slope - max(0.0, phases[0].slope) > MAX_EXTRA_SLOPE:
            found.append(f"{phase.name}: memory grows by {phase.slope:.2f} MiB a minute")
    return found


def say(words: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {words}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="from start to end (10)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="of what comes when (random)")
    parser.add_argument("--method", action="append", choices=list(methods({})), help="repeatable; the first is killed")
    args = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    say(f"seed {args.seed}")
    soak = Soak(args.minutes, args.seed, args.method or DEFAULT_METHODS)
    began = time.monotonic()
    phases = asyncio.run(soak.run())
    problems = problems_of(phases, soak._book)
    title = f"Soak: seed {args.seed}, {(time.monotonic() - began) / 60:.1f} minutes"
    show(phases, problems, title)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
