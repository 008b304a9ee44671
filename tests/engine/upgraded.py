"""vLLM as another version might be: a folder with links to the installed one's files, of which some are changed, and an
engine that starts on it in a process of its own.

    python tests/engine/upgraded.py '{ARGUMENTS OF LLM}'

prints a line of JSON: whether the engine speculates, what it emits, and, where VLLM_SPECPLUGINS_ON_ERROR is "refuse",
how the start ends, before one with "serve".
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

PROMPTS = [[5, 6, 7, 8] * 8, [9, 9, 3] * 9]
RUNNER_FILE = {"v1": "v1/worker/gpu_model_runner.py", "v2": "v1/worker/gpu/model_runner.py"}
CPU_FILE = {"v1": "v1/worker/cpu_model_runner.py", "v2": "v1/worker/cpu/model_runner.py"}
CUSTOM = "from vllm.v1.spec_decode.custom_class_proposer "
Edits = Mapping[str, Callable[[str], str] | str | None]  # file -> what becomes of its text, or a new text; None: gone


class Started(NamedTuple):
    """What became of an engine."""

    result: dict[str, Any] | None  # None: it did not start
    log: str


def without_v1() -> Edits:
    """V1's runner is gone, and with it the class that the CPU's worker imports."""
    return {
        RUNNER_FILE["v1"]: None,
        "v1/spec_decode/llm_base_proposer.py": None,
        CPU_FILE["v1"]: "class CPUModelRunner:\n    pass\n",
    }


def another_runner(runner: str) -> Edits:
    """The CPU's runner derives from a class that only looks like the one that we know. V1's takes any drafter; V2's
    refuses the methods that it does not know."""
    copied, module = (installed() / RUNNER_FILE[runner]).read_text(), RUNNER_FILE[runner][:-3].replace("/", ".")
    copied = copied.replace(f"{CUSTOM}import create_custom_proposer", "create_custom_proposer = lambda config: None")
    derived = (installed() / CPU_FILE[runner]).read_text()
    return {
        "v1/worker/standalone_runner.py": copied,
        CPU_FILE[runner]: derived.replace(f"vllm.{module}", "vllm.v1.worker.standalone_runner"),
    }


def without_a_name(runner: str) -> Edits:
    """The runner works as before, under other names."""
    name = {"v1": "_calc_spec_decode_metadata", "v2": "add_requests"}[runner]
    return {RUNNER_FILE[runner]: lambda text: re.sub(rf"\b{name}\b", f"renamed_{name}", text)}


def installed() -> Path:
    import vllm

    return Path(vllm.__path__[0])


def upgraded(folder: Path, edits: Edits, version: str = "0.34.0") -> Path:
    """Makes the folder, for PYTHONPATH."""
    changed, source = {Path(file) for file in edits}, installed()
    inner = {Path()} | {parent for file in changed for parent in file.parents}
    for place in inner:
        target = folder / "vllm" / place
        target.mkdir(parents=True, exist_ok=True)
        for path in (source / place).iterdir():
            local = place / path.name
            if local not in inner and local not in changed and path.name != "__pycache__":
                (target / path.name).symlink_to(path)
    for file, edit in edits.items():
        text = edit((source / file).read_text()) if callable(edit) else edit
        if text is not None:
            (folder / "vllm" / file).write_text(text)
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return folder


def start(folder: Path, environment: Mapping[str, str], **arguments: Any) -> Started:
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths), "VLLM_LOGGING_LEVEL": "WARNING"},
    )
    log, _, result = done.stdout.partition("RESULT ")
    return Started(json.loads(result.splitlines()[0]) if result else None, log + done.stderr)


def main(arguments: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    arguments |= {"dtype": "float32", "enforce_eager": True, "disable_log_stats": False, "skip_tokenizer_init": True}
    refused = ""
    if os.environ.get("VLLM_SPECPLUGINS_ON_ERROR") == "refuse":
        try:
            LLM(**arguments)
        except Exception as error:
            refused = f"{type(error).__name__}: {error}"
        os.environ["VLLM_SPECPLUGINS_ON_ERROR"] = "serve"
    llm = LLM(**arguments)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    counted = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    result = {
        "speculates": llm.llm_engine.vllm_config.speculative_config is not None,
        "drafted": counted.get("vllm:spec_decode_num_draft_tokens", 0),
        "refused": refused,
        "outputs": [list(each.outputs[0].token_ids) for each in results],
    }
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
