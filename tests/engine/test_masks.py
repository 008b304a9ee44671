"""Masks of structured output: few drafts until more were accepted, and no rows behind the step's longest draft."""

from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import INTERPRETED, RUNNER
from test_forced_tokens import SIZE, Case, ids
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.structured_output import StructuredOutputManager

from vllm_specplugins.engine import masks, room
from vllm_specplugins.engine.grammar.scheduler import _MAX_BESIDE_OTHERS, GrammarScheduler
from vllm_specplugins.engine.messages import news_of
from vllm_specplugins.engine.scheduler import ChoosingScheduler, PlannedScheduler
from vllm_specplugins.engine.switch import Switched

K = 31
ON_V1 = pytest.mark.skipif(RUNNER == "v2", reason="the same on both runners")
CHUNK = {"is_prefill_chunk": False}
TEXTS = ['{"a', '{"abcdefgh', '{"a": "b and c", "d": "']


class Theirs:
    """The methods of vLLM's schedulers, with a step's drafts."""

    def __init__(self, *requests: Any):
        self.requests = {request.request_id: request for request in requests}

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        for request_id, draft in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            if request_id in self.requests:
                self.requests[request_id].spec_token_ids = draft

    def update_draft_token_ids_in_output(self, draft_token_ids: DraftTokenIds, scheduler_output: Any) -> None:
        for request_id in draft_token_ids.req_ids:
            if request_id in self.requests:
                self.requests[request_id].spec_token_ids = [-1] * K  # the plan of the next step

    def _update_after_schedule(self, scheduler_output: Any) -> None: ...


class Ours(room.LimitsMasks, Switched, Theirs):
    dynamic_sd_lookup: Any = None


class Refusing(Theirs):
    """A grammar takes the tokens below 10."""

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        super().update_draft_token_ids(draft_token_ids)
        for request in self.requests.values():
            draft = request.spec_token_ids if not request.is_prefill_chunk else []
            request.spec_token_ids = list(takewhile(lambda token: 0 <= token < 10, draft))


class Notes(room.LimitsMasks, Switched, Refusing):
    dynamic_sd_lookup: Any = None


@ON_V1
@pytest.mark.parametrize("ahead", [False, True])
def test_few_drafts_until_more_were_accepted(ahead: bool) -> None:
    """Kills: 31 drafts for a request that has proven nothing (V1's default before); a limit for requests without
    structured output, or that stays when many were accepted."""
    json, plain = (
        SimpleNamespace(
            request_id=name, use_structured_output=name == "json", num_tokens=10, spec_token_ids=[], **CHUNK
        )
        for name in ("json", "plain")
    )
    scheduler: Any = Ours(json, plain)

    def lengths(emitted: int) -> tuple[int, int]:
        for request in (json, plain):
            request.num_tokens += emitted
        drafts = DraftTokenIds(["json", "gone", "plain"], [list(range(K))] * 3)
        if ahead:
            scheduler.update_draft_token_ids_in_output(drafts, None)
        else:
            scheduler.update_draft_token_ids(drafts)
        assert drafts.draft_token_ids == [list(range(K))] * 3  # the worker's
        return len(json.spec_token_ids), len(plain.spec_token_ids)

    few = room.UNPROVEN
    assert [lengths(emitted) for emitted in (1, 1, few, few + 1, K + 1, 1)] == [
        (few, K), (few, K), (few, K), (K, K), (K, K), (few, K)
    ]  # fmt: skip
    for kind in (ChoosingScheduler, PlannedScheduler, GrammarScheduler):
        assert issubclass(kind, room.LimitsMasks)


@ON_V1
def test_the_page_has_the_limits() -> None:
    """Fails if docs/structured-output.md names other limits of a draft."""
    page = " ".join((Path(__file__).parents[2] / "docs" / "structured-output.md").read_text().split())
    assert f"each request gets at most {_MAX_BESIDE_OTHERS} forced tokens per step" in page
    num = room.UNPROVEN
    assert f"accepts more than {num} of its draft tokens, a request with a grammar gets at most {num}," in page


