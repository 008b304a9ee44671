"""Translates vLLM's names of fields into this package's names, if both mean the same."""

import logging
from collections.abc import Mapping
from typing import Any

from vllm_specplugins.config.fields import ConfigError, brief

logger = logging.getLogger("vllm.specplugins")

# By method: vLLM's name -> ours.
ALIASES: Mapping[str, Mapping[str, str]] = {
    "prompt_lookup": {"prompt_lookup_max": "max_ngram", "prompt_lookup_min": "min_ngram"},
    "suffix_lookup": {"suffix_decoding_max_tree_depth": "num_speculative_tokens"},
    "custom": {"model": "proposer"},
}
VERIFICATION = "rejection_sample_method"


def with_our_names(method: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a method's fields under this package's names, and logs the translated names in one line.

    Raises:
        ConfigError: a field is set twice, or a value of vLLM's field has no equivalent.
    """
    aliases, values, changes = ALIASES.get(method, {}), dict[str, Any](), list[str]()
    for name, value in raw.items():
        ours = aliases.get(name, name)
        if name == VERIFICATION:
            _check_verification(method, value)
            changes.append(f'{name} "standard" selects exact verification')
        elif ours in values or (ours != name and ours in raw):
            raise ConfigError(f"{method}: remove {name}: it is vLLM's name for {ours}, which is also set.")
        else:
            values[ours] = _class_path(value) if ours == "proposer" else value
            changes += [f"{name} sets {ours}"] * (ours != name)
    if changes:
        logger.info("%s: vLLM's names are accepted (%s).", method, ", ".join(changes))
    return values


def _check_verification(method: str, value: object) -> None:
    if value != "standard":
        raise ConfigError(
            f"{method}: {VERIFICATION} must be 'standard', not {brief(value)}. Block verification does not help "
            "lookups; for drafts of a model, set draft_sample_method to 'coupled' instead."
        )


def _class_path(value: Any) -> Any:
    """Returns "package.module:Class" for vLLM's "package.module.Class"."""
    return ":".join(value.rsplit(".", 1)) if isinstance(value, str) and ":" not in value else value
