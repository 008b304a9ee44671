"""Probes of the method `grammar`: hostile grammars of clients that forced tokens are read from, without an engine. Each
yields None, or a problem in words."""

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "engine"))
K, MAX_WORDS, MAX_STEPS, MAX_S = 15, 60, 12, 0.25


class Grammars:
    """vLLM's backends with the demo model's tokenizer, and what reads their forced tokens."""

    def __init__(self) -> None:
        from transformers import AutoTokenizer
        from vllm.v1.structured_output.backend_guidance import GuidanceBackend
        from vllm.v1.structured_output.backend_types import StructuredOutputOptions
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        from vllm_specplugins.engine.grammar.forced import ForcedTokens

        tokenizer: Any = AutoTokenizer.from_pretrained(ROOT / "examples" / "demo" / "model")
        outputs = SimpleNamespace(disable_any_whitespace=False, disable_additional_properties=False)
        config: Any = SimpleNamespace(
            structured_outputs_config=outputs,
            model_config=None,
            speculative_config=SimpleNamespace(num_speculative_tokens=K),
        )
        kinds: list[Any] = [XgrammarBackend, GuidanceBackend]
        self.backends = [kind(config, tokenizer=tokenizer, vocab_size=len(tokenizer)) for kind in kinds]
        self.forced = [
            ForcedTokens(tokenizer, len(tokenizer), lambda own=own: own.allocate_token_bitmask(1))
            for own in self.backends
        ]
        self.kinds = {
            "json": StructuredOutputOptions.JSON,
            "regex": StructuredOutputOptions.REGEX,
            "grammar": StructuredOutputOptions.GRAMMAR,
        }

    def compiled(self, index: int, fields: dict[str, Any]) -> Any:
        """None where the backend refuses it, as a server would."""
        [(kind, spec)] = fields.items()
        if kind not in self.kinds:
            return None
        try:
            return self.backends[index].compile_grammar(self.kinds[kind], json.dumps(spec) if kind == "json" else spec)
        except Exception:
            return None

    def allowed(self, index: int, grammar: Any) -> list[int]:
        bitmask = self.backends[index].allocate_token_bitmask(1)
        if grammar.is_terminated():
            return []
        grammar.fill_bitmask(bitmask, 0)
        return np.flatnonzero(np.unpackbits(bitmask.numpy().view(np.uint8), bitorder="little")).tolist()


class Writer:
    """A request."""

    def __init__(self, cache_salt: str | None):
        self.cache_salt, self.all_token_ids = cache_salt, list[int]()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def grammars(rng: random.Random, count: int) -> Iterator[str | None]:
    """What is forced the grammar takes, its state stays, and a call takes its time. A request's text goes on as forced,
    or otherwise."""
    from hostile_grammars import hostile

    own, seed = Grammars(), rng.randrange(1 << 30)
    while count > 0:
        seed += 1
        for name, fields in hostile(seed, rng.randrange(1, MAX_WORDS)):
            index = rng.randrange(len(own.backends))
            grammar, request = own.compiled(index, fields), Writer(rng.choice([None, "a", "b"]))
            for _ in range(MAX_STEPS if grammar else 0):
                if count <= 0:
                    return
                allowed = own.allowed(index, grammar)
                if not allowed:
                    break
                draft = rng.choice([[], [], [rng.choice(allowed)], [rng.randrange(3000) for _ in range(3)]])
                began, count = time.thread_time(), count - 1
                try:
                    tokens = own.forced[index].after(grammar, draft, rng.randrange(K + 1), request)
                    spent = time.thread_time() - began
                    problem = f"{spent:.2f} s of CPU" if spent > MAX_S else None
                    if own.allowed(index, grammar) != allowed:
                        problem = "another state than before"
                    if tokens and grammar.validate_tokens([*draft, *tokens]) != [*draft, *tokens]:
                        problem = f"{tokens} are not allowed after {draft}"
                except BaseException as error:
                    tokens, problem = [], f"{type(error).__name__}: {error}"
                yield problem and f"{name} {seed}: {problem}"
                taken = [*draft, *tokens] if tokens and rng.random() < 0.7 else [rng.choice(allowed)]
                if not grammar.accept_tokens("", taken):
                    break
                request.all_token_ids += taken
