"""Hostile probes without an engine, counted by class; by hand.

    python tests/soak/probes.py [--only files guards learn stores ...] [--count 5000] [--seed 1]

files: files for `bench` and `calibrate`. guards: a class of others that forks, starts programs, uses up files, or
raises in other threads, before and after its breaker opens. learn: promoted weights on a disk that is full. Others:
grammars.py and peers.py. Ends with status 1 if there is a problem.
"""

import argparse
import errno
import json
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "isolation"))
from grammars import grammars
from peers import PEERS
from system_acts import ACTS, COPIES

from vllm_specplugins.config import ConfigError
from vllm_specplugins.draft import Draft, DraftBatch, Feedback
from vllm_specplugins.isolation.barrier import FaultBarrier

Problems = Iterator[str | None]  # one for each probe
TREE = Path(__file__).parents[2]


class Tokenizer:
    """A token for each byte."""

    chat_template, bos_token_id, eos_token_id = "x", None, 0

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode(errors="replace"))

    def __call__(self, text: str, **_: Any) -> Any:
        return {"input_ids": self.encode(text)}

    def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
        return self.encode(json.dumps(messages))

    def __len__(self) -> int:
        return 300


ODD: list[Any] = [
    None, True, -1, 0, 3, 1 << 70, 1e400, float("nan"), "", "x", "\ud800", "a\x00b", "\x1b[31m", [], {}, [[]], [1, "2"],
    {"a": {}}, [1 << 40], [-1], "é" * 300, [None] * 40, {"role": "user", "content": "x"},
]  # fmt: skip
KEYS = (
    "prompt", "output", "text", "messages", "choices", "turns", "task", "category", "question", "traj", "accepted",
    "drafter", "content", "role", "message", "reward", "input", "reference", "id", "tools",
)  # fmt: skip


