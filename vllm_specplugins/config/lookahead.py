"""Defines the configuration of `lookahead`."""

from dataclasses import dataclass

from vllm_specplugins.config.fields import ConfigError, check_fields, integer

MAX_NODES = 63  # and the root: bits of a mask


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadConfig:
    """`lookahead`: verifies n-grams that the target itself generated in earlier steps (Fu et al. 2024). It needs Model
    Runner V2 and no training. It suits one request at temperature 0 with text that does not repeat.

    Args:
        window: The number of columns of the window, which is the number of n-grams that a step generates.
        ngram: The number of tokens in an n-gram. The window has one level fewer.
        guesses: The largest number of n-grams that a step verifies. K is (ngram - 1) * (window + guesses) - 1, at most
            63.
    """

    window: int = integer(5, 2, 16)
    ngram: int = integer(4, 3, 8)
    guesses: int = integer(5, 1, 16)

    def __post_init__(self) -> None:
        check_fields(self, "lookahead")
        if self.num_nodes > MAX_NODES:
            raise ConfigError(
                f"lookahead: (ngram - 1) * (window + guesses) - 1 must be at most {MAX_NODES}, not {self.num_nodes}."
            )

    @property
    def num_window(self) -> int:
        """Returns the number of nodes of the window."""
        return (self.ngram - 1) * self.window - 1

    @property
    def num_nodes(self) -> int:
        """Returns K, the number of nodes of a tree."""
        return self.num_window + (self.ngram - 1) * self.guesses
