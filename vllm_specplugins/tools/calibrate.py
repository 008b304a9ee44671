"""`calibrate`: `bench`, on the user's own text, over the methods that a model can be served with.

The model continues the text greedily; each layer is asked how often it would have drafted what came out (exits.py), and
the best exits are served, beside the methods that the user names, trained parts among them.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
from rich.console import Console

from vllm_specplugins.config import ConfigError, brief
from vllm_specplugins.tools.base_model import BaseModel, load_config, load_tokenizer
from vllm_specplugins.tools.bench.command import Turns, measure
from vllm_specplugins.tools.bench.report import tell
from vllm_specplugins.tools.bench.workloads import Workload
from vllm_specplugins.tools.data import MIN_ROW_TOKENS, token_rows
from vllm_specplugins.tools.exits import ExitRow, exit_rows
from vllm_specplugins.tools.files import every_nth
from vllm_specplugins.tools.picker import NONE, Config, pick
from vllm_specplugins.tools.progress import progress
from vllm_specplugins.tools.report import check_files, say, show_table, stdout, table_of

MIN_STEPS = 8  # an output with fewer says little about an exit
COLUMNS = ("same", "min(p, q)", "best K", "tok/step")
LEGEND = (
    "same: how often the exit would have drafted the model's greedy token. min(p, q): share of the exit's samples that "
    "is accepted at temperature 1. tok/step: that best K emits, replayed on the model's outputs; K is best where a "
    "draft token takes its share of the layers. Exits in bold are served."
)


def run(args: argparse.Namespace) -> int:
    """The command; prints its findings and returns the exit status of `bench`."""
    methods = {name: config for name, config in pick(args.also, "--also").items() if config}
    check_files(args)
    args.batch, args.temperature, args.ignore_eos = [1], [0.0], False
    args.trace, args.rate, args.load_format = None, [], None
    args.engine_args = {"enforce_eager": True} if args.enforce_eager else {}
    workload = pick_prompts(args)
    exits = pick_exits(args)
    with progress() as bars:
        turns: Turns = {}
        measure(args, {NONE: None}, [workload], bars, together=False, turns=turns)
        [plain] = turns.values()
        outputs = [answer.token_ids for turn in plain[NONE] for answer in turn.answers]
        prompts = [prompt for own in workload.rounds(args.prompts, 1 + args.rounds) for prompt in own]
        rows = compare(args, exits, prompts[: args.prompts], outputs[: args.prompts])
        best = sorted(rows, key=lambda row: -row.guess)[: args.exits]
        configs = {NONE: None, **candidates(best, methods)}
        report = measure(args, configs, [workload], bars, together=False, turns=turns)
    show(rows, best, stdout())
    return tell(args, report, {"exits": [asdict(row) for row in rows]})


def pick_prompts(args: argparse.Namespace) -> Workload:
    """Beginnings for the engines to continue, spread evenly over the user's text."""
    if args.tokens < (least := args.max_draft + MIN_STEPS):
        raise ConfigError(f"--tokens must be at least {least} with --max-draft {args.max_draft}, not {args.tokens}.")
    rows = token_rows(args.data, load_tokenizer(args.model), args.prompt_tokens)
    if not rows:
        raise ConfigError(f"--data must hold at least {MIN_ROW_TOKENS} tokens in one file, not fewer.")
    return Workload("data", [rows[index] for index in every_nth(len(rows), args.prompts * (1 + args.rounds))])


def pick_exits(args: argparse.Namespace) -> list[int]:
    """The exit layers to look at, in order, all but the last if the user names none; ConfigError for one that the model
    does not have."""
    last = load_config(args.model).num_hidden_layers - 1
    layers = sorted(set(args.layers or range(1, max(1, last) + 1)))
    if not 1 <= layers[0] <= layers[-1] <= last:
        raise ConfigError(f"--layers must be integers from 1 to {last} for this model, not {brief(layers)}.")
    return layers


def compare(
    args: argparse.Namespace,
    exits: Sequence[int],
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
) -> list[ExitRow]:
    """How the exits do on the model's outputs; ConfigError if none of these is long enough to replay K = max_draft."""
    longest = max(map(len, outputs))
    if longest < args.max_draft + MIN_STEPS:
        wanted = f"by {args.max_draft + MIN_STEPS} tokens or more"
        raise ConfigError(f"--data must hold text that the model continues {wanted}, not by {longest} at most.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return list(exit_rows(BaseModel.load(args.model, device), exits, prompts, outputs, args.max_draft))


def candidates(best: Sequence[ExitRow], methods: Mapping[str, Config]) -> dict[str, Config]:
    """What is served: exits and methods; `cascade` ends with a trained part among them, or with the best exit."""
    found = {row.name: row.speculative_config() for row in best}
    trained = [config for config in methods.values() if {"head", "exit_head"} & config.keys()]
    last = next(iter([*trained, *found.values()]), None)
    for name, config in methods.items():
        if name == "cascade" and last:
            stage = {key: value for key, value in last.items() if key != "num_speculative_tokens"}
            config = {**config, "stages": [*config["stages"][:-1], stage]}
        found[name] = config
    return found


def show(rows: Sequence[ExitRow], served: Sequence[ExitRow], console: Console) -> None:
    """Prints the table of exits."""
    table = table_of("exit", COLUMNS)
    for row in rows:
        figures = f"{row.match_rate:.1%}", f"{row.overlap:.1%}", str(row.num_draft), f"{row.tokens_per_step:.2f}"
        table.add_row(row.name, *figures, style="bold" if row in served else None)
    show_table(console, table)
    say(console, f"{LEGEND}\n")
