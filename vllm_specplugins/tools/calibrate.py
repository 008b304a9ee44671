"""`calibrate`: finds the method and the number of draft tokens with which a model is served fastest.

An engine without speculation continues the user's own text greedily; each layer is then asked, token by token, whether
it would have drafted what came out; and engines with early exit tell what drafting and verifying cost here. From these
follows the speed-up of every layer and K (speedup.py). Other methods are served, once each (served.py), last a cascade
of a lookup and the best of them.
"""

import argparse
import re
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress

from vllm_specplugins.config import ConfigError, shown
from vllm_specplugins.engine.measure.engine import Engine, EngineSettings, Served
from vllm_specplugins.proposers.exit_head import ExitHead, check_exit_head, read_head_config
from vllm_specplugins.tools.agreement import agreements
from vllm_specplugins.tools.base_model import BaseModel, Exit, load_config, load_tokenizer
from vllm_specplugins.tools.data import MIN_ROW_TOKENS, token_rows
from vllm_specplugins.tools.files import every_nth, make_folder
from vllm_specplugins.tools.findings import JSON_FILE, Findings, Row, facts, plot, show
from vllm_specplugins.tools.progress import progress
from vllm_specplugins.tools.report import check_files, stdout, write_json
from vllm_specplugins.tools.served import Method, cascade_of, measured, methods_to_serve, picked
from vllm_specplugins.tools.speedup import Costs, Timing, predict

MIN_STEPS = 8  # an output with fewer says little about the time of a step


@dataclass(frozen=True, slots=True)
class Arm:
    """An engine to be timed: with early exit at exit_layer and K, or None for both without speculation."""

    exit_layer: int | None = None
    num_draft: int | None = None
    exit_head: Path | None = None

    def __str__(self) -> str:
        if self.exit_layer is None:
            return "no speculation"
        head = " and the head" if self.exit_head else ""
        return f"early exit after layer {self.exit_layer} with {self.num_draft} draft tokens{head}"

    def speculative_config(self) -> dict[str, Any] | None:
        """Its value for vLLM."""
        if self.exit_layer is None:
            return None
        head = {"exit_head": str(self.exit_head.resolve())} if self.exit_head else {}
        return {
            "method": "early_exit", "exit_layer": self.exit_layer, **head, "num_speculative_tokens": self.num_draft
        }  # fmt: skip

    def timing(self, served: Sequence[Served]) -> Timing:
        """What its answers say of its costs."""
        assert self.exit_layer is not None and self.num_draft is not None
        steps = [step for request in served for step in zip(request.step_ms, request.propose_ms, strict=True)]
        return Timing(
            exit_layer=self.exit_layer,
            num_draft=self.num_draft,
            verify_ms=statistics.median(step_ms - propose_ms for step_ms, propose_ms in steps),
            propose_ms=statistics.median(propose_ms for _, propose_ms in steps),
        )


class Bench:
    """Answers the prompts with engines: one engine after the other, or all at once and in turns."""

    def __init__(self, args: argparse.Namespace, prompts: Sequence[Sequence[int]], logs: Path, progress: Progress):
        self.prompts = prompts
        self._args, self._logs, self._progress = args, logs, progress
        self._engines = progress.add_task("engines")

    def expect(self, num_arms: int) -> None:
        """How many arms there will be in all."""
        self._progress.update(self._engines, total=num_arms)

    def serve(self, arms: Sequence[Arm | Method]) -> list[list[Served]]:
        """What each arm made of every prompt; the first prompt goes unmeasured before."""
        if not self._args.together:
            return [self._serve([arm])[0] for arm in arms]
        return self._serve(arms)

    def _serve(self, arms: Sequence[Arm | Method]) -> list[list[Served]]:
        served: list[list[Served]] = [[] for _ in arms]
        tasks = [self._progress.add_task(f"{arm}: starting vLLM", total=1 + len(self.prompts)) for arm in arms]
        with ExitStack() as stack:
            engines = [stack.enter_context(self._engine(arm)) for arm in arms]
            for arm, engine, task in zip(arms, engines, tasks, strict=True):
                engine.wait()
                engine.answer(self.prompts[0])
                self._progress.update(task, description=str(arm), advance=1)
            for prompt in self.prompts:
                for engine, answers, task in zip(engines, served, tasks, strict=True):
                    answers.append(engine.answer(prompt))
                    self._progress.advance(task)
        for arm, answers in zip(arms, served, strict=True):
            self._progress.update(self._engines, advance=1, description=f"engines (the last: {arm}, {speed(answers)})")
        return served

    def _engine(self, arm: Arm | Method) -> Engine:
        args = self._args
        settings = EngineSettings(
            model=args.model,
            dtype=args.dtype,
            max_model_len=args.prompt_tokens + args.tokens + args.max_draft + 1,
            enforce_eager=args.enforce_eager,
        )
        log = self._logs / f"engine-{'-'.join(re.findall(r'[a-z0-9]+', str(arm)))}.log"
        return Engine(settings, arm.speculative_config(), args.tokens, log)