@ON_V1
def test_a_refused_token_is_told_once() -> None:
    """The worker learns which requests' grammars refused the token after the scheduled draft. Kills: a draft that
    waited for a step with room and is told early; one that the step has cut further; NEVER and unread prompts."""
    drafts = {"cut": [1, 2, 30], "none": [30], "whole": [1, 2], "never": [-1], "chunk": [30], "waits": [1, 30]}
    drafts |= {"short": [1, 2, 30], "plain": [1]}
    each = (
        SimpleNamespace(request_id=name, use_structured_output=name != "plain", num_tokens=9, spec_token_ids=[],
                        is_prefill_chunk=name == "chunk")
        for name in drafts
    )  # fmt: skip
    scheduler: Any = Notes(*each)
    scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))

    def told(*names: str) -> tuple[str, ...]:
        ids = {name: scheduler.requests[name].spec_token_ids for name in names}
        ids = {name: tokens[: 1 if name == "short" else None] for name, tokens in ids.items() if tokens}
        step: Any = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1), scheduled_spec_decode_tokens=ids)
        scheduler._update_after_schedule(step)
        return news_of(step).refused

    assert told(*drafts.keys() - {"waits"}) == ("cut", "none")
    assert told("cut", "waits") == ("waits",) and told("waits") == ()


@ON_V1
def test_the_switch_forgets_drafts() -> None:
    """A grammar cut a draft, and 100 tokens later drafting is on again. Kills: a refused token of before, or of a draft
    that arrived while drafting was off; a request that is proven by what it emitted without drafts."""
    json = SimpleNamespace(request_id="json", use_structured_output=True, num_tokens=9, spec_token_ids=[], **CHUNK)
    scheduler: Any = Notes(json)

    def drafted() -> int:
        scheduler.update_draft_token_ids(DraftTokenIds(["json"], [[1, 2, 3, 4, 5, 6, 7, 30]]))
        return len(json.spec_token_ids)

    def refused() -> tuple[str, ...]:
        step: Any = SimpleNamespace(num_scheduled_tokens={"json": 1}, scheduled_spec_decode_tokens={})
        scheduler._update_after_schedule(step)
        return news_of(step).refused

    assert drafted() == room.UNPROVEN
    json.num_tokens = 20
    assert drafted() == 7
    scheduler.switch(True)
    assert refused() == () and drafted() == 0 and refused() == ()
    json.num_tokens = 120
    scheduler.switch(False)
    assert refused() == () and drafted() == room.UNPROVEN


def manager(num_tokens: int, max_num_seqs: int = 8) -> tuple[Any, Case]:
    config = SimpleNamespace(
        num_speculative_tokens=num_tokens,
        speculative_config=SimpleNamespace(),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        model_config=SimpleNamespace(is_diffusion=False, skip_tokenizer_init=True),
        parallel_config=SimpleNamespace(distributed_executor_backend=None),
        structured_outputs_config=SimpleNamespace(enable_in_reasoning=False),
    )
    made, case = StructuredOutputManager(config), Case("xgrammar", any_whitespace=True)
    made.backend = case.backend
    return made, case


original = getattr(StructuredOutputManager.grammar_bitmask, "__wrapped__", StructuredOutputManager.grammar_bitmask)


def asked(case: Case, drafts: list[int]) -> tuple[dict[str, Any], list[str], dict[str, list[int]]]:
    """Requests that have written a text, and have drafts of these lengths."""
    requests, tokens = dict[str, Any](), dict[str, list[int]]()
    for i, num in enumerate(drafts):
        grammar = case.compile({"type": "object"}, TEXTS[i % 3])
        inner = SimpleNamespace(grammar=grammar, reasoning_ended=True, masked_reasoning_end_ids=())
        requests[str(i)] = SimpleNamespace(structured_output_request=inner, request_id=str(i))
        if num:
            tokens[str(i)] = (ids("abcdefghijklmnopqrstuvwxyz") * 9)[:num]
    return requests, list(requests), tokens


def rows(filled: np.ndarray, drafts: list[int]) -> list[np.ndarray]:
    """The rows that are filled, request by request, of vLLM 0.32's masks, or of 0.33's with their fixed width."""
    width, packed = len(filled) // len(drafts), len(filled) == sum(1 + num for num in drafts)
    starts = np.cumsum([0, *(1 + num for num in drafts)]) if packed else np.arange(len(drafts)) * width
    return [filled[start : start + 1 + num].copy() for start, num in zip(starts, drafts, strict=False)]


@ON_V1
def test_no_rows_behind_the_longest_draft() -> None:
    """Rows are those of vLLM, and 8 requests without drafts have 8 of them. Kills: a step that has as many rows as K
    allows; a buffer that stays as small as a step of short drafts needs."""
    made, case = manager(K)
    for drafts in ([0, 0], [0] * 8, [2, 0, 1], [K, 0], [5] * 8, [K] * 8, [0] * 8):
        arguments = asked(case, drafts)
        expected = rows(original(_fresh(case), *arguments), drafts)
        filled = masks._fill(original, made, *arguments)
        assert len(filled) <= len(drafts) * (1 << max(drafts).bit_length())
        for own, theirs in zip(rows(filled, drafts), expected, strict=True):
            assert np.array_equal(own, theirs)
        assert made.vllm_config.num_speculative_tokens == K


