"""Which scheduling serves which proposer better, on Model Runner V2: drafts known when a step is planned, or not.

    python tests/bench/bench_scheduling.py [--model examples/demo/model]

Synchronous scheduling plans true draft lengths and waits for the drafts; asynchronous scheduling overlaps the
scheduler with the device and plans from each request's record. Without a GPU the runner goes through Triton's
interpreter: then the times mean nothing, and the counts (tokens per step, verified tokens per output token) are
what there is to read.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARMS = """{
    "none": null,
    "prompt_lookup, sync": {"method": "prompt_lookup", "num_speculative_tokens": 5},
    "prompt_lookup, async": {"method": "prompt_lookup", "num_speculative_tokens": 5, "async": true},
    "early_exit, sync": {"method": "early_exit", "num_speculative_tokens": 3, "exit_layer": 2, "async": false},
    "early_exit, async": {"method": "early_exit", "num_speculative_tokens": 3, "exit_layer": 2, "async": true}
}"""


def main() -> int:
    environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    import torch

    if not torch.cuda.is_available():
        backend = str(ROOT / "tests" / "engine" / "triton_cpu")
        environment |= {"TRITON_INTERPRET": "1", "PYTHONPATH": backend}
    model = ["--model", str(ROOT / "examples" / "demo" / "model"), *sys.argv[1:]]
    for kind in ("edit", "continue"):
        options = ["--kind", kind, "--batch", "4", "--prompts", "8", "--tokens", "48", "--rounds", "1", "--arms", ARMS]
        command = [sys.executable, str(Path(__file__).with_name("bench_engine.py")), *options, *model]
        if status := subprocess.run(command, env=environment).returncode:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
