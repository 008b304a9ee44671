"""Implements `calibrate`, which runs `bench` on the user's text for the methods that can serve a model. The model
continues the text greedily, and an exit's draft token counts as accepted if it and all earlier ones are correct. The
cost is an estimate: a draft token takes its layers' share of a step, and verification takes no time. Engines then serve
the best exits and the methods that the user names. K: num_draft."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from vllm_specplugins.config import ConfigError, SpecConfig, brief
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.proposers.heads.exit_head import ExitHead
from vllm_specplugins.proposers.heads.jump_head import JumpHead
from vllm_specplugins.tools.base_model import BaseModel, load_config, load_tokenizer
from vllm_specplugins.tools.bench.command import measure, num_prompts
from vllm_specplugins.tools.bench.report import tell
from vllm_specplugins.tools.bench.workloads import Workload
from vllm_specplugins.tools.data import MIN_ROW_TOKENS, token_rows
from vllm_specplugins.tools.files import every_nth
from vllm_specplugins.tools.picker import NONE, Config, is_ours, pick
from vllm_specplugins.tools.progress import progress
from vllm_specplugins.tools.report import check_json, say, show_table
from vllm_specplugins.tools.skipping import choose_layers
from vllm_specplugins.tools.training.kinds import exit_guesser, initial_head
from vllm_specplugins.tools.training.scores import Text, accept_probs, mean_length, write_texts

MIN_STEPS = 8  # of an output: fewer measure too little
COLUMNS = ("same", "min(p, q)", "best K", "tok/step")
LEGEND = (
    "same: share of tokens for which the exit drafts the model's greedy token. min(p, q): share of the exit's samples "
    "that verification accepts at temperature 1. tok/step: tokens per step at the best K, replayed on the model's "
    "outputs, where a draft token costs its share of the layers. The exits in bold are served."
)


@dataclass(frozen=True, slots=True)
class ExitRow:
    exit_layer: int
    match_rate: float  # share of the tokens that it would have drafted at temperature 0
    overlap: float  # mean sum of min(p, q): share of its samples that is accepted at temperature 1
    num_draft: int  # K with the highest estimated speed
    tokens_per_step: float  # with that K
    guess: float  # estimated speed-up over no speculation

    @property
    def name(self) -> str:
        return f"exit {self.exit_layer}"


def run(args: argparse.Namespace) -> int:
    methods = {name: config for name, config in pick(args.also, "--also").items() if config}
    check_json(args)
    for config in filter(is_ours, methods.values()):  # checked before minutes of work
        _check_parts(parse_config(config))
    args.max_concurrency, args.temperature, args.ignore_eos = [1], [0.0], False
    args.trace, args.rate, args.load_format = None, [], None
    args.engine_args = {"enforce_eager": True} if args.enforce_eager else {}
    if args.layers:
        args.rounds = 0  # no additional prompts
        choose_layers(args, pick_prompts(args).prompts)
        return 0
    workload, layers = pick_prompts(args), pick_layers(args)
    with progress() as bars:
        bars.add_task("comparing exits with the model", total=None)
        rows = exit_rows(args, layers, workload.take(args.num_prompts))
        bars.remove_task(bars.task_ids[-1])
        best = sorted(rows, key=lambda row: -row.guess)[: args.exits]
        report = measure(args, {NONE: None, **configs(best, methods)}, [workload], bars, together=False)
    show(rows, best)
    return tell(args, report, {"exits": [asdict(row) for row in rows]})


def _check_parts(config: SpecConfig) -> None:
    """Raises ConfigError if the folder of a trained part has no part."""
    for part in config.parts:
        for field, kind in (("head", JumpHead), ("exit_head", ExitHead)):
            if (folder := getattr(part.method_config, field, None)) is not None:
                kind.read_config(folder)


def pick_prompts(args: argparse.Namespace) -> Workload:
    if args.output_len < (least := args.max_draft + MIN_STEPS):
        raise ConfigError(
            f"--output-len must be at least {least} with --max-draft {args.max_draft}, not {args.output_len}."
        )
    rows = token_rows(args.dataset_path, load_tokenizer(args.model), args.prompt_tokens)
    if not rows:
        raise ConfigError(f"--dataset-path must have at least {MIN_ROW_TOKENS} tokens in one file.")
    return Workload("data", [rows[index] for index in every_nth(len(rows), num_prompts(args))])


def pick_layers(args: argparse.Namespace) -> list[int]:
    """Returns the user's exit layers, or all layers except the last. Raises ConfigError for a layer that the model does
    not have."""
    last = load_config(args.model).num_hidden_layers - 1
    layers = sorted(set(args.exit_layers or range(1, max(1, last) + 1)))
    if not 1 <= layers[0] <= layers[-1] <= last:
        raise ConfigError(f"--exit-layers must be integers from 1 to {last} for this model, not {brief(layers)}.")
    return layers


@torch.no_grad()
def exit_rows(args: argparse.Namespace, layers: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[ExitRow]:
    """Returns a row for each exit, with its best K. Raises ConfigError if the model's outputs are too short to
    measure."""
    base = BaseModel.load(args.model, "cuda" if torch.cuda.is_available() else "cpu")
    texts, least = list[Text](), args.max_draft + MIN_STEPS
    for length in sorted(set(map(len, prompts))):
        alike = [prompt for prompt in prompts if len(prompt) == length]
        texts += write_texts(base, alike, 0.0, length, length + args.output_len)
    if (longest := max(len(text.row) - text.begin for text in texts)) < least:
        raise ConfigError(
            f"--dataset-path must have text that the model continues by at least {least} tokens, not by {longest}."
        )
    rows = []
    for layer in layers:
        guesser = exit_guesser(base, initial_head(base, layer))
        probs = [accept_probs(base, text, guesser, 1) for text in texts]
        # Tokens by K: a step with a draft beyond the end of an output does not count.
        bits = [its["greedy"][0] for its in probs]
        tokens = {
            k: mean_length([matches.unfold(0, k, 1).T for matches in bits if len(matches) >= k])
            for k in range(1, args.max_draft + 1)
        }
        gains = {k: emitted / (1 + k * layer / base.num_layers) for k, emitted in tokens.items()}
        best = max(gains, key=lambda k: gains[k])
        shared = torch.cat([its["overlap"][0] for its in probs]).mean().item()
        rows.append(ExitRow(layer, torch.cat(bits).mean().item(), shared, best, tokens[best], gains[best]))
    return rows


def configs(best: Sequence[ExitRow], methods: Mapping[str, Config]) -> dict[str, Config]:
    """Returns the configurations to serve; `cascade` ends with a trained part among them, or with the best exit."""
    served: dict[str, Config] = {
        row.name: {"method": "early_exit", "exit_layer": row.exit_layer, "num_speculative_tokens": row.num_draft}
        for row in best
    }
    trained = [config for config in methods.values() if {"head", "exit_head"} & config.keys()]
    last = next(iter([*trained, *served.values()]), None)
    for name, config in methods.items():
        if name == "cascade" and last:
            stage = {key: value for key, value in last.items() if key != "num_speculative_tokens"}
            config = {**config, "stages": [*config["stages"][:-1], stage]}
        served[name] = config
    return served


def show(rows: Sequence[ExitRow], served: Sequence[ExitRow]) -> None:
    lines = []
    for row in rows:
        figures = f"{row.match_rate:.1%}", f"{row.overlap:.1%}", str(row.num_draft), f"{row.tokens_per_step:.2f}"
        style = "bold" if row in served else "none"
        lines.append([f"[{style}]{cell}[/]" for cell in (row.name, *figures)])
    show_table(COLUMNS, {"": lines}, "exit")
    say(f"{LEGEND}\n")
