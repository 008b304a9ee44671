"""Twenty command lines of `vllm serve`, and whether the server starts on a CPU. test_doctor.py asks `doctor` about
each; `python tests/engine/command_lines.py [NUMBER...]` starts a server for each, and prints the verdict."""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

MODEL = str(Path(__file__).parents[2] / "examples" / "demo" / "model")
SMALL = ("--max-num-seqs", "16", "--max-model-len", "256", "--dtype", "float32")
EXIT = {"method": "early_exit", "exit_layer": 1}


def line(spec: Any, *words: str) -> tuple[str, ...]:
    return MODEL, *SMALL, *words, "--speculative-config", spec if isinstance(spec, str) else json.dumps(spec)


SERVED = [
    line({"method": "prompt_lookup"}),
    line({"method": "suffix_lookup"}),
    line({**EXIT, "num_speculative_tokens": 3}),
    line({"method": "grammar"}, "--structured-outputs-config.backend", "xgrammar"),
    line({"method": "cascade", "stages": ["prompt_lookup", EXIT]}),
    line({"method": "prompt_lookup", "prompt_lookup_max": 5}),
    line({"method": "prompt_lookup"}, "--async-scheduling"),
    line({"method": "prompt_lookup"}, "--no-enable-prefix-caching", "--enable-chunked-prefill"),
    line({"method": "prompt_lookup"}, "--enable-lora", "--max-num-batched-tokens", "512"),
    line({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}),
]
REFUSED = [
    line({"method": "prompt_lokup"}),
    line({"method": "prompt_lookup", "max_ngram": 99}),
    line({"method": "prompt_lookup", "num_speculative_tokens": 31}, "--enable-lora", "--max-num-batched-tokens", "256"),
    line({**EXIT, "exit_layer": 99}),
    line({**EXIT, "tree": 7}),
    line({"method": "cascade", "stages": ["prompt_lookup", "suffix_lookup"]}),
    line({"method": "prompt_lookup"}, "--pipeline-parallel-size", "2"),
    line({"method": "prompt_lookup"}, "--no-such-flag"),
    line("{'method': 'prompt_lookup'}"),
    line({"method": "prompt_lookup", "num_speculative_tokens": 600}),
]


def starts(words: tuple[str, ...], port: int) -> tuple[bool, str]:
    """Whether a server answers, and the last line of its output."""
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        *words,
        "--port",
        str(port),
        "--enforce-eager",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            while server.poll() is None:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                    return True, "answers"
                except OSError:
                    time.sleep(1)
            output = server.stdout.read() if server.stdout else ""
            return False, output.strip().splitlines()[-1][:150]
        finally:
            server.send_signal(signal.SIGINT)


if __name__ == "__main__":
    lines = [*((words, True) for words in SERVED), *((words, False) for words in REFUSED)]
    for number in map(int, sys.argv[1:] or range(len(lines))):
        words, is_served = lines[number]
        answers, said = starts(words, 8100 + number)
        print(f"{number}: {'as expected' if answers is is_served else 'NOT AS EXPECTED'}: {said}", flush=True)
