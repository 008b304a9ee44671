"""Grammar: the engine's scheduler drafts forced tokens; see engine/grammar/."""

from vllm_specplugins.config import GrammarConfig
from vllm_specplugins.draft import Draft, DraftBatch, Proposer, ProposerContext


class Grammar(Proposer):
    """Drafts no token."""

    def __init__(self, config: GrammarConfig, context: ProposerContext):
        pass

    def propose(self, batch: DraftBatch) -> Draft:
        return Draft.empty(batch.num_reqs)
