"""`check --engine`: a proposer in a real engine that serves a tiny model, beside one without speculation."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_specplugins.engine.measure.trial import Trial, tried
from vllm_specplugins.tools.lossless import grid
from vllm_specplugins.tools.lossless.checkpoint import write_checkpoint

SEED = 0


def in_engine(config: Mapping[str, Any], runner: str, advance: Callable[[], None]) -> tuple[str, list[str]]:
    """What the proposer did on a runner, in words, and what was wrong, a sentence each.

    Args:
        config: the `speculative_config`.
        runner: "v1" or "v2".
        advance: called after each of two engines.

    Raises:
        ConfigError: an engine failed, whose log is kept; or there is no such runner here.
    """
    folder = Path(tempfile.mkdtemp(prefix="specplugins-"))
    write_checkpoint(folder / "model", SEED)
    prompts = grid.make_prompts(SEED, grid.NUM_GREEDY_PROMPTS)
    trials: list[Trial] = []
    for number, value in enumerate((None, config)):
        log = folder / f"engine-{number}.log"
        trials.append(tried(folder / "model", value, runner, prompts, grid.NUM_GREEDY_TOKENS, log))
        advance()
    shutil.rmtree(folder)
    return judged(trials[0], trials[1], runner.upper())


def judged(plain: Trial, drafted: Trial, runner: str) -> tuple[str, list[str]]:
    """What two trials say of the second one's proposer; see in_engine."""
    stats = drafted.stats
    where = f"In an engine on Model Runner {runner}"
    words = f"{where}: {stats['drafted_tokens']} tokens drafted, {stats['accepted_tokens']} accepted."
    different = sum(a != b for a, b in zip(plain.token_ids, drafted.token_ids, strict=True))
    wrong = [f"{where} it {kind} ({count} times)." for kind, count in stats["faults"].items()]
    if different:
        wrong.append(f"{different} of {len(plain.token_ids)} outputs are not those without it: that is our bug.")
    return words, wrong
