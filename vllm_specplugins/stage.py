"""Defines what the engine calls on this package's proposers in addition to `Proposer`. A class of other packages is
only a `Proposer`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import Draft, DraftBatch, Int32Array, Proposer

Series = tuple[str, tuple[str, ...], float]  # a metric's name, labels in addition to the stage, and value


class StageProposer(Proposer):
    """A method, alone or as a stage of a cascade, or a whole cascade. The default methods do nothing.

    Attributes: stages: the stages of a cascade (cascade.stage.Stage), otherwise none.
    """

    stages: Sequence[Any] = ()

    def propose(self, batch: DraftBatch) -> Draft:
        return Draft.empty(batch.num_reqs)

    def dummy_run(self, batch: DraftBatch) -> Draft:
        """Runs all code that a step may run, for warm-up and memory profiling."""
        return self.propose(batch)

    @property
    def has_gate(self) -> bool:
        """Returns whether `use_profile` has an effect."""
        return False

    def use_profile(self, ms: Mapping[int, float]) -> None:
        """Uses the times of steps by number of tokens that the engine measured at its start."""

    def set_max_model_len(self, max_model_len: int) -> None:
        """Sets the length of the longest request."""

    def series(self) -> Iterable[Series]:
        """Yields metrics of the proposer's state."""
        return ()

    def store_stats(self) -> dict[str, int]:
        """Returns the sizes of the store of earlier outputs; empty without a store."""
        return {}

    def reset_store(self) -> None:
        """Deletes all earlier outputs, also in the file and on the server. Other engines keep the outputs that they
        fetched."""

    def save_store(self) -> None:
        """Waits until the whole store is on the disk, if the store has a file."""

    def close(self) -> None:
        """Saves files before the engine ends."""

    def stage_counters(self) -> dict[str, StageCounters]:
        """Returns the running totals of a cascade's stages, by "index method"."""
        return {stage.title: stage.counters for stage in self.stages}

    def settle_stages(self) -> None:
        """Makes a cascade's stages forget ended requests now, since no step may follow for a while."""

    def activity(self) -> tuple[int, int] | None:
        """Returns the number of a gate's calls to stages, and the sum of drafted tokens and skipped calls."""
        return None

    def offer_length(self, batch: DraftBatch, num_accepted: Int32Array) -> int | None:
        """Returns the number of tokens that the engine's drafter drafts in this step; None: all K."""
        return None


_NOTHING = StageProposer()


def stage_of(proposer: object) -> StageProposer:
    """Returns the proposer, or a `StageProposer` with the defaults in place of a class of another package."""
    return proposer if isinstance(proposer, StageProposer) else _NOTHING


def stages_of(proposer: Proposer, title: str) -> list[tuple[str, Proposer]]:
    """Returns the stages of a cascade, or the single proposer with its title, by the names of their counters."""
    return [(stage.title, stage.proposer) for stage in stage_of(proposer).stages] or [(title, proposer)]