def rubbish(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 3 or kind < 0.5:
        return rng.choice(ODD)
    if kind < 0.7:
        return [rubbish(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS): rubbish(rng, depth + 1) for _ in range(rng.randrange(1, 4))}


def content(rng: random.Random) -> bytes:
    """Lines that are rows, nearly rows, or nothing of the kind."""
    good = [{"prompt": "abc" * 9, "output": "def" * 9}, {"text": "abc " * 30}, {"prompt": [1, 2], "output": [3, 4]}]
    good += [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    lines = list[bytes]()
    for _ in range(rng.randrange(1, 5)):
        row: Any = dict(rng.choice(good))
        if rng.random() < 0.7:
            row[rng.choice([*row, rng.choice(KEYS)])] = rubbish(rng)
        line = json.dumps(row if rng.random() < 0.9 else rubbish(rng)).encode()
        if rng.random() < 0.15:
            at = rng.randrange(len(line) + 1)
            line = line[:at] + rng.choice([b"", b"\xff", b"\0", b'"', b"9" * 5000, b"[" * 3000, b"\r"]) + line[at:]
        lines.append(line)
    whole = b"\n".join(lines)
    others = b"", whole.decode(errors="replace").encode("utf-16"), rng.randbytes(99), b"\xef\xbb\xbf" + whole
    return rng.choice([*[whole] * 8, *others])


def files(rng: random.Random, count: int) -> Problems:
    """Each is read, or refused with a sentence."""
    from vllm_specplugins.tools.bench.workloads import read_log, read_workloads
    from vllm_specplugins.tools.data import token_rows

    model = TREE / "examples" / "demo" / "model"
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(count):
            file = Path(folder) / f"odd{rng.choice(['.jsonl', '.txt', '', '.ndjson', '.gz'])}"
            file.write_bytes(content(rng))
            args = argparse.Namespace(
                model=str(model), num_prompts=4, max_concurrency=[1], trace=file, output_len=8, temperature=[0.0]
            )
            args.drafter, args.engine_args = rng.choice([None, "x"]), {}
            readers: list[Callable[[], Any]] = [
                lambda: read_workloads(file, Tokenizer(), 4, 16),  # noqa: B023
                lambda: token_rows([file], Tokenizer(), 16),  # noqa: B023
                lambda: read_log(args, {}),  # noqa: B023
            ]
            began = time.monotonic()
            try:
                rng.choice(readers)()
                problem = None
            except ConfigError as error:
                is_sentence = "\n" not in str(error) and len(str(error)) < 2000
                problem = None if is_sentence else f"a refusal of many lines: {error}"
            except BaseException as error:
                problem = f"{type(error).__name__}: {error} for {file.read_bytes()[:200]!r}"
            yield problem or (f"{time.monotonic() - began:.0f} s" if time.monotonic() - began > 20 else None)
            file.unlink()


class Hostile:
    def __init__(self, act: Callable[[], Any]):
        self.act: Callable[[], Any] | None = act

    def propose(self, batch: DraftBatch) -> Draft:
        if self.act is not None:
            self.act()
        return Draft(np.full((1, 2), 5, np.int32), np.full(1, 2, np.int32))

    def observe(self, feedback: Feedback) -> None: ...
    def forget(self, request_ids: Any) -> None: ...


def guards(rng: random.Random, count: int) -> Problems:
    """Four faults open the breaker; after its pause the class is asked again, and drafts if it behaves."""
    sys.stderr.flush()
    hook, threading.excepthook = threading.excepthook, lambda _: None
    batch = DraftBatch(["a"], [np.arange(9, dtype=np.int32)], np.full(1, 2, np.int32), [{}])
    nothing = np.zeros(1, np.int32)
    process = os.getpid()
    try:
        for number in range(count):
            names = rng.choices(list(ACTS), k=4)
            hostile = Hostile(lambda: None)
            clock = SimpleNamespace(now=float(number))
            barrier = FaultBarrier(hostile, 100, 2, time_budget_ms=300)
            barrier.guard._breaker.clock = lambda clock=clock: clock.now
            drafts = list[int]()
            try:
                for name in [*names, None, None]:
                    hostile.act = ACTS[name] if name else None
                    if name is None:
                        clock.now += 4000.0
                    drafts.append(int(barrier.propose(batch, Feedback(["a"], nothing, nothing, 1.0)).num_draft[0]))
                    ends = time.monotonic() + 10
                    while barrier.guard._thread and barrier.guard._thread.is_busy and time.monotonic() < ends:
                        time.sleep(0.01)
                problem = None if drafts[-1] == 2 else f"{drafts}"
            except BaseException as error:
                problem = f"{type(error).__name__}: {error}"
            if os.getpid() != process:
                os._exit(0)  # a copy that went on as the engine: the parent counts it
            while COPIES:
                status = os.waitpid(COPIES.pop(), 0)[1]
                if os.waitstatus_to_exitcode(status) != 1:
                    problem = problem or f"a copy goes on, and ends with {status}"
            yield problem and f"{names}: {problem}"
    finally:
        threading.excepthook = hook


def learn(rng: random.Random, count: int) -> Problems:
    """A save that fails at any place leaves the old weights whole, and the next one works."""
    from vllm_specplugins.structures.whole_file import SavedFolder

    with tempfile.TemporaryDirectory() as place:
        for number in range(count):
            path = Path(place) / f"weights{number % 7}"
            folder, version = SavedFolder(path), [number]
            fails_at = rng.randrange(5)

            def save(into: Path, version: Any = version, fails_at: Any = fails_at) -> None:
                for part in range(4):
                    if part == fails_at:
                        raise OSError(rng.choice([errno.ENOSPC, errno.EIO, errno.EDQUOT]), "planted")
                    (into / f"part{part}").write_text(str(version[0]))

            before = {file.name: file.read_text() for file in path.glob("part*")} if path.exists() else {}
            with suppress(OSError):
                folder.replace(save)
            now = {file.name: file.read_text() for file in path.glob("part*")}
            whole = dict.fromkeys((f"part{part}" for part in range(4)), str(number))
            folder.close()
            left = [file.name for file in path.iterdir() if not file.name.startswith("part")]
            yield None if now in ((whole,) if fails_at == 4 else (before,)) and not left else f"{before} {now} {left}"


CLASSES = {"files": files, "guards": guards, "learn": learn, "grammars": grammars, **PEERS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.getLogger("vllm.specplugins").setLevel(logging.CRITICAL)
    failed = 0
    for name in args.only:
        began, results = time.process_time(), list(CLASSES[name](random.Random(args.seed), args.count))
        problems, spent = Counter(problem[:120] for problem in results if problem), time.process_time() - began
        print(f"{name}: {len(results)} probes, {problems.total()} problems, {spent:.0f} s of CPU", flush=True)
        for problem, times in problems.most_common(5):
            print(f"PROBLEM {times} times: {problem}", flush=True)
        failed += problems.total()
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
