"""Grammars of hostile clients: outputs are those without drafts, and no call takes long or much memory."""

import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from conftest import RUNNER
from hostile_grammars import hostile
from test_forced_tokens import TOKENIZER, Case, Writer
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.request import get_structured_output_key

pytestmark = pytest.mark.skipif(RUNNER == "v2", reason="the same on both runners")
K = 31
NUM_TOKENS = 24


@pytest.fixture
def little_memory() -> Iterator[None]:
    """At most 2 GiB more than now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def wanted(allowed: list[int], history: list[int]) -> int:
    """What a model would emit: of the allowed tokens one that goes by the history, at times of the shortest."""
    number = crc32(np.array([*history[-3:], len(history)], np.int32).tobytes())
    if number % 3:
        allowed = sorted(allowed, key=lambda token: len(TOKENIZER.decode([token])))[:2]
    return allowed[number % len(allowed)]


class Model:
    """Writes what a grammar allows, a step at a time, and verifies drafts. Counts the steps, and times the calls."""

    def __init__(self, case: Case, grammar: Any):
        self.case, self.grammar, self.request = case, grammar, Writer("a")
        self.steps, self.longest_s, self.longest_mask_s = 0, 0.0, 0.0

    def allowed(self) -> list[int]:
        began = time.thread_time()
        allowed = self.case.allowed(self.grammar)
        self.longest_mask_s = max(self.longest_mask_s, time.thread_time() - began)
        return allowed

    def write(self, drafts: bool) -> list[int]:
        tokens = self.request.all_token_ids
        while len(tokens) < NUM_TOKENS and not self.grammar.is_terminated():
            draft, before = list[int](), self.allowed()
            if drafts:
                began = time.thread_time()
                draft = self.case.forced.after(self.grammar, [], K, self.request)
                self.longest_s = max(self.longest_s, time.thread_time() - began)
                assert len(draft) <= K and self.allowed() == before
            self.steps += 1
            for guess in [*draft, None]:
                if self.grammar.is_terminated() or not (allowed := self.allowed()):
                    return tokens
                tokens.append(wanted(allowed, tokens))
                if not self.grammar.accept_tokens("", [tokens[-1]]):  # llguidance gives up, with drafts or without
                    return tokens
                if guess != tokens[-1]:
                    break
        return tokens


def compiled(case: Case, fields: dict[str, Any]) -> Any:
    """The grammar; None where the backend refuses it, as the front end does."""
    if isinstance(fields.get("json"), dict):
        fields = {"json": json.dumps(fields["json"])}
    kind, spec = get_structured_output_key(StructuredOutputsParams(**fields))
    try:
        return case.backend.compile_grammar(kind, spec)
    except (RuntimeError, ValueError):
        return None


@pytest.mark.parametrize(("backend", "num_seeds", "num_words"), [("xgrammar", 5, 800), ("guidance", 3, 80)])
def test_hostile_grammars(backend: str, num_seeds: int, num_words: int, little_memory: None) -> None:
    """More than 100 grammars of 17 classes. Fails if a text without an end is asked for, if a long one is read as a
    whole in each step, or if a grammar's state is another after a draft.
    """
    case, num_tried, num_steps = Case(backend), 0, np.zeros(2, int)
    for seed in range(num_seeds):
        for name, fields in hostile(seed, num_words):
            models = [Model(case, grammar) for _ in range(2) if (grammar := compiled(case, fields)) is not None]
            if not models:
                continue
            plain, drafting = models
            expected = plain.write(drafts=False)[:NUM_TOKENS]
            assert drafting.write(drafts=True)[:NUM_TOKENS] == expected, (seed, name)
            # llguidance takes long for each mask of a long text, with drafts or without.
            assert drafting.longest_s < max(0.03, 4 * plain.longest_mask_s), (seed, name)
            num_tried += 1
            num_steps += (plain.steps, drafting.steps)
    assert num_tried >= 12 * num_seeds and num_steps[1] < 0.7 * num_steps[0]
