"""A configuration of each method for the demo model, by name: made from a folder for trained parts."""

from typing import Any

from cases import EXIT, PROMPT_LOOKUP, SUFFIX_LOOKUP, early_exit
from conftest import DEMO_MODEL, NUM_LAYERS
from parts import K, medusa, with_embeddings, write_head
from shortened import first_layers


def cascade(stage: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"method": "cascade", "num_speculative_tokens": K, "stages": [{"method": "prompt_lookup"}, stage], **options}


DRAFTER = {"method": "draft_model", "model": str(first_layers(DEMO_MODEL, 1)), "num_speculative_tokens": 3}
KINDS: dict[str, Any] = {
    "prompt_lookup": lambda _: PROMPT_LOOKUP,
    "suffix_lookup": lambda _: SUFFIX_LOOKUP,
    "early_exit": lambda _: early_exit(1),
    "jump": lambda folder: write_head(folder, NUM_LAYERS // 2, NUM_LAYERS // 2, 0.0),
    "medusa": lambda folder: medusa(folder, num_draft=2),
    "look-ahead": lambda folder: with_embeddings(folder, NUM_LAYERS, K),
    "lookup and exit": lambda _: cascade(EXIT),
    "verified": lambda _: cascade(EXIT, policy="verify"),
    "lookup and draft_model": lambda _: cascade(DRAFTER),
    "tree": lambda _: {"method": "early_exit", "exit_layer": 1, "tree": 7, "gate": "off"},
    "lookahead": lambda _: {"method": "lookahead", "gate": "off"},
}
OF_V2 = "tree", "lookahead"
