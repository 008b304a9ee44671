"""How many tokens a request may be drafted, by its options and its `max_tokens`: on both runners and in schedulers."""

from typing import Any, NamedTuple

from vllm_specplugins.engine.frontend.options import length_limit, request_options
from vllm_specplugins.isolation.exchange import frozen
from vllm_specplugins.request_options import Options, draft_limit


class RequestLimits(NamedTuple):
    """The limits of a request's drafts.

    Args:
        options: as the front end resolved them; empty where the request has none.
        length_limit: of the request's prompt and output together, in tokens.
    """

    options: Options
    length_limit: int

    @classmethod
    def of(cls, params: Any, num_prompt_tokens: int, max_model_len: int) -> "RequestLimits":
        return cls(request_options(params), length_limit(params, num_prompt_tokens, max_model_len))

    def frozen(self) -> "RequestLimits":
        """Copies the limits, with options that a proposer cannot write to."""
        return self._replace(options=frozen(self.options))

    def max_draft_tokens(self, num_tokens: int, max_num_draft: int) -> int:
        """The draft tokens that a request of this length may get in a step, at most `max_num_draft`."""
        return draft_limit(self.options, num_tokens, max_num_draft, self.length_limit)
