"""vLLM's OpenAI-compatible server on loopback, in a process group of its own, so that it dies as a whole."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "examples" / "demo" / "model"
START_SECONDS = 600.0  # for a busy machine
COUNTERS = ("num_preemptions", "spec_decode_num_drafts", "spec_decode_num_accepted_tokens", "generation_tokens")
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")

# Hardly more blocks of the KV cache than one request can fill: of several at a time, most are preempted once.
ARGUMENTS = [
    "--model", str(MODEL), "--served-model-name", "demo", "--host", "127.0.0.1", "--dtype", "float32",
    "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16", "--max-num-batched-tokens", "256",
    "--block-size", "32", "--num-gpu-blocks-override", "18", "--disable-uvicorn-access-log",
]  # fmt: skip
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "NO_PROXY": "127.0.0.1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # a connection that it closes may be in use again by then
}


class Server:
    """One configuration, started as often as it is killed.

    Attributes:
        life: how often it was killed; a request that saw it change may have lost its connection.
        up: set while requests can be sent.
        totals: COUNTERS of all lives, as of the last `poll`.
    """

    def __init__(self, speculative_config: dict[str, Any] | None, log: Path):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *ARGUMENTS]
        self.command += ["--port", str(self.port)]
        if speculative_config is not None:
            self.command += ["--speculative-config", json.dumps(speculative_config)]
        self.log = log
        self.life = 0
        self.up = asyncio.Event()
        self._past: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def totals(self) -> Counter[str]:
        return self._past + self._now

    async def start(self) -> float:
        """Starts it and waits until it answers; returns the seconds that it took."""
        began = time.monotonic()
        paths = [str(HERE), str(HERE.parent / "isolation"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        while not await self.healthy():
            if self._process.poll() is not None or time.monotonic() - began > START_SECONDS:
                raise RuntimeError(f"the server did not come up; its log is {self.log}")
            await asyncio.sleep(0.5)
        self.up.set()
        return time.monotonic() - began

    async def healthy(self) -> bool:
        """Whether it says that it is well, and all of its processes are there."""
        try:
            async with aiohttp.ClientSession() as session, session.get(f"{self.url}/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def poll(self) -> dict[str, float]:
        """Reads /metrics: adds COUNTERS to the totals, returns GAUGES."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as answer:
            values = metrics(await answer.text())
        self._now = Counter({name: int(values[f"{name}_total"]) for name in COUNTERS if f"{name}_total" in values})
        return {name: values[name] for name in GAUGES}

    def kill(self) -> None:
        """SIGKILL to all of its processes at once."""
        self.up.clear()
        self.life += 1
        self._past, self._now = self._past + self._now, Counter()
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Asks it to end, and makes it if it does not."""
        self.up.clear()
        if self._process is not None:
            self._end(signal.SIGTERM)

    def rss(self) -> int:
        """Resident bytes of all of its processes together."""
        assert self._process is not None
        total = 0
        for process in self.processes():
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total

    def tracebacks(self) -> int:
        """How many tracebacks it has logged so far."""
        return self.log.read_text(errors="replace").count("Traceback (most recent call last)")

    def processes(self) -> list[psutil.Process]:
        assert self._process is not None
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _end(self, number: signal.Signals) -> None:
        assert self._process is not None
        processes = self.processes()
        _signal_group(self._process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        _signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()
        psutil.wait_procs(processes, timeout=30)
        self._process = None


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def metrics(text: str) -> Counter[str]:
    """Sums by name, without "vllm:", of what Prometheus's text format holds.

    >>> metrics('# HELP\\nvllm:a_total{x="1"} 2.0\\nvllm:a_total{x="2"} 1.0\\nother 7\\n')
    Counter({'a_total': 3.0})
    """
    found: Counter[str] = Counter()
    for name, value in re.findall(r"^vllm:(\w+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
        found[name] += float(value)  # type: ignore[assignment]
    return found
