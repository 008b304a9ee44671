"""Requests in the engine that bypassed our front end, as those of vLLM's front end in Rust and of clients of the core.
No engine runs here; test_suffix_lookup.py sends such requests to one."""

import json
import logging
import socket
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from bad_options import known
from conftest import RUNNER
from prometheus_client import CollectorRegistry
from test_intake import TEXT, Configured, Sizes
from vllm import PoolingParams, SamplingParams, envs
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_specplugins.config import ConfigError
from vllm_specplugins.engine.frontend.entrances import _with_checked_options, check_front_end
from vllm_specplugins.engine.frontend.options import OptionsResolver, request_options, sealed
from vllm_specplugins.engine.metrics import port as metrics_port
from vllm_specplugins.engine.metrics.export import shown_on
from vllm_specplugins.engine.metrics.names import key
from vllm_specplugins.engine.metrics.port import address_of
from vllm_specplugins.structures.suffix.store_file import tenant_of

pytestmark = pytest.mark.skipif(RUNNER == "v2", reason="the same on both runners")
NONE = {"tenant": b""}  # no options
CHECKED: list[Mapping[str, Any]] = []


class Counts:
    """A custom proposer that notes which options it is asked about."""

    @staticmethod
    def check_options(options: Mapping[str, Any]) -> None:
        CHECKED.append(options)
        if "crash" in options:
            raise SystemExit("no")


def core(**config: Any) -> Any:
    """What the hook reads of an engine."""
    sizes = Sizes()
    sizes.served_model_name = "demo"  # type: ignore[attr-defined]
    parallel = SimpleNamespace(data_parallel_index=0, _api_process_rank=-1)
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            speculative_config=Configured(**config), model_config=sizes, parallel_config=parallel
        )
    )


def request(options: Any = None, salt: str | None = None) -> EngineCoreRequest:
    extra = {"other": 1} if options is None else {"specplugins": options, "other": 1}
    return EngineCoreRequest("a", [1, 2], None, SamplingParams(extra_args=extra), None, 0.0, None, salt, None)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the module under test logged: `caplog` has the lines of all threads, and of other tests' objects."""
    return [record.getMessage() for record in caplog.records if record.module == "entrances"]


def arrived(core: Any, core_request: EngineCoreRequest) -> Mapping[str, Any]:
    """The options of a request that went through vLLM's messages, as the worker reads them."""
    received = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(core_request))
    taken = _with_checked_options(lambda self, request: request, core, received)
    assert taken is received and taken.sampling_params.extra_args["other"] == 1
    return request_options(taken.sampling_params)


def test_options_are_checked(caplog: pytest.LogCaptureFixture) -> None:
    """Fails if the engine ignores options, believes them unchecked, or lets a bad one cost more than the options; if a
    reference as text costs the other options; or if every bad request logs a line."""
    engine = core(method="prompt_lookup")
    with caplog.at_level(logging.WARNING, "vllm.specplugins"):
        found = arrived(engine, request('{"max_draft": 2, "reference": [5, 6]}'))
        assert found["max_draft"] == 2 and found["reference"].tolist() == [5, 6] and not said(caplog)
        for raw in (json.dumps({"max_draft": 1, "reference": TEXT}), {"max_draft": 1, "reference": TEXT}):
            assert arrived(engine, request(raw)) == {"max_draft": 1, **NONE}
        unchecked = {"reference": [9999]}, {"reference": b"abcd"}, {"tenant": "b", "max_draft": -1}
        for bad in ("{", '{"max_draft": -1}', {"tenant": "b"}, [1], 7, *unchecked):
            assert arrived(engine, request(bad)) == NONE, bad
    sentences = said(caplog)
    assert len(sentences) == 2 and "Send token ids." in sentences[0]
    assert "specplugins must be a dictionary or its JSON text, not '{'." in sentences[1]
    assert arrived(engine, request(None)) == {} and arrived(engine, request(False)) == NONE
    plain = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=None))
    foreign = request("{")
    assert _with_checked_options(lambda self, request: request, plain, foreign) is foreign
    assert foreign.sampling_params.extra_args["specplugins"] == "{"
    pooled = EngineCoreRequest("a", [1], None, None, PoolingParams(), 0.0, None, None, None)
    assert _with_checked_options(lambda self, request: request, engine, pooled) is pooled


def test_hostile_options() -> None:
    """Fails if an option that the front end refuses raises in the engine, or travels on to workers."""
    engine = core(method="prompt_lookup")
    for hostile in known():
        if hostile.refused:
            assert arrived(engine, request(hostile.options)).keys() <= {"tenant", "max_draft"}


def test_front_end_and_engine_check_once() -> None:
    """Fails if the engine asks a proposer again about options that the front end has checked, loses their reference, or
    does not ask about others; and if a request's copies (n = 2), which may share parameters, lose them."""
    engine = core(method="custom", proposer="test_entrances:Counts")
    front = OptionsResolver(engine.vllm_config.speculative_config, engine.vllm_config.model_config, None)
    checked = __import__("test_entrances").CHECKED  # pytest has this file by another name
    checked.clear()
    resolved = sealed(request())
    assert "specplugins" not in resolved.sampling_params.extra_args
    resolved.sampling_params = front.resolved(request({"depth": 3, "reference": [7, 8]}).sampling_params)
    resolved = sealed(resolved)
    assert arrived(engine, resolved)["reference"].tolist() == [7, 8] and len(checked) == 1
    for _ in range(2):
        found = request_options(_with_checked_options(lambda self, own: own, engine, resolved).sampling_params)
        assert found["depth"] == 3 and found["reference"].tolist() == [7, 8] and len(checked) == 1
    assert arrived(engine, request({"depth": 4}))["depth"] == 4 and len(checked) == 2
    assert arrived(engine, request({"crash": 4})) == NONE and len(checked) == 3


