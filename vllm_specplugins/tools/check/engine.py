"""`check --engine`: a proposer in a real engine that serves a tiny model, beside one without speculation."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_specplugins.engine.harness.samples import Drawn, Request, sampling_engine
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
    params = {"temperature": 0, "max_tokens": grid.NUM_GREEDY_TOKENS}
    requests = [Request(prompt, params) for prompt in grid.make_prompts(SEED, grid.NUM_GREEDY_PROMPTS)]
    drawn: list[Drawn] = []
    blame = f"check: PROPOSER failed in an engine on Model Runner {runner.upper()}"
    for number, value in enumerate((None, config)):
        log = folder / f"engine-{number}.log"
        with sampling_engine(blame, log, folder / "model", value, runner=runner) as draw:
            drawn.append(draw(requests))
        advance()
    shutil.rmtree(folder)
    return judged(drawn[0], drawn[1], runner.upper())


def judged(plain: Drawn, drafted: Drawn, runner: str) -> tuple[str, list[str]]:
    """What two engines say of the second one's proposer; see in_engine."""
    where = f"In an engine on Model Runner {runner}"
    words = f"{where}: {drafted.num_drafted} tokens drafted, {drafted.num_accepted} accepted."
    different = sum(a != b for a, b in zip(plain.token_ids, drafted.token_ids, strict=True))
    wrong = [f"{where} it {kind} ({count} times)." for kind, count in drafted.faults.items()]
    if different:
        wrong.append(f"{different} of {len(plain.token_ids)} outputs are not those without it: that is our bug.")
    return words, wrong
