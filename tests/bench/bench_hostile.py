"""What one hostile client costs the others, over HTTP.

    python examples/demo/widen.py examples/demo/model WIDE && python tests/bench/bench_hostile.py WIDE

A real server with prompt_lookup streams to some clients. In turn, a few seconds each, another client does nothing
("quiet"); sends the worst options of a request that we know of, one after the other ("hostile"); sends requests of the
same sizes that vLLM itself refuses, at the same place ("vLLM's own": what is lost here is lost without us). A gap is
the time between two chunks that a client receives; phases are interleaved, and all gaps of an arm counted together.
The worst second of a phase is that in which all clients together received least; its ratio is to the quiet phase of the
same round, median (range) of the rounds.
"""

import argparse
import asyncio
import http.client
import itertools
import json
import os
import platform
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from multiprocessing import Event, Process, Queue
from pathlib import Path

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

DEMO = Path(__file__).parents[2] / "examples" / "demo"
sys.path[:0] = [str(DEMO), str(Path(__file__).parents[1] / "soak")]
from bad_options import known  # noqa: E402
from prompts import load_prompts  # noqa: E402

ARMS = ("quiet", "hostile", "vLLM's own")
PAYLOADS = [bad.options for bad in known() if isinstance(bad.options, str) and bad.refused]
LENGTH = 1.0  # seconds


def start_server(args, port):
    config = {"method": "prompt_lookup", "num_speculative_tokens": 4}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(args.model)]
    command += ["--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", str(args.max_model_len), "--max-num-seqs", "8", "--enforce-eager"]
    command += ["--speculative-config", json.dumps(config), "--disable-uvicorn-access-log"]
    with open(args.log, "w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"})


def wait_for(port, server):
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").read()
            return
        except OSError:
            time.sleep(0.5)
    sys.exit("The server did not come up.")


def attack(port, arm, every, is_on, is_over, answers):
    """A process: sends the arm's requests while `is_on`, one in so many seconds; puts the status of each answer."""
    common = {"model": "demo", "prompt": "x", "max_tokens": 1}
    if arm == "hostile":
        bodies = [{**common, "vllm_xargs": {"specplugins": payload}} for payload in PAYLOADS]
    else:
        bodies = [{**common, "stop_token_ids": [1 << 30], "vllm_xargs": {"other": payload}} for payload in PAYLOADS]
    encoded = [json.dumps(body).encode() for body in bodies]
    for body in itertools.cycle(encoded):
        while not is_on.wait(0.2):
            if is_over.is_set():
                return
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answers.put((arm, connection.getresponse().status))
        connection.close()
        time.sleep(every)


async def stream(client, prompt, num_tokens, gaps):
    """Appends (when, seconds since the chunk before) for each chunk but the first."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    last = None
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                if last is not None:
                    gaps.append((now, now - last))
                last = now


async def listen(client, prompts, num_tokens, gaps, is_over):
    for prompt in itertools.cycle(prompts):
        if is_over.is_set():
            return
        await stream(client, prompt, num_tokens, gaps)


async def measure(args, port, switches, is_over):
    """Gaps in ms, and the chunks of each round's worst second, of each arm."""
    prompts = load_prompts("edit", 2 * args.clients)
    gaps, phases = [], []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        listeners = [
            asyncio.create_task(listen(client, prompts[number :: args.clients], args.tokens, gaps, is_over))
            for number in range(args.clients)
        ]
        await asyncio.sleep(args.seconds)  # the first requests warm up
        for number in range(args.rounds):
            for arm in np.roll(ARMS, number).tolist():
                start = time.perf_counter()
                if arm in switches:
                    switches[arm].set()
                await asyncio.sleep(args.seconds)
                if arm in switches:
                    switches[arm].clear()
                phases.append((arm, start, time.perf_counter()))
                await asyncio.sleep(args.pause)  # until what was sent is answered
        is_over.set()
        await asyncio.gather(*listeners)
    found, worst, times = {arm: [] for arm in ARMS}, {arm: [] for arm in ARMS}, np.array([when for when, _ in gaps])
    for arm, start, end in phases:
        found[arm] += [seconds * 1e3 for when, seconds in gaps if start < when - seconds and when < end]
        worst[arm].append(fewest(times, start, end))
    return found, worst


def fewest(times, start, end):
    """How many of these times lie in that second between `start` and `end` that has fewest."""
    times = np.sort(times)
    begins = np.arange(start, end - LENGTH, LENGTH / 20)
    return int(np.min(np.searchsorted(times, begins + LENGTH) - np.searchsorted(times, begins)))


def ratios(worst):
    """Of each round's worst second: how much longer than the quiet phase's the same chunks took."""
    values = np.array(worst["quiet"])[None] / np.maximum(1, [worst[arm] for arm in ARMS])
    return {
        arm: f"{np.median(own):.2f} ({own.min():.2f}-{own.max():.2f})" for arm, own in zip(ARMS, values, strict=True)
    }


def report(args, gaps, worst, statuses):
    console = Console(width=160)
    console.print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    title = f"{args.clients} clients, {args.rounds} rounds of {args.seconds:g} s an arm"
    columns = "gaps", "median ms", "p90", "p99", "longest", "p99 / quiet", "worst second / quiet"
    table = Table("the other client", *columns, "its answers", title=f"{title}, max_model_len {args.max_model_len}")
    quiet = np.quantile(gaps["quiet"], 0.99)
    for arm in ARMS:
        values = [np.quantile(gaps[arm], q) for q in (0.5, 0.9, 0.99, 1.0)]
        answers = ", ".join(f"{count} times {status}" for status, count in sorted(statuses[arm].items())) or "none"
        cells = [*(f"{value:.1f}" for value in values), f"{values[2] / quiet:.2f}", ratios(worst)[arm], answers]
        table.add_row(arm, str(len(gaps[arm])), *cells)
    console.print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--every", type=float, default=0.0, help="seconds between an answer and the next attack")
    parser.add_argument("--pause", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--log", default=os.devnull, help="where the server's log goes")
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server, answers, is_over = start_server(args, port), Queue(), Event()
    switches = {arm: Event() for arm in ARMS[1:]}
    try:
        wait_for(port, server)
        attackers = [
            Process(target=attack, args=(port, arm, args.every, switches[arm], is_over, answers)) for arm in ARMS[1:]
        ]
        for attacker in attackers:
            attacker.start()
        gaps, worst = asyncio.run(measure(args, port, switches, is_over))
        statuses = {arm: Counter() for arm in ARMS}
        while not answers.empty():
            arm, status = answers.get()
            statuses[arm][status] += 1
        for attacker in attackers:
            attacker.join(60)
        report(args, gaps, worst, statuses)
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main()
