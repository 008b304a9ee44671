"""Methods whose drafts cannot be read off the model's states, for `calibrate`: each is served once, with the most draft
tokens, and its steps say what fewer would have brought.

A draft of K tokens begins with those that shorter ones would have had, and a step's time is the measured one, less what
fewer tokens would have cost. K: num_speculative_tokens.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_specplugins.config import ConfigError, shown
from vllm_specplugins.engine.measure.engine import Served
from vllm_specplugins.methods import parse_config
from vllm_specplugins.tools.speedup import Costs, Prediction

WITHOUT_FILES = ("prompt_lookup", "suffix_lookup", "token_recycling")


@dataclass(frozen=True, slots=True)
class Method:
    """One to be served.

    Args:
        name: for tables.
        config: value for vLLM, with the most draft tokens.
        one_pass: whether all tokens of a draft cost what one costs.
    """

    name: str
    config: Mapping[str, Any]
    one_pass: bool = True

    def __str__(self) -> str:
        return f"{self.name} with {self.config['num_speculative_tokens']} draft tokens"

    def speculative_config(self) -> dict[str, Any] | None:
        """Its value for vLLM."""
        return dict(self.config)


@dataclass(frozen=True, slots=True)
class ServedRow:
    """What was found about one method.

    Args:
        name: of it.
        config: as it was served.
        share: of steps that had a draft.
        accepted: accepted / verified draft tokens.
        prediction: for each K; that for the one that was served is what was measured.
    """

    name: str
    config: Mapping[str, Any]
    share: float
    accepted: float
    prediction: Prediction

    def speculative_config(self) -> dict[str, Any]:
        """The value for vLLM's `--speculative-config`."""
        return {**self.config, "num_speculative_tokens": self.prediction.num_draft}


def picked(also: str) -> list[str]:
    """The names in a list with commas between them; ConfigError for one that cannot be served without more."""
    names = [name for name in map(str.strip, also.split(",")) if name and name != "none"]
    for name in names:
        if name not in (*WITHOUT_FILES, "cascade"):
            allowed = ", ".join((*WITHOUT_FILES, "cascade", "none"))
            raise ConfigError(f"--also must be of {allowed}, with commas between them, not {shown(name)}.")
    return names


def methods_to_serve(args: argparse.Namespace) -> list[Method]:
    """Those that the user names, and those whose trained parts are given; a cascade comes behind all others.

    Raises:
        ConfigError: a name, or a part that is not one.
    """
    most = args.max_draft
    found = [Method(name, {"method": name, "num_speculative_tokens": most}) for name in picked(args.also)]
    found = [method for method in found if method.name in WITHOUT_FILES]
    if args.jump:
        config = {"method": "jump", "head": str(args.jump.resolve()), "num_speculative_tokens": most}
        found.append(Method("jump", config, one_pass=False))
    if args.look_ahead:
        found.append(Method("look_ahead", _look_ahead(args.look_ahead, args.exit_head, most)))
    if args.medusa:
        found.append(Method("medusa", _medusa(args.medusa, most)))
    for method in found:
        parse_config(dict(method.config))
    return found


def _look_ahead(folder: Path, exit_head: Path | None, most: int) -> dict[str, Any]:
    """With the head, if it is of their layer: they were trained through it."""
    from vllm_specplugins.proposers.exit_head import read_head_config
    from vllm_specplugins.proposers.look_ahead import KIND

    made = KIND.read_config(folder)
    num_draft = min(most, made.num_embeddings + 1)
    own = {"exit_layer": made.exit_layer, "look_ahead": str(folder.resolve())}
    if exit_head is not None and read_head_config(exit_head).exit_layer == made.exit_layer:
        own["exit_head"] = str(exit_head.resolve())
    return {"method": "early_exit", **own, "num_speculative_tokens": num_draft}


def _medusa(folder: Path, most: int) -> dict[str, Any]:
    from vllm_specplugins.proposers.medusa_heads import num_heads

    config = {"method": "medusa", "heads": str(folder.resolve())}
    return {**config, "num_speculative_tokens": min(most, num_heads(folder))}


def cascade_of(rows: Sequence[Any], most: int) -> Method:
    """A lookup in front of the fastest of other methods that can be a stage; alone behind a gate, if that is a lookup.

    Args:
        rows: of findings.Row and ServedRow.
        most: K.
    """
    stages = [row for row in rows if row.speculative_config()["method"] != "medusa"]
    best = max(stages, key=lambda row: row.prediction.speed_up).speculative_config()
    stage = {key: value for key, value in best.items() if key != "num_speculative_tokens"}
    before = [] if stage["method"] in WITHOUT_FILES else [{"method": "prompt_lookup"}]
    config = {"method": "cascade", "stages": [*before, stage], "num_speculative_tokens": most}
    name = f"{before[0]['method']} + {stage['method']}" if before else f"{stage['method']}, gated"
    return Method(name, config, one_pass=False)


def measured(method: Method, served: Sequence[Served], plain_ms: float, costs: Costs) -> ServedRow:
    """What its steps say of itself and of fewer draft tokens."""
    most = int(method.config["num_speculative_tokens"])
    emitted, drafted, step_ms, propose_ms = (
        np.concatenate([np.asarray(getattr(request, name), np.float64) for request in served])
        for name in ("emitted", "drafted", "step_ms", "propose_ms")
    )
    accepted = np.minimum(emitted - 1, drafted)
    verify_ms = np.array([costs.step_ms(num_draft, 0.0) for num_draft in range(most + 1)])
    by_num_draft, tokens = {}, {}
    for num_draft in range(1, most + 1):
        fewer = np.minimum(drafted, num_draft).astype(int)
        ms = step_ms - (verify_ms[drafted.astype(int)] - verify_ms[fewer])
        if not method.one_pass:
            ms = ms - propose_ms * (1 - num_draft / most)
        tokens[num_draft] = float(1 + np.minimum(accepted, num_draft).mean())
        by_num_draft[num_draft] = tokens[num_draft] * plain_ms / float(ms.mean())
    best = max(by_num_draft, key=lambda num_draft: by_num_draft[num_draft])
    prediction = Prediction(best, tokens[best], by_num_draft[best], by_num_draft)
    rate = float(accepted.sum() / max(1.0, drafted.sum()))
    return ServedRow(method.name, method.config, float((drafted > 0).mean()), rate, prediction)
