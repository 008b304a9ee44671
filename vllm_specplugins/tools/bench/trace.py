"""`bench --trace`: engines are forced to emit the outputs of a log, so that any traffic can be timed on any machine.

All methods emit the same tokens, at the kernels, shapes and host times of real serving; neither the model's weights nor
exact arithmetic matter. Requests come closed (a new one when one ends) or at random times.
"""

import argparse
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, NoReturn

from vllm_specplugins.config import ConfigError
from vllm_specplugins.engine.harness.traffic import Forced, Turn
from vllm_specplugins.methods import METHODS, runs_target
from vllm_specplugins.parsing import parse_config, registered_methods
from vllm_specplugins.tools.base_model import load_config
from vllm_specplugins.tools.bench.figures import Cell
from vllm_specplugins.tools.bench.workloads import Workload
from vllm_specplugins.tools.data import answered
from vllm_specplugins.tools.formats import accepted_lengths
from vllm_specplugins.tools.picker import NONE, Config


def read_log(args: argparse.Namespace, configs: Mapping[str, Config | None]) -> Workload:
    """The requests of a log, with the outputs that engines are forced to emit.

    Raises:
        ConfigError: a method, a temperature or a log that cannot be forced.
    """
    _check(args, configs)
    vocab_size = load_config(args.model).get_text_config().vocab_size
    count, rows = max(args.prompts, *args.batch), []
    for sample in answered([args.trace], _no_tokenizer):
        output = (sample.output or [])[: args.tokens]
        if (highest := max([*sample.prompt, *output], default=0)) >= vocab_size:
            raise ConfigError(f"--trace: {sample.place} must hold token ids below {vocab_size}, not {highest}.")
        if sample.prompt and output:
            rows.append((sample.prompt, output, _accepted(sample.row, args.drafter, sample.place)))
        if len(rows) == count:
            break
    if not rows:
        raise ConfigError(f"--trace must be a file with a prompt and an output, not {args.trace}.")
    prompts, outputs, accepted = map(list, zip(*rows, strict=True))
    log = Forced(outputs, accepted if args.drafter else None)
    return Workload(Path(args.trace).stem, prompts, log=log)


def _no_tokenizer() -> NoReturn:
    raise ConfigError('must hold "prompt" and "output" as token ids to be forced, not as text.')


def _accepted(row: Mapping[str, Any], drafter: str | None, place: str) -> list[int]:
    """How many tokens of a drafter are accepted at each position of a row's output."""
    if drafter is None:
        return []
    try:
        return accepted_lengths(row, drafter)[drafter]
    except ConfigError as error:
        raise ConfigError(f"--trace: {place} {error}") from None


def _check(args: argparse.Namespace, configs: Mapping[str, Config | None]) -> None:
    if args.temperature != [0.0]:
        raise ConfigError(f"--temperature must be 0 with --trace, which forces greedy choices, not {args.temperature}.")
    if args.engine_args.get("enable_batch_sharded_sampling"):
        raise ConfigError("--engine-args: enable_batch_sharded_sampling must be false with --trace, not true.")
    ours = {*METHODS, *registered_methods()}
    for name, config in configs.items():
        if config and config["method"] in ours and runs_target(parse_config(config)):
            raise ConfigError(
                f"--methods: {name} must not read the target's layers with --trace: an early exit, a jump or Medusa "
                "drafts by real weights, which no log forces."
            )


def arrivals(share: float, count: int, plain: Sequence[Turn]) -> list[float]:
    """Seconds at which requests arrive, at random (a Poisson process) and the same in each run.

    Args:
        share: of the rate at which no speculation has served closed traffic.
        plain: turns of no speculation with closed traffic.
    """
    served, seconds = (
        sum(values) for values in zip(*((len(turn.answers), turn.seconds) for turn in plain), strict=True)
    )
    rate, random = share * served / seconds, Random(0)
    return list(accumulate(random.expovariate(rate) for _ in range(count)))


def plain_turns(turns: Mapping[Cell, Mapping[str, Sequence[Turn]]], workload: str) -> Sequence[Turn]:
    """Turns of no speculation in the largest closed batch of a workload."""
    closed = [cell for cell in turns if cell.workload == workload and not cell.rate]
    return turns[max(closed, key=lambda cell: cell.batch)][NONE][1:]
