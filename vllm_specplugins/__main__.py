"""`python -m vllm_specplugins`: the command line. Parses arguments and imports nothing heavy before a command runs."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from vllm_specplugins.arguments import (
    dictionary,
    fraction,
    layer_list,
    listed,
    positive,
    temperature,
    whole,
    words_list,
)
from vllm_specplugins.config import ConfigError
from vllm_specplugins.config.fields import GONE

# A command's module, and what it needs beside this package.
COMMANDS = {
    "train-exit-head": ("vllm_specplugins.tools.training.command", ("torch", "transformers", "rich")),
    "train-look-ahead": ("vllm_specplugins.tools.training.command", ("torch", "transformers", "rich")),
    "train-jump": ("vllm_specplugins.tools.training.command", ("torch", "transformers", "rich")),
    "calibrate": ("vllm_specplugins.tools.calibrate", ("vllm", "torch", "transformers", "rich")),
    "check": ("vllm_specplugins.tools.check.run", ("rich",)),
    "doctor": ("vllm_specplugins.tools.doctor", ("vllm", "torch", "rich")),
    "verify-lossless": ("vllm_specplugins.tools.verify_lossless", ("vllm", "torch", "transformers", "rich")),
    "build-store": ("vllm_specplugins.tools.build_store", ("torch", "transformers", "rich")),
    "replay": ("vllm_specplugins.tools.replay.command", ("torch", "transformers", "rich")),
    "bench": ("vllm_specplugins.tools.bench.command", ("vllm", "torch", "transformers", "rich")),
}
Add = Callable[..., Any]
DATA = (
    'JSON lines of {"prompt": ..., "output": ...} in text or token ids, of {"messages": [...]} with answers in it or '
    'behind it as "choices", or of {"text": ...}; else UTF-8 text; - is standard input'
)
EXTRAS = {"rich": "tools"}  # of pyproject.toml; what is not here comes with vLLM


class Parser(argparse.ArgumentParser):
    """Refuses with one sentence, as everything here does."""

    def error(self, message: str) -> NoReturn:
        gone = "".join(f"; {name} went: {instead}" for name, instead in GONE.items() if repr(name) in message)
        self.exit(2, f"error: {message.removeprefix('argument ').rstrip('.')}{gone}.\n")


def parser() -> Parser:
    """All commands and their arguments."""
    from vllm_specplugins.methods import METHODS, registered_methods

    commands = Parser(
        prog="python -m vllm_specplugins",
        description="Tools for speculative decoding.",
        epilog=f"Methods of --speculative-config: {', '.join((*METHODS, *registered_methods()))}.",
    )
    subparsers = commands.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (_train_exit_head, _train_jump, _train_look_ahead, _calibrate, _verify_lossless, _check, _doctor,
                    _build_store, _bench, _replay):  # fmt: skip
        command(subparsers)
    return commands


def _command(subparsers: Any, name: str, words: str, example: str, more: str = "") -> Add:
    """Adds a command; returns what adds its arguments."""
    description = f"{words[0].upper()}{words[1:]}.{more}"
    add: Add = subparsers.add_parser(name, help=words, description=description, epilog=example).add_argument
    return add


def _train_exit_head(subparsers: Any) -> None:
    words = "train a norm and a head for an early layer, so that it drafts more like the whole model"
    example = "Example: python -m vllm_specplugins train-exit-head MODEL --exit-layer 8 --data corpus/*.txt --out HEAD"
    add = _command(subparsers, "train-exit-head", words, example)
    add("--exit-layer", type=whole(1, 10_000), required=True, metavar="E", help="how many layers run before the head")
    add("--rank", type=whole(0, 100_000), default=0, metavar="R", help="of the head; 0 is a full matrix (default: 0)")
    _training(add)


def _train_jump(subparsers: Any) -> None:
    words = (
        "train what guesses the state in front of a model's head or last layers, so that they draft without the others"
    )
    example = "Example: python -m vllm_specplugins train-jump MODEL --data corpus/*.txt --out HEAD"
    add = _command(subparsers, "train-jump", words, example)
    add("--early-layers", type=whole(0, 10_000), default=0, metavar="E",
        help="how many layers run for a token before the jump (default: 0)")  # fmt: skip
    add("--late-layer", type=whole(0, 10_000), metavar="J",
        help="how many layers lie before the first one after the jump (default: all, so that none runs)")  # fmt: skip
    add("--inner-size", type=whole(1, 1_000_000), metavar="R",
        help="of the part (default: 4 times the hidden size)")  # fmt: skip
    add("--num-draft", type=whole(1, 64), default=3, metavar="K",
        help="how many jumps it learns to make, one after the other (default: 3)")  # fmt: skip
    _training(add)


def _train_look_ahead(subparsers: Any) -> None:
    words = "train embeddings that stand for draft tokens not yet known, so that an early exit drafts all in one pass"
    example = "Example: python -m vllm_specplugins train-look-ahead MODEL --exit-layer 8 --data c/*.txt --out AHEAD"
    add = _command(subparsers, "train-look-ahead", words, example)
    add("--exit-layer", type=whole(1, 10_000), required=True, metavar="E", help="how many layers they run through")
    add("--exit-head", metavar="DIR", help="a trained head for this layer (default: the model's own norm and head)")
    add("--num-draft", type=whole(2, 64), default=4, metavar="K",
        help="how many tokens one pass drafts, one more than there are embeddings (default: 4)")  # fmt: skip
    _training(add)


def _training(add: Add) -> None:
    """What all training takes."""
    _common(add, needs_data=False)
    add("--self", type=temperature, dest="own_text", metavar="T",
        help="train on what the model itself writes at this temperature (0: greedily) after the beginnings of the rows "
        "of --data; it is sampled with vLLM, and kept in --out")  # fmt: skip
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the part; an interrupted run goes on there")
    add("--steps", type=whole(1, 10_000_000), default=1000, metavar="N", help="default: 1000")
    add("--batch-tokens", type=whole(16, 10_000_000), default=4096, metavar="N", help="tokens a step (default: 4096)")
    add("--row-tokens", type=whole(16, 1_000_000), default=512, metavar="N", help="tokens a row (default: 512)")
    add("--learning-rate", type=fraction(0, 1), default=1e-3, metavar="X", help="highest (default: 0.001)")
    add("--heldout", type=fraction(0, 1), default=0.05, metavar="X", help="share of rows to score (default: 0.05)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    add("--seed", type=whole(0, 2**31), default=0, metavar="N", help="default: 0")


def _calibrate(subparsers: Any) -> None:
    words = "find the method, exit layer and number of draft tokens that serve a model fastest"
    example = "Example: python -m vllm_specplugins calibrate MODEL --data corpus/*.txt --json REPORT"
    add = _command(subparsers, "calibrate", words, example)
    _common(add)
    add("--json", type=Path, metavar="FILE", help="where to write the figures")
    add("--plot", type=Path, metavar="FILE", help="where to draw the ratios, as PNG")
    add("--layers", type=layer_list, metavar="1,2,4", help="exit layers to look at (default: all but the last)")
    add("--exits", type=whole(1, 64), default=2, metavar="N", help="how many of them to serve (default: 2)")
    add("--exit-head", type=Path, metavar="DIR", help="a trained head to look at as well")
    also = "prompt_lookup,suffix_lookup,cascade"
    words = f"other methods to serve, by name or as values of --speculative-config, or none (default: {also})"
    add("--also", nargs="+", default=[also], metavar="METHOD", help=words)
    add("--max-draft", type=whole(1, 64), default=8, metavar="K", help="most of an exit's step (default: 8)")
    add("--rounds", type=whole(1, 1000), default=3, metavar="N", help="that are measured, after one (default: 3)")
    add("--prompts", type=whole(1, 10_000), default=8, metavar="N", help="in a round (default: 8)")
    add("--tokens", type=whole(2, 100_000), default=96, metavar="N", help="output tokens of a prompt (default: 96)")
    add("--prompt-tokens", type=whole(16, 1_000_000), default=256, metavar="N",
        help="most tokens of a prompt; a shorter file is one prompt (default: 256)")  # fmt: skip
    add("--dtype", choices=("auto", "bfloat16", "float16", "float32"), help="default: float32 on a CPU, else auto")
    add("--together", action="store_true",
        help="all engines at once, answering in turns: for a noisy machine with memory for all")  # fmt: skip
    add("--enforce-eager", action="store_true", help="as for vLLM; calibrate with it if you serve with it")


def _verify_lossless(subparsers: Any) -> None:
    words = "hold what real engines sample, with and without speculation, against its exact distribution"
    example = "Example: python -m vllm_specplugins verify-lossless --method prompt_lookup early_exit"
    add = _command(subparsers, "verify-lossless", words, example)
    add("--method", nargs="+", metavar="METHOD", help="names, or values of --speculative-config (default: all of ours)")
    add("--samples", type=whole(100, 10_000_000), default=4000, metavar="N", help="of each cell (default: 4000)")
    add("--seed", type=whole(0, 2**31), default=0, metavar="S", help="of model, prompts and engines (default: 0)")
    add("--json", type=Path, metavar="FILE", help="where to write the report, too")


def _check(subparsers: Any) -> None:
    words = "run a proposer of your own against a recorded engine, and say what it violates, gains and costs"
    add = _command(
        subparsers,
        "check",
        words,
        "Example: PYTHONPATH=. python -m vllm_specplugins check my_pkg.module:MyProposer. "
        "The exit code is 0 where nothing is violated, 1 where something is, 2 where it cannot be run.",
    )
    add("proposer", metavar="PROPOSER", help="package.module:Class, or the name of a registered method")
    add("--options", type=dictionary, default={}, metavar="JSON", help="of the proposer (default: {})")
    add("--time-budget-ms", type=whole(1, 60_000), default=1000, metavar="N", help="of a step (default: 1000)")
    add(
        "--engine", choices=("v1", "v2"), help="serve a tiny model with it on this model runner, too (v2: needs Triton)"
    )


def _doctor(subparsers: Any) -> None:
    words = "say what speculation would run on here, and what stands in its way; starts no engine"
    add = _command(
        subparsers,
        "doctor",
        words,
        """Example: python -m vllm_specplugins doctor --speculative-config '{"method":"prompt_lookup"}'. """
        "The exit code is 0 where that would be served, 1 where it would not, 2 where the question is wrong.",
    )
    add("--speculative-config", metavar="JSON", help="what you mean to serve with (default: a ready one)")
    add("--model", metavar="MODEL", help="folder of a checkpoint, or its Hugging Face name")
    add("--json", action="store_true", help="print the findings as JSON")


def _build_store(subparsers: Any) -> None:
    words = "make a store for suffix_lookup from texts like those that it will serve"
    example = "Example: python -m vllm_specplugins build-store --tokenizer MODEL --data logs/*.jsonl --out store.bin"
    add = _command(subparsers, "build-store", words, example)
    add("--tokenizer", required=True, metavar="MODEL", help="folder of a checkpoint, or its Hugging Face name")
    add("--data", type=Path, nargs="+", required=True, metavar="FILE", help=f"{DATA}; the last stay longest")
    add("--out", type=Path, required=True, metavar="FILE", help="what store_path will name")
    add("--cache-salt", metavar="SALT", help="whose requests shall see it (default: those without one)")


def _bench(subparsers: Any) -> None:
    words = "measure how much faster methods serve a model here, against no speculation, with engines that take turns"
    example = (
        "Example: python -m vllm_specplugins bench --model MODEL --methods ngram,prompt_lookup --workloads code,copy"
    )
    add = _command(subparsers, "bench", words, f"{example} --batch 1,4")
    add("--model", required=True, metavar="MODEL", help="folder of a checkpoint, or its Hugging Face name")
    add("--methods", nargs="+", default=["ngram,prompt_lookup,cascade"], metavar="METHOD",
        help="names, names with K as in ngram:31, or values of --speculative-config, as many as you like (default: "
        "ngram,prompt_lookup,cascade)")  # fmt: skip
    names = "code, copy, chat, random, and repeat, which asks the same in each round"
    add("--workloads", type=words_list, metavar="NAMES", help=f"of {names} (default: the first four, without --data)")
    add("--data", type=Path, nargs="+", default=[], metavar="FILE", help=DATA)
    add("--batch", type=listed(whole(1, 4096)), default=[1], metavar="1,4", help="requests at a time (default: 1)")
    add("--temperature", type=listed(temperature), default=[0.0], metavar="0,0.8", help="default: 0")
    add("--rounds", type=whole(1, 1000), default=5, metavar="N", help="that are measured, after one (default: 5)")
    add("--prompts", type=whole(1, 10_000), default=4, metavar="N", help="in a round, or the batch if it is more (4)")
    size = whole(16, 1_000_000)
    add("--prompt-tokens", type=size, default=256, metavar="N", help="of built-in prompts (default: 256)")
    size = whole(2, 100_000)
    add("--tokens", type=size, default=64, metavar="N", help="most output tokens of a prompt (default: 64)")
    add("--dtype", choices=("auto", "bfloat16", "float16", "float32"), help="default: float32 on a CPU, else auto")
    add("--ignore-eos", action="store_true", help="outputs go on behind the end of their text, to --tokens")
    add("--keep", action="store_true",
        help="let methods draft from what earlier rounds said, as a server that has run for long")  # fmt: skip
    add("--engine-args", type=dictionary, default={}, metavar="JSON", help="more arguments of vllm.LLM, for all")
    add("--wide", action="store_true", help="show all columns")
    add("--json", type=Path, metavar="FILE", help="where to write the figures")
    add("--plot", type=Path, metavar="FILE", help="where to draw the ratios, as PNG")


def _replay(subparsers: Any) -> None:
    words = "play recorded traffic with every proposer that reads token ids alone: no model, no GPU"
    more = " Say what would have been accepted, what it would have cost, and what to serve it with."
    example = "Example: python -m vllm_specplugins replay --data trace.jsonl --tokenizer MODEL --batch 1,32"
    add = _command(subparsers, "replay", words, example, more)
    add("--data", type=Path, nargs="+", required=True, metavar="FILE",
        help=f"{DATA}; with \"time\" in seconds where requests came one after the other")  # fmt: skip
    add("--tokenizer", metavar="MODEL", help="folder of a model, or its Hugging Face name; for text")
    add("--methods", nargs="+", default=[], metavar="METHOD",
        help="names, names with K, or values of --speculative-config (default: all that can be played)")  # fmt: skip
    add("--num-draft", type=listed(whole(1, 64)), metavar="K",
        help="default: 3,5,8,12,15,24,31,48,64, as long as the speed rises")  # fmt: skip
    add("--batch", type=listed(whole(1, 4096)), default=[1], metavar="1,32", help="requests at a time (default: 1)")
    add("--requests", type=whole(1, 10_000_000), default=2000, metavar="N", help="most requests (default: 2000)")
    add("--gpu", choices=("h100", "h100-34b"), default="h100",
        help="whose measured step costs: Llama 2 7B or Code Llama 34B on an H100 (default: h100)")  # fmt: skip
    add("--step-ms", type=positive, metavar="X", help="your own step without drafts, and with it --token-ms")
    add("--token-ms", type=positive, metavar="X", help="what one more token to verify adds to it")
    add("--draft-us", type=positive, metavar="X", help="of drafting, by request and step (default: measured here)")
    add("--json", type=Path, metavar="FILE", help="where to write the figures")
    add("--plot", type=Path, metavar="FILE", help="where to draw the speed by K, as PNG")


def _common(add: Add, needs_data: bool = True) -> None:
    add("model", metavar="MODEL", help="folder of a checkpoint, or its Hugging Face name")
    words = DATA if needs_data else f"{DATA} (default: Python's standard library)"
    add("--data", type=Path, nargs="+", default=[], required=needs_data, metavar="FILE", help=words)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; 0, or 2 with one sentence on stderr, or 130 if interrupted."""
    args = parser().parse_args(arguments)
    module, needed = COMMANDS[args.command]
    try:
        for name in needed:
            if find_spec(name) is None:
                extra = f"vllm-specplugins[{EXTRAS.get(name, 'vllm')}]"
                raise ConfigError(f"{args.command} needs {name}, which is not installed (pip install '{extra}').")
        return int(import_module(module).run(args))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
