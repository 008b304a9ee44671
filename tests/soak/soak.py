"""Soak: real servers under everything that clients and proposers can do to them, for as long as asked.

    python tests/soak [--minutes 10] [--seed N] [--method NAME ...]

A server without speculation answers each of a list of requests first; then servers with methods of ours are asked the
same, under bursts, aborts, hostile options, a proposer full of faults, a cache that is far too small, and SIGKILL. No
request may be lost, no token wrong, no server dead; memory must be flat (a short run
compares what is there at the end, since it cannot tell a slope), and speculation on at the end. Ends by the
clock, and with status 1 if there is a problem. Logs stay in .cache/soak.
"""

import argparse
import asyncio
import random
import secrets
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
from catalogue import catalogue
from memory import Memory
from report import Phase, show
from server import Server
from traffic import Book, Traffic

FOLDER = Path(__file__).parents[2] / ".cache" / "soak"
MIN_PREEMPTIONS = 50
MIN_JUDGED_MINUTES = 3.0  # of a slope: until then the server without speculation grows by 70 MiB a minute, too
MAX_MORE_MIB = 512.0  # than that server has at the end, in a run that is too short for slopes
MAX_EXTRA_MIB = 32.0  # more than the server without speculation grows in as long: what filling caches may differ by
CALM_SECONDS = 150.0  # until drafts are accepted again, and requests that were aborted are gone
PLAIN_SHARE = 1.2  # of the time that a method gets
MIN_LOAD_SECONDS = 5.0
GRACE_SECONDS = 300.0  # for the last answers, before what is left of them counts as lost
KILL_AFTER = 0.4  # of a phase


