"""Tokens a step of one request with rounds (SpecInfer's multi-round rejection) beside coupled trees: texts that the
demo model samples, played; no engine.

    python benchmarks/bench_rounds.py [MODEL] [--exits 1 2] [--prompts 48] [--nodes 15] [--temperatures 0.8 1]

At each place of a sampled text both kinds of trees are drafted and verified as in an engine, with the layers of
transformers in place of vLLM's. The last places are left out, where a coupled tree is cut by the text's end. It returns
1 where rounds have less than 1.05 times the tokens of coupled trees at temperature 1.
"""

import argparse
import sys
from dataclasses import replace
from typing import Any

import torch
from bench_trees import DEMO, NUM_TEXTS, OUTPUT, PROMPT, STRIDE, Played, outputs_of, repeats, target_of, tree
from rich.console import Console
from rich.table import Table
from vllm_specplugins.kernels.rejection import Sampling
from vllm_specplugins.kernels.rejection.drafts import coupled_sample
from vllm_specplugins.kernels.rounds.siblings import in_rounds
from vllm_specplugins.kernels.trees import walk
from vllm_specplugins.kernels.trees.reference import ancestors

from vllm_specplugins.config import EarlyExitConfig
from vllm_specplugins.config.trees import chain_length
from vllm_specplugins.draft import ProposerContext
from vllm_specplugins.proposers.early_exit import EarlyExit
from vllm_specplugins.proposers.tree import draft_tree
from vllm_specplugins.target import Target
from vllm_specplugins.tools.base_model import BaseModel, load_tokenizer

BAR = 1.05
DRAFT_NOISE = 1 << 40


def rounds(base: BaseModel, proposer: Any, target: Target, text: list[int], num_nodes: int) -> torch.Tensor:
    """How many drafts are accepted at each place of a text, [OUTPUT]."""
    sampling = target.sampling.verified
    drafting = replace(target.sampling, seeds=sampling.seeds + DRAFT_NOISE)
    grown = draft_tree(proposer, replace(target, sampling=drafting), num_nodes, torch.ones(OUTPUT, dtype=torch.bool))
    depth, first = chain_length(num_nodes), target.num_tokens
    forward, logits = Played(base, text, first - 1), []
    tokens, places = torch.cat((target.last_token_ids[:, None], grown.token_ids), dim=1).long(), first - 1
    parents = torch.cat((torch.zeros_like(tokens[:, :1]), grown.parents), dim=1)
    depths, _ = ancestors(parents)
    chain = (depths[0] == torch.arange(depth + 1)[:, None]).int().argmax(dim=1)  # the first node of each depth
    for node in chain.tolist():
        states = forward.hidden_states(base.num_layers, tokens[:, node], places + depths[:, node])
        logits.append(forward.logits(states))
    # A sibling that is no node of the chain has no children: any token after it will do.
    rows = torch.arange(OUTPUT)[:, None] * (depth + 1) + depths
    flat = torch.stack(logits, dim=1).flatten(0, 1)
    each = torch.arange(OUTPUT).repeat_interleave(depth + 1)
    drawn = coupled_sample(flat, first[each] + torch.arange(depth + 1).repeat(OUTPUT), sampling.at(each))[rows]
    after = in_rounds(drawn, tokens, (parents, depths), flat, rows, grown.logits, first, sampling)
    return walk(parents, tokens, after)[1] - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default=str(DEMO / "model"))
    parser.add_argument("--exits", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--nodes", type=int, default=15)
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.8, 1.0])
    arguments = parser.parse_args()
    base, tokenizer = BaseModel.load(arguments.model, "cpu"), load_tokenizer(arguments.model)
    sys.path.insert(0, str(DEMO))
    from prompts import load_prompts

    texts = [tokenizer.encode(text, add_special_tokens=False) for text in load_prompts("continue", NUM_TEXTS)]
    ends = [text[: len(text) - back] for back in range(0, 2048, STRIDE) for text in texts if len(text) - back >= PROMPT]
    prompts = [text[-PROMPT:] for text in ends][: arguments.prompts]
    context = ProposerContext(len(base.head_weight), 4096, 1, arguments.nodes, lambda text: [])
    table, worst = Table(title=f"Tokens a step, one request, trees of {arguments.nodes}"), float("inf")
    for column in ("T", "outputs", "exit", "coupled", "rounds", "gain", "standard error"):
        table.add_column(column)
    whole = slice(OUTPUT - chain_length(arguments.nodes))
    for temperature in arguments.temperatures:
        pairs = zip(prompts, outputs_of(base, prompts, temperature), strict=True)
        played = [(prompt, output) for prompt, output in pairs if len(output) == OUTPUT and not repeats(output)]
        for layer in arguments.exits:
            coupled, sampled = (
                EarlyExit(EarlyExitConfig(exit_layer=layer, draft_sample_method=method), context)
                for method in ("coupled", "probabilistic")
            )
            counts = []
            for number, (prompt, output) in enumerate(played):
                target = target_of(base, prompt, output, temperature)
                [ours] = tree(coupled, target, output, arguments.nodes).values()
                sampling = Sampling(torch.full((OUTPUT,), temperature), torch.arange(OUTPUT) + OUTPUT * (number + 1))
                target = target_of(base, prompt, output, temperature)
                target = replace(target, sampling=replace(target.sampling, verified=sampling))
                theirs = rounds(base, sampled, target, [*prompt, *output], arguments.nodes)
                counts.append(1 + torch.stack((torch.tensor(ours), theirs)).double()[:, whole].mean(dim=1))
            means = torch.stack(counts)
            of_coupled, of_rounds = means.mean(dim=0).tolist()
            error = (means[:, 1] - means[:, 0]).std() / len(means) ** 0.5 / of_coupled
            gain = of_rounds / of_coupled
            worst = min(worst, gain) if temperature == 1 else worst
            words = f"{of_coupled:.2f}", f"{of_rounds:.2f}", f"{gain:.2f}x", f"{error:.2f}"
            table.add_row(f"{temperature}", str(len(played)), str(layer), *words)
    Console().print(table)
    return int(worst < BAR)


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
