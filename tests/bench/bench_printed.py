"""Is what training prints what an engine has? The acceptance length of a trained part, by tools/training/scores.py and
by the served model, on the same texts.

    python tests/bench/bench_printed.py --model examples/demo/model --part .cache/demo/jump --num-draft 3

The engine goes on with held-out code, seeded; the model then writes the same texts outside of it, and the part is
scored on these. Drafts are greedy. The two may differ by 5 %: steps at a text's end are not scored.
"""

import argparse
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm_specplugins.kernels.rejection import Sampling
from vllm_specplugins.kernels.rejection.coupled import coupled_sample

from vllm_specplugins.proposers.exit_head import ExitHead
from vllm_specplugins.proposers.jump_head import JumpHead
from vllm_specplugins.tools.base_model import BaseModel, load_tokenizer
from vllm_specplugins.tools.bench.workloads import make_workload
from vllm_specplugins.tools.training.exit_head import TrainedExitHead
from vllm_specplugins.tools.training.jump import TrainedJump
from vllm_specplugins.tools.training.medusa import TrainedMedusa
from vllm_specplugins.tools.training.scores import Text, scores

ALLOWED = 0.05
NUM_PROMPT = 128  # tokens
# file of a part -> how it is loaded
KINDS = {
    "exit_head.safetensors": lambda folder: TrainedExitHead(ExitHead.load(folder)),
    "jump.safetensors": lambda folder: TrainedJump(JumpHead.load(folder)),
    "model.safetensors": lambda folder: TrainedMedusa(
        {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}
    ),
}


def loaded(folder: Path) -> Any:
    return next(load for name, load in KINDS.items() if (folder / name).exists())(folder)


def counts(llm: Any) -> tuple[float, float]:
    """Drafts and accepted tokens so far."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    drafts, accepted = (found[f"vllm:spec_decode_num_{name}"].value for name in ("drafts", "accepted_tokens"))
    return drafts, accepted


def served(llm: Any, prompts: list[list[int]], temperature: float, num_tokens: int) -> tuple[list[list[int]], float]:
    """What the engine said, and its acceptance length."""
    from vllm import SamplingParams

    before = counts(llm)
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=num_tokens, detokenize=False)
        for seed in range(len(prompts))
    ]
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    drafts, accepted = (after - earlier for after, earlier in zip(counts(llm), before, strict=True))
    return [list(result.outputs[0].token_ids) for result in results], 1 + accepted / drafts


def written(base: BaseModel, prompts: list[list[int]], temperature: float, num_tokens: int) -> list[Text]:
    """What the model says outside of an engine behind prompts of one length, with the noise of the same seeds."""
    seeds = torch.arange(len(prompts))
    sampling = Sampling(torch.full(seeds.shape, temperature), seeds)
    rows = base.go_on(
        torch.tensor(prompts),
        len(prompts[0]) + num_tokens,
        lambda logits, place: coupled_sample(logits, torch.full_like(seeds, place), sampling),
    )
    return [Text(row, len(prompts[0]), temperature, seed) for seed, row in enumerate(rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--part", type=Path, required=True)
    parser.add_argument("--num-draft", type=int, required=True)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM

    part = loaded(args.part)
    config = {**part.serving(args.part), "draft_sample_method": "greedy", "num_speculative_tokens": args.num_draft}
    llm = LLM(
        args.model, dtype="float32", max_model_len=512, max_num_seqs=8, max_num_batched_tokens=8192, enforce_eager=True,
        disable_log_stats=False, enable_prefix_caching=False, speculative_config=config,
    )  # fmt: skip
    prompts = make_workload("code", load_tokenizer(args.model), args.prompts, NUM_PROMPT).prompts
    base, worst = BaseModel.load(args.model, "cpu"), 0.0
    for temperature in args.temperatures:
        said, measured = served(llm, prompts, temperature, args.tokens)
        texts = written(base, prompts, temperature, args.tokens)
        same = sum(own == text.row[NUM_PROMPT:] for own, text in zip(said, texts, strict=True))
        printed = scores(base, texts, texts, part, args.num_draft).length
        worst = max(worst, abs(printed / measured - 1))
        words = f"printed {printed:.3f}, measured {measured:.3f} ({printed / measured - 1:+.1%})"
        cell = f"{args.part.name}, K = {args.num_draft}, T {temperature:g}"
        print(f"{cell}: {words}; {same} of {len(texts)} texts the same")
    print(f"vllm {version('vllm')}, torch {version('torch')}")
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
