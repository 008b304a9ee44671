"""What is compared: history proposers, each as it is and behind a gate, with each K."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_specplugins.config import ConfigError, built_in_stage
from vllm_specplugins.draft import Proposer, ProposerContext
from vllm_specplugins.methods import METHODS, behind_gate, build_proposer, drafters
from vllm_specplugins.parsing import parse_config, registered_methods
from vllm_specplugins.plan import Conditions, make_plan
from vllm_specplugins.tools.picker import Config, pick_methods
from vllm_specplugins.tools.replay.rivals import Drafter

ALWAYS, GATED = "always", "gated"
GATES = {ALWAYS: "off", GATED: "auto"}
# K that are tried where the user names none: on, as long as the speed rises.
LADDER = (3, 5, 8, 12, 15, 24, 31, 48, 64)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method, whether a gate chooses its lengths, and its whole --speculative-config."""

    method: str
    policy: str
    config: Config
    drafter: Drafter | None = None

    @property
    def num_draft(self) -> int:
        """K."""
        return int(self.config["num_speculative_tokens"])

    @property
    def key(self) -> tuple[str, str, int]:
        """What its rows are found by."""
        return self.method, self.policy, self.num_draft

    @property
    def waits(self) -> bool:
        """Whether its drafting waits for the device."""
        return not make_plan(parse_config(self.config), Conditions()).on_device

    def build(self, context: ProposerContext) -> Proposer:
        """The proposer, behind its gate."""
        return build_proposer(behind_gate(parse_config(self.config)), context)


def candidates(wanted: Sequence[str], num_drafts: Sequence[int]) -> list[Candidate]:
    """All that are to be played, by method, policy and K.

    Args:
        wanted: as for `bench`; nothing: every history proposer that is here.

    Raises:
        ConfigError: a method that is none, or that needs more than histories.
    """
    picked = {name: config for name, config in pick_methods(wanted or list(_default())).items() if config}
    for name, config in picked.items():
        if not _reads_histories_alone(config):
            raise ConfigError(
                f"--methods must be proposers that read token ids alone, as prompt_lookup does, not {name}."
            )
    return [
        Candidate(name, policy, {**config, "gate": gate, "num_speculative_tokens": num_draft})
        for name, config in picked.items() for policy, gate in GATES.items() for num_draft in num_drafts
    ]  # fmt: skip


def beside(drafter: Drafter) -> Candidate:
    """The cascade of a lookup and a recorded drafter, as it is served by default."""
    return Candidate("cascade", GATED, drafter.cascade, drafter)


def _default() -> Iterator[str]:
    """Names of every history proposer."""
    for name, method in METHODS.items():
        if not method.runs_target and method.reads_tokens_alone and name not in ("cascade", "custom"):
            yield name
    yield from registered_methods()


def _reads_histories_alone(config: Config) -> bool:
    if config["method"] not in (*METHODS, *registered_methods()):
        return False
    parsed = parse_config(config)
    reads_more = any(row.runs_target or not row.reads_tokens_alone for row, _ in drafters(parsed))
    return not (reads_more or built_in_stage(parsed))
