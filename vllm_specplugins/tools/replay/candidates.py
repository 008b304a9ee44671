"""What is compared: history proposers, each as it is and behind a gate, with each K."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from vllm_specplugins.config import CommonConfig, ConfigError, built_in_stage, methods_of
from vllm_specplugins.custom import reads_likeliest
from vllm_specplugins.methods import (
    METHODS,
    drafts_on_device,
    parse_config,
    registered_methods,
    runs_target,
)
from vllm_specplugins.tools.picker import Config, pick_methods
from vllm_specplugins.tools.replay.costs import LOOKUP_US, NO_SPECULATION_US, HostCost

ALWAYS, GATED = "always", "gated"
SHARED = {entry.name for entry in fields(CommonConfig)}


# K that are tried where the user names none: on, as long as the speed rises.
LADDER = (3, 5, 8, 12, 15, 24, 31, 48, 64)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method, whether a gate chooses its lengths, and its whole --speculative-config."""

    method: str
    policy: str
    config: Config

    @property
    def num_draft(self) -> int:
        """K."""
        return int(self.config["num_speculative_tokens"])

    @property
    def key(self) -> tuple[str, str, int]:
        """What its rows are found by."""
        return self.method, self.policy, self.num_draft

    @property
    def host(self) -> HostCost:
        """What the host does in its steps: a method behind a gate is where it is without one."""
        stages = self.config.get("stages", ())
        alone = stages[0] if len(stages) == 1 else self.config
        waits = not drafts_on_device(parse_config({**alone}))
        return HostCost(NO_SPECULATION_US if waits else LOOKUP_US, waits)


def candidates(wanted: Sequence[str], num_drafts: Sequence[int]) -> list[Candidate]:
    """All that are to be played, by method, policy and K.

    Args:
        wanted: as for `bench`; nothing: every history proposer that is here, and cascades of those of ours.

    Raises:
        ConfigError: a method that is none, or that needs more than histories.
    """
    found = []
    for name, config in pick_methods(wanted or list(_default())).items():
        if config is None:
            continue
        _check_reads_histories(name, config)
        for policy, its in _policies(config):
            found += [Candidate(name, policy, {**its, "num_speculative_tokens": count}) for count in num_drafts]
    return found


def _default() -> Iterator[str]:
    """Names of every history proposer."""
    for name, method in METHODS.items():
        if not method.runs_target and name not in ("cascade", "custom", "grammar"):
            yield name
    yield from registered_methods()


def _check_reads_histories(name: str, config: Config) -> None:
    if config["method"] in (*METHODS, *registered_methods()):
        parsed = parse_config(config)
        needs_more = runs_target(parsed) or reads_likeliest(parsed) or "grammar" in methods_of(parsed)
        if not needs_more and built_in_stage(parsed) is None:
            return
    raise ConfigError(f"--methods must be proposers that read token ids alone, as prompt_lookup does, not {name}.")


def _policies(config: Config) -> Iterator[tuple[str, Config]]:
    """The configuration with all that is found drafted, and behind a gate."""
    yield ALWAYS, {**config, "gate": "off"}
    if config["method"] == "cascade":
        yield GATED, {**config, "gate": "auto"}
        return
    shared = {key: value for key, value in config.items() if key in SHARED}
    stage: dict[str, Any] = {key: value for key, value in config.items() if key not in SHARED}
    yield GATED, {"method": "cascade", **shared, "gate": "auto", "stages": [stage]}