def test_tenants() -> None:
    """Fails if a salt does not name the tenant, whichever entrance a request took, or a client names one; if requests
    that share parameters share a tenant; if a method that remembers nothing has one."""
    engine = core(method="suffix_lookup")
    assert arrived(engine, request(salt="a")) == {"tenant": tenant_of("a")} != {"tenant": tenant_of("b")}
    assert arrived(engine, request({"learn": False}, "b")) == {"learn": False, "tenant": tenant_of("b")}
    assert arrived(engine, request({"tenant": "b"}, "a")) == {"tenant": tenant_of("a")}
    forged = {"tenant": tenant_of("b"), "learn": False}
    assert arrived(engine, request(forged, "a"))["tenant"] == tenant_of("a")
    assert arrived(engine, request()) == {}
    first, second = request({"max_draft": 1}, "a"), request(None, "b")
    second.sampling_params = first.sampling_params
    for own in (first, second):
        _with_checked_options(lambda self, request: request, engine, own)
    assert request_options(first.sampling_params) == {"max_draft": 1, "tenant": tenant_of("a")}
    assert request_options(second.sampling_params) == {"max_draft": 1, "tenant": tenant_of("b")}
    assert arrived(core(method="prompt_lookup"), request(salt="a")) == {}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def test_metrics_without_a_front_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if a port shows no report, listens for other hosts unasked, or a second engine ends because the port is
    taken; or if a second data-parallel engine does not take the next port."""
    vllm_config, port = core(method="prompt_lookup").vllm_config, free_port()
    assert address_of(vllm_config) is None
    monkeypatch.setenv("VLLM_SPECPLUGINS_METRICS_PORT", str(port))
    address = address_of(vllm_config)
    assert address == ("127.0.0.1", port)
    vllm_config.parallel_config.data_parallel_index = 1
    assert address_of(vllm_config) == ("127.0.0.1", port + 1)
    vllm_config.parallel_config.data_parallel_index = 0
    show = shown_on(address, vllm_config)
    for _ in range(2):
        show({key("num_accepted_tokens", "0 prompt_lookup"): 3})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    labels = 'engine="0",method="prompt_lookup",model_name="demo",stage="0 prompt_lookup"'
    assert f"vllm:specplugins_num_accepted_tokens_total{{{labels}}} 6.0" in text
    shown_on(address, vllm_config)({key("num_accepted_tokens", "0 prompt_lookup"): 3})
    assert f"cannot export metrics on 127.0.0.1:{port}" in caplog.text
    for host in ("0.0.0.0", "[::1]", "localhost"):
        monkeypatch.setenv("VLLM_SPECPLUGINS_METRICS_PORT", f"{host}:{port}")
        assert str(address_of(vllm_config)) == f"{host}:{port}"
    for bad in ("http", "-1", "70000", "9" * 5000, ":9400", "0.0.0.0:", "http://host:1/metrics"):
        monkeypatch.setenv("VLLM_SPECPLUGINS_METRICS_PORT", bad)
        with pytest.raises(ConfigError, match="VLLM_SPECPLUGINS_METRICS_PORT must be a port from 0 to 65535, or HOST"):
            check_front_end(vllm_config)


def test_scrapes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a text that each scrape makes anew in the engine's process; a thread for each connection that says
    nothing; idle connections that keep a scraper out for ever."""
    monkeypatch.setattr(metrics_port._Handler, "timeout", 0.5)
    made, address = list[int](), metrics_port.Address("127.0.0.1", free_port())
    monkeypatch.setattr(metrics_port, "generate_latest", lambda registry: made.append(1) or b"metrics")
    metrics_port.serve(CollectorRegistry(), address)

    def scrape() -> bytes:
        with urllib.request.urlopen(f"http://{address}/metrics") as answer:
            text: bytes = answer.read()
        return text

    began = time.monotonic()
    assert {scrape() for _ in range(30)} == {b"metrics"} and len(made) <= 1 + time.monotonic() - began
    num_threads = threading.active_count()
    idle = [socket.create_connection(address) for _ in range(100)]
    time.sleep(0.1)
    assert threading.active_count() <= num_threads + metrics_port.MAX_CONNECTIONS
    deadline = time.monotonic() + 60
    while True:
        with suppress(OSError):
            assert scrape() == b"metrics"
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for connection in idle:
        connection.close()


def test_the_front_end_in_rust_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if a server with vLLM's Rust front end does not log what it lacks, or if an `LLM` logs it."""
    vllm_config = core(method="prompt_lookup").vllm_config
    check_front_end(vllm_config)
    monkeypatch.setitem(vars(envs), "VLLM_USE_RUST_FRONTEND", True)  # an engine in this process has cached them
    vllm_config.parallel_config._api_process_rank = 0
    check_front_end(vllm_config)
    assert not said(caplog)
    vllm_config.parallel_config._api_process_rank = -1
    check_front_end(vllm_config)
    [sentence] = said(caplog)
    assert "VLLM_USE_RUST_FRONTEND is set" in sentence
