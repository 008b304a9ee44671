"""Tokens a step of one request with trees, beside chains: outputs that the demo model made, played; no engine.

    python benchmarks/bench_trees.py [MODEL] [--exits 1 2] [--jump FOLDER] [--medusa FOLDER] [--prompts 24]

With a one-hot q an output does not depend on drafts. So the target's outputs are made once, at temperatures 0, 0.8 and
1; our proposers draft at every place of them, with the layers of transformers in place of vLLM's; and a step's tokens
are how far the output is a path of the draft. Outputs that repeat themselves are left out. With a lookup's chain merged
into it, a tree is held against the better of the tree alone and the lookup's best chain; what the lookup is worth is
learned at each place of one output after the other. The gate is played, too: two and four requests whose steps cost
as tests/traces/played.py says. It returns 1 where a tree has less than 1.2 times the tokens of the best chain of 4, 8
and 15, or the gate less than 0.98 of the speed of the best length.
"""

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache
from vllm_specplugins.kernels import acceptance
from vllm_specplugins.kernels.acceptance import survivals
from vllm_specplugins.kernels.acceptance.reference import clear, new_state
from vllm_specplugins.kernels.history_match import NO_MATCH, Texts, history_match
from vllm_specplugins.kernels.rejection import Sampling
from vllm_specplugins.kernels.rejection.drafts import coupled_sample

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "traces"))
from played import MACHINES

from vllm_specplugins.config import EarlyExitConfig, JumpConfig, MedusaConfig
from vllm_specplugins.config.trees import chain_length
from vllm_specplugins.draft import ProposerContext
from vllm_specplugins.gate.step_times import StepTimes, lengths_up_to
from vllm_specplugins.proposers.early_exit import EarlyExit
from vllm_specplugins.proposers.heads.medusa_heads import num_heads
from vllm_specplugins.proposers.jump import Jump
from vllm_specplugins.proposers.medusa import Medusa
from vllm_specplugins.proposers.tree import draft_tree
from vllm_specplugins.structures.drafts import of_stage
from vllm_specplugins.target import Sampling as Drawn
from vllm_specplugins.target import Target
from vllm_specplugins.tools.base_model import BaseModel, load_tokenizer

DEMO = Path(__file__).parents[1] / "examples" / "demo"
TEMPERATURES, CHAINS, BAR, GATE_BAR = (0.0, 0.8, 1.0), (4, 8, 15), 1.2, 0.98
NUM_STEPS, UNTIL_KNOWN, LOADS = 6000, 1000, 4  # of a gate that is played
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
        body, length = self._base.cut(range(end_layer), normed), self._text.shape[1]
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
    token_ids = proposer.draft_steps(target, min(max(CHAINS), proposer.max_num_draft)).token_ids
    found = [leading(row, output[place:]) for place, row in enumerate(token_ids.tolist())]
    return {f"chain {length}": [min(length, own) for own in found] for length in CHAINS}


def leading(draft: list[int], output: list[int]) -> int:
    return next((at for at, pair in enumerate(zip(draft, output, strict=False)) if pair[0] != pair[1]), len(output))


def copied(known: Any, prompt: list[int], output: list[int], most: int) -> tuple[torch.Tensor, torch.Tensor, Accepted]:
    """What a lookup finds at each place, logarithms of its survival, and how much of it is right."""
    text, places = torch.tensor([*prompt, *output]), torch.arange(OUTPUT)
    lengths, limits = (len(prompt) + places).int(), torch.full((OUTPUT,), most).int()
    texts = Texts(text.int().expand(OUTPUT, -1).contiguous(), lengths, torch.full((OUTPUT, 2), NO_MATCH).int())
    found = history_match(texts, places, limits, most, 1, 8)
    rated = of_stage(0, *found)
    drafts, slot, survival, right = (rated.num_draft, rated.stage, rated.confidence), torch.zeros(1).long(), [], []
    for place, tokens in enumerate(rated.token_ids.tolist()):
        own = acceptance.Drafts(*(part[place : place + 1] for part in drafts))
        survival.append(survivals(known, slot, own)[0].log().float())
        right.append(min(leading(tokens, output[place:]), int(rated.num_draft[place])))
        acceptance.predict(known, slot, own, torch.zeros(1, most))
        acceptance.observe(known, slot, torch.tensor([right[-1] + 1]), torch.tensor([right[-1] < OUTPUT - place]).int())
    return rated.token_ids, torch.stack(survival), right


def tree(proposer: Any, target: Target, output: list[int], num_nodes: int, *other: torch.Tensor) -> dict[str, Accepted]:
    grown = draft_tree(proposer, target, num_nodes, torch.ones(OUTPUT, dtype=torch.bool), other or None)
    found = []
    for place, (tokens, parents) in enumerate(zip(grown.token_ids.tolist(), grown.parents.tolist(), strict=True)):
        children = {pair: node for node, pair in enumerate(zip(parents, tokens, strict=True), 1)}
        node, depth = 0, 0
        while place + depth < OUTPUT and (node, output[place + depth]) in children:
            node, depth = children[node, output[place + depth]], depth + 1
        found.append(depth)
    return {f"{'merged' if other else 'tree'} {num_nodes}": found}


