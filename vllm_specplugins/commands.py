"""Commands of `python -m vllm_specplugins`: the arguments of each, its help, and the module that runs it.

Nothing heavy is imported before a command runs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_specplugins.arguments import dictionary, listed, positive, share, temperature, whole

TORCH = ("torch", "transformers", "rich")
Add = Callable[..., Any]  # argparse's add_argument
DATA = (
    'JSON lines of {"prompt": ..., "output": ...} in text or token ids, of {"messages": [...]} with answers in it or '
    'after it as "choices", or of {"text": ...}; else UTF-8 text; - is standard input'
)


def _train_exit_head(add: Add) -> None:
    """Train a norm and a head for an early layer, so that it drafts more like the whole model.

    Example: python -m vllm_specplugins train-exit-head MODEL --exit-layer 8 --data corpus/*.txt --out HEAD
    """
    add("--exit-layer", type=whole(1, 10_000), required=True, help="how many layers run before the head")
    _training(add)


def _train_jump(add: Add) -> None:
    """Train what predicts the state in front of a model's head or last layers, so that they draft without the others.

    Example: python -m vllm_specplugins train-jump MODEL --data corpus/*.txt --out HEAD
    """
    layers = whole(0, 10_000)
    add("--early-layers", type=layers, default=0, help="how many layers run for a token before the jump (default: 0)")
    words = "how many layers lie before the first one after the jump (default: all, so that none runs)"
    add("--late-layer", type=layers, help=words)
    add("--inner-size", type=whole(1, 1_000_000), help="of the part (default: 4 times the hidden size)")
    words = "how many jumps it learns to make, one after the other (default: 3)"
    add("--num-draft", type=whole(1, 64), default=3, help=words)
    add("--resume", metavar="DIR", help="a head to go on from, as one that learned while it served (default: none)")
    _training(add)


def _train_look_ahead(add: Add) -> None:
    """Train embeddings that stand for draft tokens not yet known, so that an early exit drafts all in one pass.

    Example: python -m vllm_specplugins train-look-ahead MODEL --exit-layer 8 --data c/*.txt --out AHEAD
    """
    add("--exit-layer", type=whole(1, 10_000), required=True, help="how many layers they run through")
    add("--exit-head", metavar="DIR", help="a trained head for this layer (default: the model's own norm and head)")
    words = "how many tokens one pass drafts, one more than there are embeddings (default: 4)"
    add("--num-draft", type=whole(2, 64), default=4, help=words)
    _training(add)


def _training(add: Add) -> None:
    """What all training takes."""
    _model(add)
    add("--data", type=Path, nargs="+", default=[], help=f"{DATA} (default: Python's standard library)")
    add("--out", type=Path, required=True, help="folder of the part; an interrupted run goes on there")
    add("--steps", type=whole(1, 10_000_000), default=1000, help="default: 1000")
    add("--batch-tokens", type=whole(16, 10_000_000), default=4096, help="tokens a step (default: 4096)")
    add("--row-tokens", type=whole(16, 1_000_000), default=512, help="tokens a row (default: 512)")
    add("--learning-rate", type=share, default=1e-3, help="highest (default: 0.001)")
    add("--heldout", type=share, default=0.05, help="share of rows to score (default: 0.05)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    _seed(add, "default: 0")


def _calibrate(add: Add) -> None:
    """Find the method, exit layer and number of draft tokens that serve a model fastest.

    Example: python -m vllm_specplugins calibrate MODEL --data corpus/*.txt --json REPORT
    """
    _model(add)
    add("--data", type=Path, nargs="+", required=True, help=DATA)
    add("--layers", type=listed(whole(1, 10_000)), help="exit layers, as in 1,2,4 (default: all but the last)")
    add("--exits", type=whole(1, 64), default=2, help="how many of them to serve (default: 2)")
    also = "prompt_lookup,suffix_lookup,cascade"
    words = f"other methods to serve, by name or as values of --speculative-config, or none (default: {also})"
    add("--also", nargs="+", default=[also], metavar="METHOD", help=words)
    add("--max-draft", type=whole(1, 64), default=8, metavar="K", help="most of an exit's step (default: 8)")
    add("--enforce-eager", action="store_true", help="as for vLLM; calibrate with it if you serve with it")
    _measuring(add, rounds=3, prompts=8, tokens=96)


def _verify_lossless(add: Add) -> None:
    """Hold what real engines sample, with and without speculation, against its exact distribution.

    Example: python -m vllm_specplugins verify-lossless --method prompt_lookup early_exit
    """
    words = "names, or values of --speculative-config (default: all of ours)"
    add("--method", nargs="+", metavar="METHOD", help=words)
    add("--samples", type=whole(100, 10_000_000), default=4000, help="of each cell (default: 4000)")
    _seed(add, "of model, prompts and engines (default: 0)")
    add("--json", type=Path, help="where to write the report, too")


def _check(add: Add) -> None:
    """Run a proposer of your own against a recorded engine, and say what it violates, gains and costs.

    Example: python -m vllm_specplugins check my_pkg.module:MyProposer, with PYTHONPATH=. in front. The exit code
    is 0 where nothing is violated, 1 where something is, 2 where it cannot be run.
    """
    add("proposer", metavar="PROPOSER", help="package.module:Class, or the name of a registered method")
    add("--options", type=dictionary, default={}, metavar="JSON", help="of the proposer (default: {})")
    add("--time-budget-ms", type=whole(1, 60_000), default=1000, help="of a step (default: 1000)")


def _doctor(add: Add) -> None:
    """Say what speculation would run on here, and what stands in its way; starts no engine.

    Example: python -m vllm_specplugins doctor --speculative-config '{"method":"prompt_lookup"}'. The exit code is
    0 where that would be served, 1 where it would not, 2 where the question is wrong.
    """
    words = "what you mean to serve with (default: a ready one)"
    add("--speculative-config", type=dictionary, metavar="JSON", help=words)
    _model(add, "--model")
    add("--json", action="store_true", help="print the findings as JSON")


def _build_store(add: Add) -> None:
    """Make a store for suffix_lookup from texts like those that it will serve.

    Example: python -m vllm_specplugins build-store --tokenizer MODEL --data logs/*.jsonl --out store.bin
    """
    _model(add, "--tokenizer", required=True)
    add("--data", type=Path, nargs="+", required=True, help=f"{DATA}; the last stay longest")
    add("--out", type=Path, required=True, help="what store_path will name")
    add("--cache-salt", metavar="SALT", help="whose requests shall see it (default: those without one)")


def _bench(add: Add) -> None:
    """Measure how much faster methods serve a model here, against no speculation, with engines that take turns.

    Example: python -m vllm_specplugins bench --model MODEL --methods ngram,prompt_lookup --workloads edit,chat
    --batch 1,4
    """
    _model(add, "--model", " (default: the chat model that examples/chat_model.py makes)")
    words = "names, names with K as in ngram:31, or values of --speculative-config, as many as you like (default: "
    methods = "ngram,prompt_lookup,cascade"
    add("--methods", nargs="+", default=[methods], metavar="METHOD", help=f"{words}{methods})")
    names = "edit, summary, maths, chat, retrieval, translation, extraction, agent, code, copy, random, and repeat"
    words = f"{names}, which asks the same in each round (default: the first four, without --data)"
    add("--workloads", type=listed(str.strip), help=words)
    add("--data", type=Path, nargs="+", default=[], help=DATA)
    add("--batch", type=listed(whole(1, 4096)), default=[1], help="requests at a time, as in 1,4 (default: 1)")
    add("--temperature", type=listed(temperature), default=[0.0], help="as in 0,0.8 (default: 0)")
    add("--ignore-eos", action="store_true", help="outputs go on after the end of their text, to --tokens")
    add("--engine-args", type=dictionary, default={}, metavar="JSON", help="more arguments of vllm.LLM, for all")
    words = "a log of token ids whose outputs all engines are forced to emit, in place of workloads"
    add("--trace", type=Path, metavar="LOG", help=words)
    words = (
        "with --trace: requests also arrive at random, at these shares of what no speculation can serve, as in 0.5,0.9"
    )
    add("--rate", type=listed(positive), default=[], help=words)
    words = "with --trace: the name in the log's \"accepted\" that says how many tokens of vLLM's drafter are right"
    add("--drafter", metavar="NAME", help=words)
    add(
        "--load-format", choices=("auto", "dummy"), help="dummy: weights at random, for a folder with config.json alone"
    )
    _measuring(add, rounds=5, prompts=4, tokens=None)


def _replay(add: Add) -> None:
    """Play recorded traffic with every proposer that reads token ids alone (no model, no GPU): what would have been
    accepted, what it would have cost, and what to serve it with.

    Example: python -m vllm_specplugins replay --data trace.jsonl --tokenizer MODEL --batch 1,32
    """
    words = '; with "time" in seconds where requests came one after the other'
    add("--data", type=Path, nargs="+", required=True, help=f"{DATA}{words}")
    _model(add, "--tokenizer", more="; for text")
    words = "names, names with K, or values of --speculative-config (default: all that can be played)"
    add("--methods", nargs="+", default=[], metavar="METHOD", help=words)
    words = "default: 3,5,8,12,15,24,31,48,64, as long as the speed rises"
    add("--num-draft", type=listed(whole(1, 64)), help=words)
    add("--batch", type=listed(whole(1, 4096)), default=[1], help="requests at a time, as in 1,32 (default: 1)")
    add("--requests", type=whole(1, 10_000_000), default=2000, help="most requests (default: 2000)")
    add("--by-file", action="store_true", help="play each file of --data for itself, as a task of its name")
    words = "only requests with even or odd ids, as places in the log where they have none (default: all)"
    add("--ids", choices=("all", "even", "odd"), default="all", help=words)
    add("--max-output", type=whole(1, 10_000_000), help="leave out requests with more tokens of output")
    words = "also play a drafter that the log holds accepted lengths of, its ms of a draft, and K: eagle3:2.14:5"
    add("--drafter", metavar="NAME:MS[:MS_A_TOKEN]:K", help=words)
    words = (
        "step times: those published of llama-2-7b or llama-3.1-8b on an H100, or those in a file that `bench --json` "
    )
    add("--costs", default="llama-2-7b", metavar="COSTS", help=f"{words}wrote (default: llama-2-7b)")
    add("--step-ms", type=positive, help="instead, the time of a step without drafts, and with it --token-ms")
    add("--token-ms", type=positive, help="what one more token to verify adds to it")
    add("--context-us", type=positive, default=0.0, help="the time that a token of context adds to it (default: 0)")
    add("--verify-ms", type=positive, default=0.0, help="the time that verifying any draft adds to it (default: 0)")
    add("--draft-us", type=positive, help="of drafting, by request and step (default: measured here)")
    _files(add)


def _measuring(add: Add, rounds: int, prompts: int, tokens: int | None) -> None:
    """What is asked of engines whose speed is compared."""
    add("--rounds", type=whole(1, 1000), default=rounds, help=f"that are measured, after one (default: {rounds})")
    words = f"in a round, or as many as are asked at a time if that is more (default: {prompts})"
    add("--prompts", type=whole(1, 10_000), default=prompts, help=words)
    words = "of prompts that are cut or made; a shorter file is one prompt (default: 256)"
    add("--prompt-tokens", type=whole(16, 1_000_000), default=256, help=words)
    words = f"length limit of an output (default: {tokens or '64, and with --trace that of the log'})"
    add("--tokens", type=whole(2, 100_000), default=tokens, help=words)
    add("--dtype", choices=("auto", "bfloat16", "float16", "float32"), help="default: float32 on a CPU, else auto")
    _files(add)


def _files(add: Add) -> None:
    add("--json", type=Path, help="where to write the figures")
    add("--plot", type=Path, help="where to draw them, as PNG")


def _model(add: Add, name: str = "model", more: str = "", **kwargs: Any) -> None:
    add(name, metavar="MODEL", help=f"folder of a checkpoint, or its Hugging Face name{more}", **kwargs)


def _seed(add: Add, words: str) -> None:
    add("--seed", type=whole(0, 2**31), default=0, help=words)


# Of each command the module whose `run` it is, what that needs beside this package, and what adds its arguments, whose
# docstring is its help.
COMMANDS: dict[str, tuple[str, tuple[str, ...], Callable[[Add], None]]] = {
    "train-exit-head": ("vllm_specplugins.tools.training.command", TORCH, _train_exit_head),
    "train-jump": ("vllm_specplugins.tools.training.command", TORCH, _train_jump),
    "train-look-ahead": ("vllm_specplugins.tools.training.command", TORCH, _train_look_ahead),
    "calibrate": ("vllm_specplugins.tools.calibrate", ("vllm", *TORCH), _calibrate),
    "verify-lossless": ("vllm_specplugins.tools.verify_lossless", ("vllm", *TORCH), _verify_lossless),
    "check": ("vllm_specplugins.tools.check.run", ("rich",), _check),
    "doctor": ("vllm_specplugins.tools.doctor", ("vllm", "torch", "rich"), _doctor),
    "build-store": ("vllm_specplugins.tools.build_store", TORCH, _build_store),
    "bench": ("vllm_specplugins.tools.bench.command", ("vllm", *TORCH), _bench),
    "replay": ("vllm_specplugins.tools.replay.command", TORCH, _replay),
}
