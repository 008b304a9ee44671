"""What a cascade itself costs on the host, per request and step: no engine, a model stage that is a table.

    python tests/bench/bench_cascade.py [--trees FOLDER ...] [--requests 64] [--rounds 7]

Texts repeat themselves with errors, so that lookup finds some of what comes next; a draft is accepted as far as the
text goes on like it. Counted is the CPU time of `propose` and `observe`; "own" is that less what the two stages take by
themselves, each for as many steps. Several trees, checkouts of this repository, are measured in turns, each round in a
process of its own; printed are medians over the rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

K, VOCAB_SIZE, NUM_STEPS = 5, 500, 120
STEP_MS = 500.0, 0.2  # of a step, and of a draft token more
SETTINGS = [(policy, gate) for policy in ("verify", "auto") for gate in ("off", "auto")]


class Successors:
    """Layers that say of each token which one comes next; that takes some microseconds."""

    def __init__(self, of: torch.Tensor):
        self.of = of

    def hidden_states(self, end_layer: int, token_ids: Any, positions: Any, normed: bool = True) -> Any:
        return self.of[token_ids.long()][..., None]

    def argmax(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states[:, 0]


def texts(num_reqs: int, length: int, successors: np.ndarray) -> np.ndarray:
    """Each goes on as the model stage says, or repeats itself, or neither."""
    rng = np.random.default_rng(7)
    made = []
    for _ in range(num_reqs):
        text = np.resize(rng.integers(0, VOCAB_SIZE, 60), length).astype(np.int32)
        for place in range(60, length):
            chance = rng.random()
            if chance < 0.5:
                text[place] = successors[text[place - 1]]
            elif chance > 0.8:
                text[place] = rng.integers(0, VOCAB_SIZE)
        made.append(text)
    return np.stack(made)


def shown(all_texts: np.ndarray, lengths: list[int]) -> Any:
    """Histories as Model Runner V1's adapter hands them on, of whatever tree."""
    from vllm_specplugins.proposers.read_only import Views, view

    if hasattr(Views, "of_rows"):
        return Views.of_rows(view(all_texts), range(len(lengths)), lengths)
    return Views(text[:length] for text, length in zip(view(all_texts), lengths, strict=True))


def seconds_of(proposer: Any, num_reqs: int, forward: Successors) -> float:
    """CPU time of NUM_STEPS steps behind a tenth as many that warm up."""
    from vllm_specplugins.draft import DraftBatch, Feedback, Sampling, Target

    all_texts = texts(num_reqs, 200 + (NUM_STEPS * 11 // 10 + 1) * (K + 1), forward.of.numpy())
    lengths = np.full(num_reqs, 150)
    ids, options, wanted = [f"r{row}" for row in range(num_reqs)], [{}] * num_reqs, np.full(num_reqs, K, np.int32)
    sampling = Sampling(torch.zeros(num_reqs), torch.arange(num_reqs))
    total = 0.0
    for step in range(NUM_STEPS * 11 // 10):
        histories = shown(all_texts, lengths.tolist())
        last = torch.from_numpy(all_texts[np.arange(num_reqs), lengths - 1])
        target = Target(forward, last, torch.from_numpy(lengths.copy()), None, sampling)
        batch = DraftBatch(ids, histories, wanted, options, target)
        start = time.thread_time()
        draft = proposer.propose(batch)
        spent = time.thread_time() - start
        num_draft, num_accepted = draft.num_draft, np.zeros(num_reqs, np.int32)
        for row, count in enumerate(num_draft.tolist()):
            known = all_texts[row][lengths[row] : lengths[row] + count]
            right = np.asarray(draft.token_ids[row, :count]) == known
            num_accepted[row] = count if right.all() else int(right.argmin())
        feedback = Feedback(ids, num_draft, num_accepted, step_ms=STEP_MS[0] + STEP_MS[1] * float(num_draft.sum()))
        start = time.thread_time()
        proposer.observe(feedback)
        spent += time.thread_time() - start
        total += spent if step >= NUM_STEPS // 10 else 0.0
        lengths += 1 + num_accepted
    return total


def measured(num_reqs: int) -> dict[str, float]:
    """us per request and step of lookup alone, and of each cascade."""
    from vllm_specplugins.draft import ProposerContext
    from vllm_specplugins.methods import build_proposer, parse_config
    from vllm_specplugins.proposers.gate import StepCosts

    sys.modules[StepCosts.__module__].SHARED_SLOPE = STEP_MS[1] / STEP_MS[0]  # known, so that a gate drafts
    torch.set_num_threads(1)
    context = ProposerContext(VOCAB_SIZE, 1 << 16, num_reqs, K, lambda text: [])
    scale = 1e6 / NUM_STEPS / num_reqs
    forward = Successors(torch.randint(VOCAB_SIZE, (VOCAB_SIZE,), generator=torch.Generator().manual_seed(1)))
    stages = {"lookup": {"method": "prompt_lookup"}, "exit": {"method": "early_exit", "exit_layer": 1}}
    found = {
        name: seconds_of(build_proposer(parse_config(stage), context), num_reqs, forward) * scale
        for name, stage in stages.items()
    }
    for policy, gate in SETTINGS:
        config = {"method": "cascade", "policy": policy, "gate": gate, "stages": list(stages.values())}
        found[f"{policy}, gate {gate}"] = (
            seconds_of(build_proposer(parse_config(config), context), num_reqs, forward) * scale
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trees", type=Path, nargs="+", default=[Path(__file__).resolve().parents[2]])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--once", action="store_true", help="measure what can be imported, and print JSON")
    args = parser.parse_args()
    if args.once:
        import vllm_specplugins

        assert Path(vllm_specplugins.__file__).is_relative_to(args.trees[0]), "another tree is imported"
        print(json.dumps(measured(args.requests)))
        return 0
    rounds: dict[Path, list[dict[str, float]]] = {tree: [] for tree in args.trees}
    for _ in range(args.rounds):
        for tree, results in rounds.items():
            command = [sys.executable, __file__, "--once", "--requests", str(args.requests), "--trees", str(tree)]
            run = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=True
            )
            results.append(json.loads(run.stdout.splitlines()[-1]))
    print(f"{args.requests} requests, K {K}; us of CPU per request and step: whole (own)")
    for name in rounds[args.trees[0]][0]:
        cells = []
        for results in rounds.values():
            whole = statistics.median(result[name] for result in results)
            own = statistics.median(result[name] - result["lookup"] - result["exit"] for result in results)
            cells.append(f"{whole:7.2f} ({own:6.2f})")
        print(f"{name:18}", *cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
