"""Runs an engine in another process, for all tools. The calling process never imports vLLM."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from signal import SIG_BLOCK, SIG_SETMASK, SIGINT, pthread_sigmask
from typing import Any, Self

from vllm_specplugins.config import ConfigError
from vllm_specplugins.counters import faults_of

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process that measures
    "VLLM_NO_USAGE_STATS": "1",
}
METRICS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
GIB = 1 << 30
ENGINE_BYTES = 3 * GIB // 2  # memory of an engine on a CPU, in addition to weights and KV cache


class EngineProcess:
    """A process and a pipe to it, for a `with` block. Its output goes to `log`, and errors begin with `blame`. It calls
    `work` with its end of the pipe and the arguments; `work` receives messages until None, and sends no strings."""

    def __init__(self, log: Path, blame: str, work: Callable[..., None], *arguments: Any):
        self._log, self._blame = log, blame
        context = multiprocessing.get_context("spawn")
        self._pipe, self._theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(self._theirs, log, work, arguments))

    def __enter__(self) -> Self:
        resource_tracker.ensure_running()  # the first process would start it, and unblock the signal
        before = pthread_sigmask(SIG_BLOCK, [SIGINT])  # the process inherits the mask; only this one handles Ctrl-C
        try:
            self._process.start()
        finally:
            pthread_sigmask(SIG_SETMASK, before)
        self._theirs.close()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or issubclass(kind, Exception):
                with suppress(OSError):  # it may have ended
                    self._pipe.send(None)
                self._process.join(timeout=30)
        finally:
            self._process.kill()
            self._process.join()

    def send(self, message: Any) -> None:
        with suppress(OSError):  # receive says why
            self._pipe.send(message)

    def ask(self, message: Any) -> Any:
        self.send(message)
        return self.receive()

    def receive(self) -> Any:
        """Returns the next message of the process. Raises ConfigError if the engine failed."""
        try:
            message = self._pipe.recv()
        except (EOFError, OSError):
            message = "it ended without a message"
        if isinstance(message, str):
            raise ConfigError(f"{self._blame}; its log is {self._log} ({message}).")
        return message


def build_llm(arguments: Mapping[str, Any], speculative_config: Mapping[str, Any] | None) -> Any:
    """Returns a `vllm.LLM`. On a CPU it computes eagerly in float32 unless the arguments state otherwise."""
    from vllm import LLM
    from vllm.platforms import current_platform

    on_cpu = {"dtype": "float32", "enforce_eager": True} if current_platform.is_cpu() else {}
    config = dict(speculative_config) if speculative_config else None
    return LLM(**{**on_cpu, "disable_log_stats": False, **arguments}, speculative_config=config)


def fit_together(model: str, num_engines: int) -> bool:
    """Returns whether `num_engines` engines of a model fit into a CPU's memory. On a GPU they share its memory."""
    import psutil  # type: ignore[import-untyped]  # comes with vLLM
    import torch

    weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    needed = num_engines * (ENGINE_BYTES + int(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or 1) * GIB + weights)
    return torch.cuda.is_available() or needed <= psutil.virtual_memory().available


def totals(llm: Any) -> list[int]:
    values = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in llm.get_metrics()}
    return [int(values[name].value) if name in values else 0 for name in METRICS]


def faults(llm: Any) -> dict[str, int]:
    """Returns the faults of the plugin's proposer since the engine's start, by kind."""
    if not hasattr(llm.llm_engine.vllm_config.speculative_config, "plugin_config"):
        return {}
    return faults_of(llm.collective_rpc("specplugins_stats")[0])


def _run(pipe: Connection, log: Path, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= ENVIRONMENT
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    try:
        work(pipe, *arguments)
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        pipe.send(lines[0].rstrip(".") if lines else type(error).__name__)
