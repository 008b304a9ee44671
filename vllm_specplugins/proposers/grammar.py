"""Grammar: what a request's grammar forces. Grammars live where requests are scheduled: the engine adds it there."""

from vllm_specplugins.config import GrammarConfig
from vllm_specplugins.draft import Draft, DraftBatch, Proposer, ProposerContext


class Grammar(Proposer):
    """Drafts nothing where the model runs; see engine/grammar/."""

    def __init__(self, config: GrammarConfig, context: ProposerContext):
        pass

    def propose(self, batch: DraftBatch) -> Draft:
        return Draft.empty(batch.num_reqs)
