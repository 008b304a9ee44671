"""Exports the plugin's metrics on a port of an engine's process. A scrape runs in the process that drafts, so the text
is built at most once a second, and connections are few and short."""

import os
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from threading import BoundedSemaphore, Lock, Thread
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.exposition import ThreadingWSGIServer
from vllm.config import VllmConfig

from vllm_specplugins.config import ConfigError, brief

_PORT = "VLLM_SPECPLUGINS_METRICS_PORT"
KEEP_S = 1.0  # of a text
MAX_CONNECTIONS, TIMEOUT_S = 8, 5.0


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address_of(vllm_config: VllmConfig) -> Address | None:
    """Returns the address on which an engine's process exports metrics: the environment variable, a port or HOST:PORT,
    plus the engine's index. None: vLLM's front end exports them. Raises ConfigError for an invalid address."""
    text, engine = os.environ.get(_PORT) or "0", vllm_config.parallel_config.data_parallel_index
    host, _, port = text.rpartition(":")
    if not (port.isdecimal() and len(port) < 6 and int(port) + engine < 1 << 16) or (":" in text) != bool(host):
        raise ConfigError(f"{_PORT} must be a port from 0 to 65535, or HOST:PORT, not {brief(text)}.")
    return Address(host.strip("[]") or "127.0.0.1", int(port) + engine) if int(port) else None


def serve(registry: CollectorRegistry, address: Address) -> None:
    """Serves the metrics in a thread. Raises OSError if the address is not free."""
    kind = type("Server", (_Server,), {"address_family": socket.AF_INET6 if ":" in address.host else socket.AF_INET})
    server: WSGIServer = make_server(*address, _once_a_second(partial(generate_latest, registry)), kind, _Handler)
    Thread(target=server.serve_forever, name="specplugins-metrics", daemon=True).start()


def _once_a_second(make: Callable[[], bytes]) -> Callable[[Any, Any], Iterable[bytes]]:
    lock, latest = Lock(), [(-KEEP_S, b"")]

    def app(_: Any, start_response: Any) -> Iterable[bytes]:
        with lock:
            if time.monotonic() >= latest[0][0] + KEEP_S:
                latest[0] = time.monotonic(), make()
            text = latest[0][1]
        start_response("200 OK", [("Content-Type", CONTENT_TYPE_LATEST), ("Content-Length", f"{len(text)}")])
        return [text]

    return app


class _Handler(WSGIRequestHandler):
    timeout = TIMEOUT_S

    def log_message(self, *args: Any) -> None:
        pass


class _Server(ThreadingWSGIServer):
    """Closes connections beyond MAX_CONNECTIONS at once."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._free = BoundedSemaphore(MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs no line for a client that disconnects."""
