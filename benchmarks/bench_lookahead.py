"""Tokens a step of one request with lookahead decoding, beside a lookup and with both: the chat model's answers, played
in transformers, one pass of the target a step; no engine.

    python benchmarks/bench_lookahead.py [--tasks chat maths ...] [--answers 8] [--tokens 64] [--window 5] [--out FILE]

The draft is the product's tree, which one pass reads with a mask of four dimensions, and the walk is the product's. A
lookup needs no pass, since its drafts do not change an answer. It returns 1 where an answer depends on drafts.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache
from vllm_specplugins.kernels.trees import walk
from vllm_specplugins.kernels.trees.reference import ancestors

from vllm_specplugins.config import LookaheadConfig, PromptLookupConfig
from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.proposers.lookahead import Lookahead, num_copied
from vllm_specplugins.proposers.prompt_lookup import PromptLookup
from vllm_specplugins.tools.base_model import BaseModel, load_tokenizer
from vllm_specplugins.tools.bench.workloads import make_workload

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
TASKS = "chat", "maths", "translation", "summary", "edit"
LOOKUP_LENGTH = 31  # the default of prompt_lookup
SLOT = torch.zeros(1, dtype=torch.int64)


class Answer:
    """A request that the target answers greedily, with the keys and values of its text so far."""

    def __init__(self, base: BaseModel, prompt: list[int], num_tokens: int):
        self._base, self._cache, self.text, self.num_prompt = base, DynamicCache(), list(prompt), len(prompt)
        self._ends, self._length = base.model.generation_config.eos_token_id, len(prompt) + num_tokens
        states = base.model.base_model(torch.tensor([prompt]), past_key_values=self._cache, use_cache=True)
        self.text.append(int(base.logits(states.last_hidden_state[0, -1:]).argmax()))
        self.steps: list[int] = []  # tokens of each

    @property
    def is_over(self) -> bool:
        return len(self.text) >= self._length or self.text[-1] == self._ends

    def drawn(self, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """The target's token after each node of a tree, [1, W] each."""
        (depths, bits), past, width = ancestors(parents), self._cache.get_seq_length(), tokens.shape[1]
        sees = (bits[0][:, None] >> torch.arange(width) & 1).bool()
        sees = torch.cat((torch.ones(width, past, dtype=torch.bool), sees), dim=1)[None, None]
        mask = torch.zeros(sees.shape).masked_fill_(~sees, torch.finfo(torch.float32).min)
        states = self._base.model.base_model(
            tokens, attention_mask=mask, position_ids=past + depths, past_key_values=self._cache, use_cache=True
        ).last_hidden_state[0]
        return self._base.logits(states).argmax(dim=-1)[None]

    def emit(self, tokens: Sequence[int], path: torch.Tensor, width: int) -> None:
        """Takes a step's tokens, and leaves of its keys and values those of the path."""
        past = self._cache.get_seq_length() - width
        places = torch.cat((torch.arange(past), past + path))
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[:, :, places], layer.values[:, :, places]
        self.text += tokens
        self.steps.append(len(tokens))


def lookup_of() -> PromptLookup:
    return PromptLookup(PromptLookupConfig(), ProposerContext(1 << 20, 1 << 20, 1, LOOKUP_LENGTH, lambda text: []))


def looked_up(lookup: PromptLookup, text: list[int], longest: int) -> tuple[list[int], float]:
    """A draft, and the length of its match."""
    batch = DraftBatch(["request"], [np.array(text, np.int32)], np.array([longest], np.int32), [{}])
    draft = lookup.propose(batch)
    assert draft.confidence is not None
    return draft.token_ids[0, : draft.num_draft[0]].tolist(), float(draft.confidence[0])


