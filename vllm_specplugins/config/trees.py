"""Checks the field `tree` of a method, which makes the target verify drafts as trees (proposers/tree.py)."""

from dataclasses import replace
from itertools import product

from vllm_specplugins.config.fields import ConfigError
from vllm_specplugins.config.lookahead import LookaheadConfig
from vllm_specplugins.config.proposers import NOT_WITH_TREE
from vllm_specplugins.config.whole import SpecConfig, methods_of, rule, sample_methods, stage_configs


def chain_length(num_nodes: int) -> int:
    """Returns the number of chain tokens in a tree of this size, about a third.

    >>> [chain_length(num_nodes) for num_nodes in (1, 4, 7, 15, 31)]
    [1, 2, 3, 6, 11]
    """
    return (num_nodes + 3) // 3


def sibling_places(num_nodes: int) -> list[tuple[int, int]]:
    """Returns the depth and the sibling's rank of each node in a tree of sampled drafts. The shape must not depend on
    the drafts, so the tree has the nodes with the smallest depth + 2 * rank: a later sibling is accepted less often
    than a deeper token.

    >>> sibling_places(7)
    [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2)]
    """
    places = product(range(chain_length(num_nodes)), range(num_nodes))
    return sorted(places, key=lambda place: (place[0] + 2 * place[1], place[1]))[:num_nodes]


def with_tree(config: SpecConfig, says_length: bool) -> SpecConfig:
    """Returns a copy in which K is the tree's size, and the stage after a lookup drafts the chain. Without `tree`, the
    configuration stays unchanged.

    Raises:
        ConfigError: a stage has a tree, or another field is incompatible with the method's tree.
    """
    for index, stage in enumerate(config.stages):
        if getattr(stage.method_config, "tree", None):
            raise ConfigError(
                f"cascade: remove tree from stages[{index}]: set it for the whole cascade, or use the method alone."
            )
    method, tree = config.method, getattr(config.method_config, "tree", None)
    if windows := stage_configs(config, LookaheadConfig):
        return _with_lookahead(config, windows[0], says_length)
    in_rounds = any(getattr(part.method_config, "rejection", None) for part in config.parts)
    samples = "probabilistic" in sample_methods(config)
    if (tree and samples != in_rounds) or (in_rounds and (config.stages or not tree)):
        raise ConfigError(
            f"{method}: set rejection 'rounds' if, and only if, tree is set with draft_sample_method 'probabilistic', "
            f"without a cascade; rejection is {'rounds' if in_rounds else None!r}."
        )
    if not tree:
        return config
    if says_length and config.length != tree:
        raise ConfigError(
            f"{method}: num_speculative_tokens must be {tree}, the value of tree, or left out, not {config.length}."
        )
    for part, name in product(config.parts, NOT_WITH_TREE):
        if getattr(part.method_config, name, None):
            raise ConfigError(f"{method}: remove {name}: it is untested with tree.")
    if stages := config.stages:
        fits = methods_of(config) in [["prompt_lookup", second] for second in ("early_exit", "jump", "medusa")]
        if not fits or stages[1].num_speculative_tokens is not None or rule(config) == "verify":
            raise ConfigError(
                "cascade: tree supports only stages [prompt_lookup, X] with X = early_exit, jump or medusa, policy "
                "'auto', and no num_speculative_tokens in a stage."
            )
        config = config.with_stages((stages[0], replace(stages[1], num_speculative_tokens=chain_length(tree))))
    return replace(config.with_length(tree), says_length=True, longest_chain=chain_length(tree))


def _with_lookahead(config: SpecConfig, lookahead: LookaheadConfig, says_length: bool) -> SpecConfig:
    """Returns a copy in which K is the size of the tree with the window."""
    method, num_nodes = config.method, lookahead.num_nodes
    if stages := config.stages:
        fits = methods_of(config) == ["prompt_lookup", "lookahead"] and rule(config) != "verify"
        if not fits or config.method_config.tree or any(stage.num_speculative_tokens for stage in stages):
            raise ConfigError(
                "cascade: lookahead supports only stages [prompt_lookup, lookahead], policy 'auto', no tree, and no "
                "num_speculative_tokens in a stage."
            )
    if says_length and config.length != num_nodes:
        raise ConfigError(
            f"{method}: num_speculative_tokens must be {num_nodes}, the nodes of lookahead, or left out, not "
            f"{config.length}."
        )
    return replace(config.with_length(num_nodes), says_length=True, longest_chain=lookahead.ngram - 1)
