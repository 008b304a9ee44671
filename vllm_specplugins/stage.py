"""What the engine asks of the plugin's proposers beside drafts. A class of others is a `Proposer` alone."""

from collections.abc import Iterable

from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import Draft, DraftBatch, Int32Array, Proposer

Series = tuple[str, tuple[str, ...], float]  # of a metric: the name, labels beside the stage, and the value


class StageProposer(Proposer):
    """A method, alone or as a stage of a cascade, or a whole cascade. The defaults do nothing."""

    def propose(self, batch: DraftBatch) -> Draft:
        return Draft.empty(batch.num_reqs)

    def dummy_run(self, batch: DraftBatch) -> Draft:
        """Runs everything that a step may run, for warm-up and memory profiling."""
        return self.propose(batch)

    def set_max_model_len(self, max_model_len: int) -> None:
        """Sets the longest request."""

    def series(self) -> Iterable[Series]:
        """Metrics of its state."""
        return ()

    def store_stats(self) -> dict[str, int]:
        """Sizes of its store of earlier outputs; empty without a store."""
        return {}

    def reset_store(self) -> None:
        """Forgets all earlier outputs, also in the file and on the server. Other engines keep the outputs that they
        have fetched."""

    def save_store(self) -> None:
        """Waits until the whole store is on the disk, if it has a file."""

    def close(self) -> None:
        """Saves files before the engine ends."""

    def named_stages(self) -> list[tuple[str, Proposer]]:
        """The stages of a cascade, by the names of their counters; empty for one method."""
        return []

    def stage_counters(self) -> dict[str, StageCounters]:
        """Running totals of a cascade's stages, keyed by "index method"."""
        return {}

    def settle_stages(self) -> None:
        """Makes a cascade's stages forget ended requests now, since no step will follow for a while."""

    def activity(self) -> tuple[int, int] | None:
        """Running counts of a gate's questions to stages, and of drafted tokens and questions that it withheld."""
        return None

    def offer_length(self, batch: DraftBatch, num_accepted: Int32Array) -> int | None:
        """The number of tokens that the engine's drafter drafts in this step; None: all K."""
        return None


_NOTHING = StageProposer()


def stage_of(proposer: object) -> StageProposer:
    """The proposer, or defaults in place of a class of others."""
    return proposer if isinstance(proposer, StageProposer) else _NOTHING


def stages_of(proposer: Proposer, title: str) -> list[tuple[str, Proposer]]:
    """The stages of a cascade, or the single proposer with its title, by the names of their counters."""
    return stage_of(proposer).named_stages() or [(title, proposer)]