def run(args: argparse.Namespace) -> int:
    """The command; prints its findings and returns the exit status."""
    methods = methods_to_serve(args)
    check_files(args)
    prompts = pick_prompts(args)
    layers = check_layers(args)
    logs = make_folder(args.out) if args.out else Path(tempfile.mkdtemp(prefix="specplugins-"))
    with progress() as bars:
        findings = calibrate(args, layers, methods, Bench(args, prompts, logs, bars))
    show(findings, stdout())
    if args.out:
        write_json(facts(findings), args.out / JSON_FILE, "--out")
    else:
        shutil.rmtree(logs)
    if args.plot:
        plot(findings, args.plot)
    return 0


def calibrate(args: argparse.Namespace, layers: Sequence[int], methods: Sequence[Method], bench: Bench) -> Findings:
    """Serves, compares and predicts: every layer as it is, the trained head if there is one, and other methods."""
    arms = [Arm(), *arms_to_time(args, layers)]
    bench.expect(len(arms) + (args.exit_head is not None) + len(methods) + ("cascade" in picked(args.also)))
    exits = [Exit(layer) for layer in layers]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.exit_head:
        head = ExitHead.load(args.exit_head, device)
        exits.append(Exit(head.config.exit_layer, head))
        arms.append(Arm(head.config.exit_layer, args.max_draft, args.exit_head))
    plain, *served = bench.serve([*arms, *methods])
    served, others = served[: len(arms) - 1], served[len(arms) - 1 :]
    check_lengths(plain, args.max_draft)
    timings = [arm.timing(answers) for arm, answers in zip(arms[1:], served, strict=True)]
    plain_ms = statistics.median(ms for request in plain for ms in request.step_ms)
    costs = Costs.fit(plain_ms, timings[:2])
    draft_ms = [*map(costs.draft_ms, layers), *(timing.draft_ms for timing in timings[2:])]
    found = agreements(BaseModel.load(args.model, device), exits, bench.prompts, plain)
    rows = [
        Row(
            exit_layer=place.layer,
            exit_head=str(args.exit_head.resolve()) if place.head else None,
            match_rate=agreement.match_rate,
            overlap=agreement.overlap,
            draft_ms=ms,
            prediction=predict(agreement.match, costs, ms, args.max_draft),
        )
        for place, agreement, ms in zip(exits, found, draft_ms, strict=True)
    ]
    more = [measured(method, own, plain_ms, costs) for method, own in zip(methods, others, strict=True)]
    if "cascade" in picked(args.also):
        cascade = cascade_of([*rows, *more], args.max_draft)
        more.append(measured(cascade, bench.serve([cascade])[0], plain_ms, costs))
    conditions = {"model": args.model, "dtype": args.dtype, "prompts": len(plain), "tokens": args.tokens}
    num_tokens = sum(len(request.token_ids) for request in plain)
    return Findings(conditions, costs, rows, more, num_tokens, max(map(spread, [plain, *served])))


def pick_prompts(args: argparse.Namespace) -> list[list[int]]:
    """Beginnings for the engines to continue, spread evenly over the user's text."""
    if args.tokens < (least := args.max_draft + MIN_STEPS):
        raise ConfigError(f"--tokens must be at least {least} with --max-draft {args.max_draft}, not {args.tokens}.")
    rows = token_rows(args.data, load_tokenizer(args.model), args.prompt_tokens)
    if not rows:
        raise ConfigError(f"--data must hold at least {MIN_ROW_TOKENS} tokens in one file, not fewer.")
    return [rows[index] for index in every_nth(len(rows), args.prompts)]


def check_layers(args: argparse.Namespace) -> list[int]:
    """The exit layers to look at, in order; all but the last if the user names none.

    Raises:
        ConfigError: one that the model does not have, or an exit head that does not fit the model.
    """
    config = load_config(args.model)
    last = config.num_hidden_layers - 1
    layers = sorted(set(args.layers or range(1, last + 1)))
    if last < 1:
        raise ConfigError("MODEL must have at least 2 layers, not 1.")
    if not 1 <= layers[0] <= layers[-1] <= last:
        raise ConfigError(f"--layers must be integers from 1 to {last} for this model, not {shown(args.layers)}.")
    if args.exit_head:
        layer = min(read_head_config(args.exit_head).exit_layer, last)
        sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
        check_exit_head(args.exit_head, exit_layer=layer, **sizes)
    return layers


def arms_to_time(args: argparse.Namespace, layers: Sequence[int]) -> list[Arm]:
    """Two exit layers for the cost of one, two K for the cost of verification."""
    first, middle = layers[0], layers[len(layers) // 2]
    return [Arm(first, args.max_draft), Arm(middle, max(1, args.max_draft // 2))]


def check_lengths(served: Sequence[Served], max_draft: int) -> None:
    """Raises ConfigError if no output is long enough to replay K = max_draft."""
    longest = max(len(request.token_ids) for request in served)
    if longest < max_draft + MIN_STEPS:
        wanted = f"by {max_draft + MIN_STEPS} tokens or more"
        raise ConfigError(f"--data must hold text that the model continues {wanted}, not by {longest} at most.")


def speed(served: Sequence[Served]) -> str:
    """Of an engine, for a line of progress."""
    ms = sum(sum(request.step_ms) for request in served)
    return f"{1000 * sum(len(request.token_ids) - 1 for request in served) / max(ms, 1e-3):.0f} tokens a second"


def spread(served: Sequence[Served]) -> float:
    """Interquartile range of an engine's steps over their median."""
    low, middle, high = np.quantile([ms for request in served for ms in request.step_ms], (0.25, 0.5, 0.75))
    return float((high - low) / middle)