def _fresh(case: Case) -> Any:
    made, _ = manager(K)
    made.backend = case.backend
    return made


@ON_V1
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_v1_applies_masks_as_vllm(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests of three have masks, in another order than in the batch, and one has drafts. Kills: rows of another
    request; a request without a grammar that is masked; xgrammar's loop where it is slow."""
    from vllm.v1.structured_output import utils

    from vllm_specplugins.engine.v1.runner import _with_fast_masks

    size, rng = 77, np.random.default_rng(0)
    masks = rng.integers(-(2**31), 2**31, (4, 3)).astype(np.int32)
    batch = (
        SimpleNamespace(scheduled_spec_decode_tokens={"a": [5, 6]}),
        SimpleNamespace(structured_output_request_ids=["a", "c"], grammar_bitmask=masks),
        SimpleNamespace(req_ids=["b", "c", "a"]),
    )
    theirs = torch.randn(5, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours = theirs.clone()
    utils.apply_grammar_bitmask(*batch, theirs)  # type: ignore[arg-type]
    monkeypatch.setattr(utils.xgr, "apply_token_bitmask_inplace", None)
    _with_fast_masks(lambda grammar_output: utils.apply_grammar_bitmask(*batch, ours), None)  # type: ignore[arg-type]
    assert torch.equal(ours, theirs) and theirs[0].isfinite().all() and not theirs[1:].isfinite().all(1).any()


@ON_V1
def test_threads_fill_many_masks() -> None:
    """More than 128 requests without drafts are filled by vLLM's threads, as without speculation. Fails if K alone
    makes vLLM assume drafts."""
    made, case = manager(K, max_num_seqs=160)
    batches: list[Any] = []
    submit = made._async_submit_fill_bitmask

    def note(batch: Any) -> Any:
        batches.append(batch)
        return submit(batch)

    made._async_submit_fill_bitmask = note
    filled = masks._fill(original, made, *asked(case, [0] * 150))
    assert len(batches) == -(-150 // 16) and len(filled) == 150


@pytest.mark.skipif(not INTERPRETED, reason="Model Runner V2's, without a GPU")
def test_a_worker_applies_short_masks() -> None:
    """Logits that a mask forbids are -inf, at the positions of each request. Kills: a worker that counts K + 1 rows a
    request where fewer come (vLLM 0.33)."""
    from vllm.v1.worker.gpu import structured_outputs
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    apply = getattr(
        StructuredOutputsWorker.apply_grammar_bitmask, "__wrapped__", StructuredOutputsWorker.apply_grammar_bitmask
    )
    if hasattr(structured_outputs, "_build_grammar_mapping"):
        pytest.skip("vLLM 0.32 sends no other rows")
    made, case = manager(K)
    worker = StructuredOutputsWorker(8 * (K + 1), SIZE, torch.device("cpu"), mask_stride=K + 1)
    for drafts in ([3, 0, 1], [0] * 8, [K, 2]):
        requests, names, tokens = asked(case, drafts)
        filled = masks._fill(original, made, requests, names, tokens)
        ends = np.cumsum([0, *(1 + num for num in drafts)])
        batch: Any = SimpleNamespace(req_ids=names, cu_num_logits=torch.from_numpy(ends.astype(np.int32)))
        logits = torch.zeros(int(ends[-1]), SIZE)
        masks._apply(apply, worker, logits, batch, names, filled)
        bits = np.unpackbits(np.concatenate(rows(filled, drafts)).view(np.uint8), axis=1, bitorder="little")
        assert np.array_equal(logits.numpy() == 0, bits[:, :SIZE] == 1)


def test_a_slow_grammar_gets_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a client's regular expression for which all wait as often as drafts have tokens; a grammar that is slow
    and silences others."""
    now, calls = SimpleNamespace(s=0.0), list[str]()
    monkeypatch.setattr(masks, "time", SimpleNamespace(thread_time=lambda: now.s))

    class Request:
        def __init__(self, name: str, seconds: float):
            self.name, self.seconds = name, seconds

    def validate(manager: Any, request: Request, token_ids: list[int]) -> list[int]:
        calls.append(request.name)
        now.s += request.seconds
        return token_ids

    slow, fast = Request("slow", 0.9), Request("fast", 0.001)
    drafts = [masks._validate(validate, None, request, [1, 2]) for request in (slow, fast, slow, fast)]
    assert drafts == [[1, 2], [1, 2], [], [1, 2]] and calls == ["slow", "fast", "fast"]
