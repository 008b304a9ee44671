"""What a proposer may do to its process: copies, programs, open files, exceptions in other threads."""

import ctypes
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def _raise_in(name: str) -> None:
    """An exception in the thread that drafts now, or in one that a step needs."""
    for thread in threading.enumerate():
        if thread.name == name and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(RuntimeError))


COPIES: list[int] = []


def _fork() -> None:
    if copy := os.fork():
        COPIES.append(copy)  # which goes on as an engine would


def _recurse() -> None:
    _recurse()


def _use_up_files() -> None:
    opened, (soft, hard) = list[int](), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        with suppress(OSError):
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        raise RuntimeError("no file is left")
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


ACTS: dict[str, Callable[[], Any]] = {
    "fork": _fork,
    "Popen": lambda: subprocess.Popen(["true"]),
    "files": _use_up_files,
    "an exception in the drafting thread": lambda: _raise_in("specplugins-proposer"),
    "SystemExit": lambda: sys.exit(3),
    "a thread that raises": lambda: threading.Thread(target=lambda: 1 / 0).start(),
    "MemoryError": lambda: (_ for _ in ()).throw(MemoryError()),
    "recursion": lambda: _recurse(),
    "a generator's exit": lambda: (_ for _ in ()).throw(GeneratorExit()),
}
