"""Python programs in processes that are forked from one that has imported vLLM: the import takes longer than all that
most of them do. What they start in turn is forked from them.

Not for a test about imports, or about processes that read a user's file again.
"""

import atexit
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from signal import SIGKILL

MODULES = ["vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.entrypoints.launchers.api_server.entry"]
get_context = multiprocessing.get_context


def forking(method: str | None = None) -> ForkServerContext:
    """Processes that are forked from one that has imported vLLM; in place of multiprocessing.get_context."""
    context = get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    return context


def _run(words: Sequence[str], environment: Mapping[str, str], folder: Path, files: tuple[str, str]) -> None:
    """What `python WORDS` does."""
    gc.freeze()  # vLLM collects garbage some ten times on its way
    gc.freeze = gc.unfreeze = lambda: None
    os.setsid()
    for number, file in enumerate((os.devnull, *files)):
        os.dup2(os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)  # type: ignore[assignment]
    try:
        if words[0] == "-m":
            sys.argv = [*words[1:]]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [*words]
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def started(
    words: Sequence[object],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    files: tuple[str, str] = (os.devnull, os.devnull),
) -> ForkServerProcess:
    """A process of `python WORDS`, which leads a group of its own.

    Args:
        environment: all of its variables; those of this process if None.
        files: what its output and its errors are appended to.
    """
    own = dict(os.environ if environment is None else environment)
    process = forking().Process(target=_run, args=([*map(str, words)], own, folder or Path.cwd(), files))
    process.start()
    return process


def run(
    words: Sequence[object],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    timeout: float = 900,
) -> "subprocess.CompletedProcess[str]":
    """What became of `python WORDS`."""
    with tempfile.NamedTemporaryFile("r") as output, tempfile.NamedTemporaryFile("r") as errors:
        process = started(words, environment, folder, (output.name, errors.name))
        process.join(timeout)
        if process.exitcode is None:
            os.killpg(process.pid, SIGKILL)
            process.join()
        done = subprocess.CompletedProcess([*words], process.exitcode, output.read(), errors.read())
    return done