def methods(chaos: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What --method chooses from; `chaos` are the options of the planted proposer."""

    def planted(index: int, count: int) -> dict[str, Any]:
        return {"method": "custom", "proposer": "chaos:Chaos", "options": {**chaos, "index": index, "count": count}}

    lookup, early_exit = {"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": 1}
    common = {"num_speculative_tokens": 4, "time_budget_ms": 150}
    cascade = {**common, "method": "cascade"}
    several = [planted(index, 3) for index in range(3)]
    return {
        "cascade": {**cascade, "stages": [lookup, *several, early_exit]},
        "custom": {**planted(0, 1), **common},
        "prompt_lookup": {**lookup, **common, "gate": "off"},  # on a small model drafts hardly pay
        "verify": {**cascade, "policy": "verify", "stages": [planted(0, 1), early_exit]},
    }


DEFAULT_METHODS = ["cascade", "custom", "prompt_lookup"]
PLAIN = "no speculation"


class Clock:
    """Shares what is left of the time among what is still to come: starts, as long as the first was, and load."""

    def __init__(self, minutes: float, names: list[str]):
        self._end = time.monotonic() + minutes * 60 * 0.97
        self._shares = [PLAIN_SHARE, *(2.0 if name == names[0] else 1.0 for name in names)]
        self._starts_left = len(names) + 2  # the first of the methods is killed, and started again
        self._start_seconds = 0.0

    def started(self, seconds: float) -> None:
        """So long took a start."""
        self._start_seconds = max(self._start_seconds, seconds)
        self._starts_left -= 1

    def is_over(self) -> bool:
        """Whether another server cannot even start."""
        return time.monotonic() + self._start_seconds > self._end

    def seconds_to_the_last(self) -> float:
        """Returns the seconds until everything ends."""
        return max(0.0, self._end + GRACE_SECONDS - time.monotonic())

    def next_share(self) -> float:
        """Seconds of load of the next phase."""
        left = self._end - time.monotonic() - self._starts_left * self._start_seconds
        share = self._shares.pop(0)
        return max(MIN_LOAD_SECONDS, left * share / (share + sum(self._shares)))


class Soak:
    """One run; see the module."""

    def __init__(self, minutes: float, seed: int, names: list[str]):
        self._seed, self._names, self._clock = seed, names, Clock(minutes, names)
        self._rng = random.Random(seed)
        self._cases, self.book = catalogue(seed), Book()
        self._calm = FOLDER / "calm"

    async def run(self) -> list[Phase]:
        """The phases: without speculation, then by method, the first one with a kill."""
        chaos = {"seed": self._seed, "rate": 0.05, "folder": str(FOLDER)}
        phases = [await self._phase(PLAIN, None, num_kills=0)]
        for number, name in enumerate(self._names):
            if self._clock.is_over():
                say(f"{name}: left out, there is no time for it; --minutes must be more on this machine")
                continue
            phases.append(await self._phase(name, methods(chaos)[name], num_kills=number == 0))
        return phases

    async def _phase(self, name: str, config: dict[str, Any] | None, num_kills: int) -> Phase:
        phase, began = Phase(name), time.monotonic()
        server = Server(config, FOLDER / f"{name.replace(' ', '_')}.log")
        traffic = Traffic(server, self._cases, self.book, config is not None, random.Random(self._rng.random()))
        for journal in FOLDER.glob("journal.*"):
            journal.unlink()
        self._calm.touch()
        try:
            async with asyncio.timeout(self._clock.seconds_to_the_last()):
                await self._drive(phase, server, traffic, num_kills)
        except TimeoutError:
            phase.problems.append(f"time is over, and {traffic.in_flight} requests are not answered")
        except Exception as error:
            phase.problems.append(f"{type(error).__name__}: {error}")
        finally:
            phase.problems += traffic.problems
            phase.counts, phase.totals, phase.seconds = traffic.counts, server.totals, time.monotonic() - began
            phase.tracebacks = server.tracebacks()
            phase.faults = Counter("".join(path.read_text() for path in FOLDER.glob("journal.*")).splitlines())
            await traffic.close()
            server.stop()
        say(f"{name}: {phase.seconds:.0f} s, {phase.counts['answered']} answers, {len(phase.problems)} problems")
        for problem in phase.problems[:5]:
            say(f"{name}: {problem}")
        return phase

    async def _drive(self, phase: Phase, server: Server, traffic: Traffic, num_kills: int) -> None:
        await self._start(phase, server)
        share, began = self._clock.next_share(), time.monotonic()
        await traffic.enter_references()
        share = max(MIN_LOAD_SECONDS, share - (time.monotonic() - began))
        polling = asyncio.create_task(_poll(server))
        running = asyncio.create_task(traffic.run())
        try:
            for _ in range(num_kills):
                await self._load(server, share * KILL_AFTER, running)
                say(f"{phase.name}: killed with {traffic.in_flight} requests in flight")
                server.kill()
                await self._start(phase, server)
                share -= share * KILL_AFTER
            memory = await self._load(server, share, running)
            traffic.ends = True
            await running
        finally:
            for task in (running, polling):
                task.cancel()
        phase.mib, phase.slope, phase.judged_minutes = memory.last(), memory.slope(), memory.judged_minutes()
        await self._check_end(phase, server, traffic)

    async def _start(self, phase: Phase, server: Server) -> None:
        seconds = await server.start()
        phase.starts += 1
        self._clock.started(seconds)
        say(f"{phase.name}: started in {seconds:.0f} s")

    async def _load(self, server: Server, seconds: float, running: "asyncio.Task[None]") -> Memory:
        """Lets the clients run, and the planted proposers in the first half of the time: the pauses in which those are
        switched off double, and so are over at its end."""
        memory = Memory()
        watching = asyncio.create_task(memory.watch(server))
        try:
            self._calm.unlink()
            await asyncio.wait([running], timeout=seconds / 2)
            self._calm.touch()
            await asyncio.wait([running], timeout=seconds / 2)
        finally:
            watching.cancel()
        return memory

    async def _check_end(self, phase: Phase, server: Server, traffic: Traffic) -> None:
        """Nothing is left over of any request, and drafts are accepted."""
        await server.poll()
        before, began = server.totals["spec_decode_num_accepted_tokens"], time.monotonic()
        while True:
            await traffic.calm()  # vLLM writes its gauges as it steps
            left = [f"{name} is {value:g} when nobody asks" for name, value in (await server.poll()).items() if value]
            phase.calm_accepted = server.totals["spec_decode_num_accepted_tokens"] - before
            if phase.name != PLAIN and phase.calm_accepted == 0:
                left.append("speculation is off at the end")
            if not left or time.monotonic() - began > CALM_SECONDS:
                break
            await asyncio.sleep(1)
        phase.problems += left
        if not await server.healthy():
            phase.problems.append("the server is not well at the end")


async def _poll(server: Server) -> None:
    while True:
        await asyncio.sleep(2)
        if server.up.is_set():
            try:
                await server.poll()
            except (aiohttp.ClientError, KeyError):
                continue  # killed meanwhile


def problems_of(phases: list[Phase], book: Book) -> list[str]:
    """All of them, with those that only the phases together show."""
    found = [f"{phase.name}: {problem}" for phase in phases for problem in phase.problems]
    if len(phases) < 2:
        found.append("no method was served: there was no time")
    preemptions = sum(phase.totals["num_preemptions"] for phase in phases)
    if preemptions < MIN_PREEMPTIONS:
        found.append(f"{preemptions} preemptions; at least {MIN_PREEMPTIONS} are wanted")
    if len(book.unstable) > 3:
        found.append(f"without speculation {len(book.unstable)} requests were answered in more than one way")
    for phase in phases[1:]:
        found += memory_problems(phase, phases[0])
    return found


def memory_problems(phase: Phase, plain: Phase) -> list[str]:
    """Beside the server without speculation: in a long run by what memory grows, in a short one by what it has."""
    if (
        phase.slope is None
        or plain.slope is None
        or min(phase.judged_minutes, plain.judged_minutes) < MIN_JUDGED_MINUTES
    ):
        more = phase.mib - plain.mib
        return [f"{phase.name}: {more:.0f} MiB more at the end"] if more > MAX_MORE_MIB else []
    if (phase.slope - max(0.0, plain.slope)) * phase.judged_minutes > MAX_EXTRA_MIB:
        return [f"{phase.name}: memory grows by {phase.slope:.2f} MiB a minute"]
    return []


def say(words: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {words}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="from start to end (10)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="of what comes when (random)")
    parser.add_argument("--method", action="append", choices=list(methods({})), help="repeatable; the first is killed")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the servers end, too
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    say(f"seed {args.seed}")
    soak = Soak(args.minutes, args.seed, args.method or DEFAULT_METHODS)
    began = time.monotonic()
    phases = asyncio.run(soak.run())
    problems = problems_of(phases, soak.book)
    title = f"Soak: seed {args.seed}, {(time.monotonic() - began) / 60:.1f} minutes"
    show(phases, problems, title)
    return int(bool(problems))