def play(base: BaseModel, prompt: list[int], num_tokens: int, config: LookaheadConfig, with_lookup: bool) -> Answer:
    """An answer with a window in each step where there is room for it."""
    answer, lookup = Answer(base, prompt, num_tokens), lookup_of()
    lookahead = Lookahead(config, ProposerContext(1 << 20, 1 << 20, 1, config.num_nodes, lambda text: []))
    lookahead.start(0, torch.tensor(prompt))
    num_new, size = 1, 2 * config.ngram - 1
    while not answer.is_over:
        recent, length = torch.tensor([([0] * size + answer.text)[-size:]]), torch.tensor([len(answer.text)])
        lookahead.extend(SLOT, recent, length, torch.tensor([num_new]))
        first = None
        if with_lookup:
            chain, match_length = looked_up(lookup, answer.text, config.num_nodes)
            first = torch.tensor([chain or [0]]), num_copied(torch.tensor([len(chain)]), torch.tensor([match_length]))
        tree, begin_of_window = lookahead.tree(SLOT, recent[:, -1], first)
        tokens, parents = (
            torch.cat((recent[:, -1:], tree.token_ids), dim=1),
            torch.cat((SLOT[None], tree.parents), dim=1),
        )
        drawn, begin = answer.drawn(tokens, parents), int(begin_of_window)
        end = begin + config.num_window
        if begin < config.num_nodes:
            last = drawn[:, end - config.window + 1 : end + 1]
            lookahead.read(SLOT, last, torch.ones(1, dtype=torch.bool))
            tokens[:, begin + 1 : end + 1] = -1
        emitted, count, path = walk(parents, tokens, drawn)
        num_new = int(count)
        answer.emit(emitted[0, :num_new].tolist(), path[0, :num_new], tokens.shape[1])
    return answer


def num_lookup_steps(text: list[int], num_prompt: int) -> int:
    lookup, at, steps = lookup_of(), num_prompt + 1, 0
    while at < len(text):
        draft, _ = looked_up(lookup, text[:at], LOOKUP_LENGTH)
        same = next((i for i, pair in enumerate(zip(draft, text[at:], strict=False)) if pair[0] != pair[1]), len(draft))
        at, steps = at + min(same, len(text) - at) + 1, steps + 1
    return steps


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", nargs="*", default=TASKS)
    parser.add_argument("--answers", type=int, default=8, help="of each task")
    parser.add_argument("--tokens", type=int, default=64)
    for name in ("window", "ngram", "guesses"):
        parser.add_argument(f"--{name}", type=int, default=getattr(LookaheadConfig(), name))
    parser.add_argument("--out", help="a file for the answers, one a line, for a test")
    arguments = parser.parse_args()
    from chat_model import chat_model

    base, tokenizer = BaseModel.load(str(chat_model()), "cpu"), load_tokenizer(str(chat_model()))
    config = LookaheadConfig(window=arguments.window, ngram=arguments.ngram, guesses=arguments.guesses)
    table, depends = Table(title="Tokens a step, one request, T = 0"), False
    for column in ("task", "answers", "tokens", "lookup", "lookahead", "both", "both to lookup"):
        table.add_column(column)
    rows: list[dict[str, Any]] = []
    for task in arguments.tasks:
        counts = np.zeros(4)
        prompts = make_workload(task, tokenizer, arguments.answers).prompts
        for prompt in prompts:
            alone, both = (play(base, prompt, arguments.tokens, config, with_lookup) for with_lookup in (False, True))
            end = len(prompt) + arguments.tokens
            depends |= alone.text[:end] != both.text[:end]
            text = alone.text[:end]
            num_steps = num_lookup_steps(text, len(prompt)), len(alone.steps), len(both.steps)
            counts += len(text) - len(prompt) - 1, *num_steps
            rows.append(
                {"task": task, "prompt": prompt, "output": text[len(prompt) :], "steps": [alone.steps, both.steps]}
            )
            if arguments.out:
                lines = (json.dumps(row, separators=(",", ":")) for row in rows)
                Path(arguments.out).write_text("".join(f"{line}\n" for line in lines))
        rates = counts[0] / counts[1:]
        words = *(f"{rate:.2f}" for rate in rates), f"{rates[2] / rates[0]:.2f}x"
        table.add_row(task, str(len(prompts)), f"{counts[0]:.0f}", *words)
        print(task, *words, flush=True)
    Console().print(table)
    return int(depends)


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
