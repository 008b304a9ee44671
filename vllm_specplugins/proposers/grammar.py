"""Grammar: the engine's scheduler drafts forced tokens; see engine/grammar/."""

from vllm_specplugins.config import GrammarConfig
from vllm_specplugins.draft import ProposerContext
from vllm_specplugins.stage import StageProposer


class Grammar(StageProposer):
    """Drafts no token."""

    def __init__(self, config: GrammarConfig, context: ProposerContext):
        pass