def speeds(played: list[dict[int, Accepted]], machine: Any, num_reqs: int, one_pass: bool) -> tuple[float, list[float]]:
    """Tokens a ms of so many requests behind the gate, and of each length alone: outputs one after the other, in some
    random orders, whose sum it is.

    Args:
        played: of each output, by length of a draft, what is accepted at each place.
        one_pass: whether a draft takes one, however long it is.
    """

    def speed(load: int, choose: Callable[[], int], tell: Callable[..., None]) -> float:
        rng, total_ms, num_tokens = random.Random(load), 0.0, 0
        places = [(rng.randrange(len(played)), 0) for _ in range(num_reqs)]
        for step in range(NUM_STEPS):
            k, emitted = choose(), []
            for index, (number, place) in enumerate(places):
                emitted.append(min(played[number][k][place] + 1, OUTPUT - place) if k else 1)
                place += emitted[-1]
                places[index] = (number, place) if place < OUTPUT else (rng.randrange(len(played)), 0)
            passes = min(k, chain_length(most), 1 if one_pass else k)
            ms = machine.step(num_reqs * (1 + k)) + machine.passes([num_reqs] * passes)
            tell(num_reqs, k, ms * rng.lognormvariate(0, 0.03), emitted)
            if step >= UNTIL_KNOWN:
                total_ms, num_tokens = total_ms + ms, num_tokens + sum(emitted)
        return num_tokens / total_ms

    most = max(played[0])
    gates = [StepTimes(lengths_up_to(most, chain_length(most)), has_tree=True) for _ in range(LOADS)]
    gated = sum(speed(load, partial(gate.choose, num_reqs), gate.add) for load, gate in enumerate(gates))
    return gated, [
        sum(speed(load, lambda k=k: k, lambda *_: None) for load in range(LOADS))  # type: ignore[misc]
        for k in gates[0].lengths
    ]


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

    rows = base.generate(torch.tensor(prompts), PROMPT + OUTPUT, choose)
    return [row[PROMPT:] for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default=str(DEMO / "model"))
    parser.add_argument("--exits", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--jump", help="folder of a trained jump that ends after the last layer")
    parser.add_argument("--medusa", help="folder of heads")
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
    if arguments.medusa:
        heads = num_heads(arguments.medusa)
        some = replace(context, max_num_draft=heads)
        parts["medusa"] = Medusa(MedusaConfig(heads=arguments.medusa), some)
        parts["medusa"].max_num_draft = heads
    gates = Table(title="The gate at 2 and 4 requests, of the best length (that one)")
    for column in ("T", "drafter", *(f"{machine}, {num_reqs}" for machine in MACHINES for num_reqs in (2, 4))):
        gates.add_column(column)
    table, worst, worst_gate = (
        Table(title=f"Tokens a step, one request ({len(prompts)} prompts of {PROMPT} tokens)"),
        *[float("inf")] * 2,
    )
    kinds = *(f"chain {length}" for length in CHAINS), f"tree {arguments.nodes}"
    for column in ("T", "outputs", "drafter", *kinds, "gain", "lookup", "merged", "gain"):
        table.add_column(column)
    for temperature in TEMPERATURES:
        pairs = zip(prompts, outputs_of(base, prompts, temperature), strict=True)
        kept = [(prompt, output) for prompt, output in pairs if len(output) == OUTPUT and not repeats(output)]
        for name, proposer in parts.items() if kept else ():
            steps: dict[str, int] = {}
            known, seen = new_state(1, 2, max(CHAINS), None), list[int]()
            played: dict[str, list[dict[int, Accepted]]] = {name: [], f"lookup, {name}": []}
            for prompt, output in kept:
                drafts = chains(proposer, target_of(base, prompt, output, temperature), output)
                drafts |= tree(proposer, target_of(base, prompt, output, temperature), output, arguments.nodes)
                clear(known, torch.zeros(1).long())
                *other, right = copied(known, prompt, output, max(CHAINS))
                beside = {f"lookup {length}": [min(length, own) for own in right] for length in CHAINS}
                beside |= tree(proposer, target_of(base, prompt, output, temperature), output, arguments.nodes, *other)
                for kind, accepted in (drafts | beside).items():
                    steps[kind] = steps.get(kind, 0) + num_steps(accepted)
                longest = drafts[f"chain {max(CHAINS)}"]
                lengths = lengths_up_to(chain_length(arguments.nodes))[1:]
                own = {length: [min(length, one) for one in longest] for length in lengths}
                played[name].append({**own, arguments.nodes: drafts[f"tree {arguments.nodes}"]})
                seen, gains = seen + longest, other[1].exp().cumsum(1)
                for length in lengths:  # of the lookup, where that promises more than the drafter has brought so far
                    usual = sum(min(length, one) for one in seen) / len(seen)
                    is_copied = (gains[:, length - 1] > usual).tolist()
                    both = zip(right, longest, is_copied, strict=True)
                    own[length] = [min(length, its if copies else one) for its, one, copies in both]
                played[f"lookup, {name}"].append({**own, arguments.nodes: beside[f"merged {arguments.nodes}"]})
            rates = [len(kept) * OUTPUT / count for count in steps.values()]
            (*alone, grown), (*lookup, merged) = rates[:4], rates[4:]
            gain, more = grown / max(alone), merged / max(*lookup, grown)
            worst = min(worst, gain)
            words = [f"{rate:.2f}" for rate in (*alone, grown, max(lookup), merged)]
            table.add_row(
                f"{temperature}", str(len(kept)), name, *words[:4], f"{gain:.2f}x", *words[4:], f"{more:.2f}x"
            )
            for label, texts in played.items():
                cells = []
                for machine, num_reqs in product(MACHINES.values(), (2, 4)):
                    gated, fixed = speeds(texts, machine, num_reqs, name == "medusa")
                    worst_gate = min(worst_gate, gated / max(fixed))
                    best = (0, *texts[0])[fixed.index(max(fixed))]
                    cells.append(f"{gated / max(fixed):.3f} ({best})")
                gates.add_row(f"{temperature}", label, *cells)
    Console().print(table, gates)
    return int(worst < BAR or worst_gate < GATE_BAR)


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
