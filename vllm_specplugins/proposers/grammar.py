"""Grammar: what a request's grammar forces. Grammars live where requests are scheduled: the engine adds it there."""

from collections.abc import Sequence

from vllm_specplugins.config import GrammarConfig
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext


class Grammar:
    """Drafts nothing where the model runs; see engine/grammar/."""

    def __init__(self, config: GrammarConfig, context: ProposerContext):
        pass

    def propose(self, batch: DraftBatch) -> Draft:
        return Draft.empty(batch.num_reqs)

    def observe(self, feedback: Feedback) -> None:
        """Nothing to learn."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing is kept."""
