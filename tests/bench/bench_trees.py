"""Tokens a step of one request with trees, beside chains: outputs that the demo model made, played; no engine.

    python tests/bench/bench_trees.py [MODEL] [--exits 1 2] [--jump FOLDER] [--prompts 24] [--nodes 15]

With a one-hot q an output does not depend on drafts. So the target's outputs are made once, at temperatures 0, 0.8 and
1; our proposers draft at every place of them, with the layers of transformers in place of vLLM's; and a step's tokens
are how far the output is a path of the draft. Outputs that repeat themselves are left out. It returns 1 where a tree
has less than 1.2 times the tokens of the best chain of 4, 8 and 15.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache
from vllm_specplugins.kernels.rejection import Sampling
from vllm_specplugins.kernels.rejection.drafts import coupled_sample

from vllm_specplugins.config import EarlyExitConfig, JumpConfig
from vllm_specplugins.draft import ProposerContext
from vllm_specplugins.proposers.early_exit import EarlyExit
from vllm_specplugins.proposers.jump import Jump
from vllm_specplugins.target import Sampling as Drawn
from vllm_specplugins.target import Target
from vllm_specplugins.tools.base_model import BaseModel, load_tokenizer

DEMO = Path(__file__).parents[2] / "examples" / "demo"
TEMPERATURES, CHAINS, BAR = (0.0, 0.8, 1.0), (4, 8, 15), 1.2
PROMPT, OUTPUT, NGRAM = 192, 32, 6
NUM_TEXTS, STRIDE = 60, 128
Accepted = list[int]  # of the draft at each place of an output


class Played:
    """`target.PagedForward` of one text at many places at once: requests that have read it up to there."""

    def __init__(self, base: BaseModel, text: list[int], places: torch.Tensor):
        self._base, self._text, self._places = base, torch.tensor([text]), places
        self._caches: dict[int, Any] = {}
        self.logits: Callable[..., torch.Tensor] = base.logits

    def hidden_states(
        self, end_layer: int, token_ids: torch.Tensor, positions: torch.Tensor, normed: bool = True
    ) -> torch.Tensor:
        body, length = self._base.cut(0, end_layer, normed), self._text.shape[1]
        if end_layer not in self._caches:
            self._caches[end_layer] = cache = DynamicCache()
            body(self._text, past_key_values=cache, use_cache=True)
            cache.batch_repeat_interleave(len(self._places))
        cache = self._caches[end_layer]
        fed = cache.get_seq_length() - length
        seen = torch.arange(length) < self._places[:, None]  # what stands before the newest token
        seen = torch.cat((seen, seen.new_ones(len(seen), fed + 1)), dim=1)[:, None, None]
        mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
        arguments = {"attention_mask": mask, "position_ids": positions[:, None], "past_key_values": cache}
        states: torch.Tensor = body(token_ids.long()[:, None], **arguments).last_hidden_state[:, 0]
        return states

    def embeddings(self, token_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._base.model.get_input_embeddings()(token_ids.long())
        return found

    def hidden_states_of(self, first: int, end: int, states: torch.Tensor, *_: Any) -> torch.Tensor:
        assert first == end == self._base.num_layers, "a jump that ends after the last layer"
        found: torch.Tensor = self._base.model.base_model.norm(states)
        return found

    def argmax(self, states: torch.Tensor) -> torch.Tensor:
        return self.logits(states).argmax(-1)


def target_of(base: BaseModel, prompt: list[int], output: list[int], temperature: float) -> Target:
    """The places before each of an output's tokens."""
    text, places = [*prompt, *output], torch.arange(OUTPUT) + len(prompt) - 1
    [states] = base.hidden_states([text])
    verified = Sampling(torch.full((OUTPUT,), temperature), torch.zeros(OUTPUT, dtype=torch.int64))
    before = states[-1][places - 1]  # that the newest token was sampled from
    newest = torch.tensor(text)[places].int()
    drawn = Drawn(verified.temperature, verified.seeds, verified)
    return Target(Played(base, text, places), newest, places + 1, before, drawn)


def chains(proposer: Any, target: Target, output: list[int]) -> dict[str, Accepted]:
    token_ids, _ = proposer.draft_from(target, max(CHAINS))
    found = [leading(row, output[place:]) for place, row in enumerate(token_ids.tolist())]
    return {f"chain {length}": [min(length, own) for own in found] for length in CHAINS}


