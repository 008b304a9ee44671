"""A program: starts vLLM's API server for each line of JSON that it reads, its arguments; prints that one's process id.

Importing vLLM takes longer than all else, so servers are forked from a process that has imported it, each into a group
of its own, and engines from servers.
"""

import json
import multiprocessing
import os
import signal
import sys

import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.entrypoints.launchers.api_server.entry import main

get_context = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)


def serve(arguments: list[str]) -> None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.argv = ["api_server", *arguments]
    main()


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve(json.loads(line))
            sys.exit()
        print(pid, flush=True)
