"""The store of a server that is ended at a random moment: nothing that it had answered is lost.

SPECPLUGINS_ENDS=50 has it ended so often.
"""

import json
import os
import random
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import DEMO_MODEL, RUNNER
from forked import started

from vllm_specplugins.structures.suffix.store_file import HEADER, StoreFile

pytestmark = [pytest.mark.slow, pytest.mark.skipif(RUNNER == "v2", reason="files are the same on both runners")]
NUM_ENDS = int(os.environ.get("SPECPLUGINS_ENDS", "2"))
NUM_CLIENTS = 3
SYNC_S = 1
LATE_S = 3  # so much earlier an answer is in the store after SIGKILL, on a slow and busy machine
Answer = tuple[float, list[int]]  # when it had come whole, its tokens


class Server:
    """One that answers, with a store at `path`."""

    def __init__(self, path: Path):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        config = {"method": "suffix_lookup", "num_speculative_tokens": 4, "store_path": str(path)}
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "NO_PROXY": "127.0.0.1"}
        config |= {"store_bytes": 1 << 24, "save_every_s": SYNC_S}
        arguments = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO_MODEL), "--port", str(port)]
        arguments += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
        arguments += ["--speculative-config", json.dumps(config)]
        self.pid = int(started(arguments, environment).pid or 0)
        for _ in range(3000):
            try:
                urllib.request.urlopen(f"{self.url}/health").close()
                return
            except OSError:
                assert self.is_there, "the server did not come up"
                time.sleep(0.2)
        raise AssertionError("the server did not come up")

    @property
    def is_there(self) -> bool:
        return psutil.pid_exists(self.pid)

    @property
    def has_engine(self) -> bool:
        try:
            children = psutil.Process(self.pid).children(recursive=True)
            return any(child.status() != psutil.STATUS_ZOMBIE for child in children)
        except psutil.NoSuchProcess:
            return False

    def ask(self, rng: random.Random) -> list[int]:
        body = {"prompt": [rng.randrange(10, 500) for _ in range(12)], "max_tokens": rng.randrange(2, 40)}
        body |= {"temperature": 1.0, "ignore_eos": True, "return_token_ids": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            ids: list[int] = json.load(answer)["choices"][0]["token_ids"]
        return ids

    def ask_on(self, seed: int, answers: list[Answer]) -> None:
        """Until it does not answer any more."""
        rng = random.Random(seed)
        try:
            while True:
                ids = self.ask(rng)
                answers.append((time.monotonic(), ids))
                if rng.random() < 0.2:
                    time.sleep(rng.random())
        except (OSError, ValueError, KeyError):  # an answer that was cut off, or an error in its place
            return


def stored(path: Path) -> list[bytes]:
    mark = path.read_bytes()[HEADER.size - 16 : HEADER.size]
    return [text.tokens.tobytes() for text in StoreFile(path, mark, 1 << 20, 1 << 30).read()]


def serve_until(server: Server, number: int, rng: random.Random, kind: signal.Signals) -> tuple[list[Answer], float]:
    """What it answered, and when it was ended: the front end alone by SIGTERM, all of it by SIGKILL."""
    answers: list[Answer] = []
    clients = [
        threading.Thread(target=server.ask_on, args=(100 * number + client, answers)) for client in range(NUM_CLIENTS)
    ]
    for client in clients:
        client.start()
    while len(answers) < 3:
        time.sleep(0.01)
    time.sleep(LATE_S + rng.random() * 2)
    end = time.monotonic()
    (os.kill if kind == signal.SIGTERM else os.killpg)(server.pid, kind)
    while server.is_there and server.has_engine:
        time.sleep(0.05)
    if server.is_there:  # vLLM's front end waits for clients that it will not answer
        os.killpg(server.pid, signal.SIGKILL)
    for client in clients:
        client.join(60)
    return answers, end


def test_ends(tmp_path: Path) -> None:
    """A server is ended again and again, by SIGTERM and by SIGKILL in turn, and begins with what it had. At SIGTERM
    nothing that was answered is lost, at SIGKILL nothing but what came last. Kills: an output that waits
    for the next request, or for a save; an engine that is killed before it has saved; a file that a kill spoils.
    """
    path, rng, expected = tmp_path / "store", random.Random(NUM_ENDS), []
    for number in range(NUM_ENDS):
        kind = (signal.SIGTERM, signal.SIGKILL)[number % 2]
        answers, end = serve_until(Server(path), number, rng, kind)
        last = end - (LATE_S if kind == signal.SIGKILL else 0)
        new = [np.array(ids, np.int32).tobytes() for when, ids in answers if when < last]
        texts = stored(path)
        lost = [ids for ids in new if not any(ids in text for text in texts)]  # drafts may have gone past its end
        late = [ids for when, ids in answers if when >= last]
        print(f"{kind.name}: {len(new)} answered, {len(lost)} lost, {len(late)} later, {len(texts)} in the store")
        expected += new
        assert not lost and len(texts) >= len(expected)


def test_the_last_of_an_idle_server(tmp_path: Path) -> None:
    """The last output is in the file while the server is idle. Fails if saving waits for a step."""
    server = Server(tmp_path / "store")
    try:
        ids = np.array(server.ask(random.Random(0)), np.int32).tobytes()
        deadline = time.monotonic() + 60
        while not any(ids in text for text in stored(tmp_path / "store")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with urllib.request.urlopen(f"{server.url}/metrics") as answer:
            words = answer.read().decode()
        assert "specplugins_stored_outputs" in words and "specplugins_exit_layer{" not in words
    finally:
        os.killpg(server.pid, signal.SIGKILL)