def leading(draft: list[int], output: list[int]) -> int:
    return next((at for at, pair in enumerate(zip(draft, output, strict=False)) if pair[0] != pair[1]), len(output))


def tree(proposer: Any, target: Target, output: list[int], num_nodes: int) -> dict[str, Accepted]:
    grown = proposer.draft_tree(target, num_nodes, torch.ones(OUTPUT, dtype=torch.bool))
    found = []
    for place, (tokens, parents) in enumerate(zip(grown.token_ids.tolist(), grown.parents.tolist(), strict=True)):
        children = {pair: node for node, pair in enumerate(zip(parents, tokens, strict=True), 1)}
        node, depth = 0, 0
        while place + depth < OUTPUT and (node, output[place + depth]) in children:
            node, depth = children[node, output[place + depth]], depth + 1
        found.append(depth)
    return {f"tree {num_nodes}": found}


def num_steps(accepted: Accepted) -> int:
    place = steps = 0
    while place < OUTPUT:
        place, steps = place + accepted[place] + 1, steps + 1
    return steps


def repeats(output: Sequence[int]) -> bool:
    ngrams = [tuple(output[at : at + NGRAM]) for at in range(len(output) - NGRAM + 1)]
    return len(set(ngrams)) < len(ngrams)


def outputs_of(base: BaseModel, prompts: list[list[int]], temperature: float) -> list[list[int]]:
    sampling = Sampling(torch.full((len(prompts),), temperature), torch.zeros(len(prompts), dtype=torch.int64))

    def choose(logits: torch.Tensor, place: int) -> torch.Tensor:
        return coupled_sample(logits, torch.full((len(logits),), place), sampling)

    rows = base.go_on(torch.tensor(prompts), PROMPT + OUTPUT, choose)
    return [row[PROMPT:] for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default=str(DEMO / "model"))
    parser.add_argument("--exits", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--jump", help="folder of a trained jump that ends after the last layer")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--nodes", type=int, default=15)
    arguments = parser.parse_args()
    base, tokenizer = BaseModel.load(arguments.model, "cpu"), load_tokenizer(arguments.model)
    sys.path.insert(0, str(DEMO))
    from prompts import load_prompts

    texts = [tokenizer.encode(text, add_special_tokens=False) for text in load_prompts("continue", NUM_TEXTS)]
    # The end of each text first, then what comes before it.
    ends = [(back, text[: len(text) - back]) for text in texts for back in range(0, len(text) - PROMPT, STRIDE)]
    prompts = [text[-PROMPT:] for _, text in sorted(ends, key=lambda pair: pair[0])][: arguments.prompts]
    context = ProposerContext(len(base.head_weight), 4096, 1, max(*CHAINS, arguments.nodes), lambda text: [])
    parts: dict[str, Any] = {
        f"exit {own}": EarlyExit(EarlyExitConfig(exit_layer=own), context) for own in arguments.exits
    }
    if arguments.jump:
        parts["jump"] = Jump(JumpConfig(head=arguments.jump), context)
    table, worst = Table(title=f"Tokens a step, one request ({len(prompts)} prompts of {PROMPT} tokens)"), float("inf")
    kinds = *(f"chain {length}" for length in CHAINS), f"tree {arguments.nodes}"
    for column in ("T", "outputs", "drafter", *kinds, "gain"):
        table.add_column(column)
    for temperature in TEMPERATURES:
        pairs = zip(prompts, outputs_of(base, prompts, temperature), strict=True)
        kept = [(prompt, output) for prompt, output in pairs if len(output) == OUTPUT and not repeats(output)]
        for name, proposer in parts.items() if kept else ():
            steps: dict[str, int] = {}
            for prompt, output in kept:
                drafts = chains(proposer, target_of(base, prompt, output, temperature), output)
                drafts |= tree(proposer, target_of(base, prompt, output, temperature), output, arguments.nodes)
                for kind, accepted in drafts.items():
                    steps[kind] = steps.get(kind, 0) + num_steps(accepted)
            rates = [len(kept) * OUTPUT / count for count in steps.values()]
            gain = rates[-1] / max(rates[:-1])
            worst = min(worst, gain)
            table.add_row(f"{temperature}", str(len(kept)), name, *(f"{rate:.2f}" for rate in rates), f"{gain:.2f}x")
    Console().print(table)
    return int(worst < BAR)


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
