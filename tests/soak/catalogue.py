"""The requests of a soak: a fixed list by seed, so that the answer to each can be known."""

import random
import sys
from dataclasses import dataclass, field
from typing import Any

from server import MODEL

sys.path.insert(0, str(MODEL.parent))
from prompts import load_prompts

PATTERN = r"[a-z]{3,8}\((x|y), [0-9]{1,3}\)"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "old": {"type": "boolean"}},
    "required": ["name", "age", "old"],
    "additionalProperties": False,
}
GRAMMARS: list[dict[str, Any]] = [
    {"choice": ["return None", "return self", "raise ValueError", "pass"]},
    {"regex": PATTERN},
    {"json": SCHEMA},
]


@dataclass(frozen=True, slots=True)
class Case:
    """One request.

    Args:
        name: for the report.
        body: what is posted, without `stream` and options of ours.
        chat: whether it goes to /v1/chat/completions.
        sampled: whether the answer is drawn, so that vLLM's own differs; ours must always be the same.
    """

    name: str
    body: dict[str, Any] = field(repr=False)
    chat: bool = False
    sampled: bool = False


def catalogue(seed: int, number: int = 96) -> list[Case]:
    """Requests of every kind, with outputs of 8 to 128 tokens."""
    rng = random.Random(seed)
    texts = load_prompts("edit", 30) + load_prompts("continue", 40)
    rng.shuffle(texts)
    makers = [_plain] * 5 + [_edited] * 2 + [_seeded] * 2 + [_grammar] * 2 + [_chat]
    return [makers[index % len(makers)](index, texts[index % len(texts)], rng) for index in range(number)]


def reference(case: Case, rng: random.Random) -> str:
    """A text that its output may repeat."""
    prompt = case.body.get("prompt") or case.body["messages"][-1]["content"]
    return str(prompt)[rng.randrange(len(prompt) // 2) :]


def _common(rng: random.Random) -> dict[str, Any]:
    lengths = {"max_tokens": rng.choice((8, 24, 48, 96, 128)), "ignore_eos": rng.random() < 0.5}
    return {"temperature": 0.0, "return_token_ids": True} | lengths


def _plain(index: int, text: str, rng: random.Random) -> Case:
    return Case(f"{index} greedy", {"prompt": text[-rng.choice((40, 200, 600, 900)) :], **_common(rng)})


def _edited(index: int, text: str, rng: random.Random) -> Case:
    """With parameters that change the logits."""
    edits: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.4, "presence_penalty": -0.2},
        {"logit_bias": {str(rng.randrange(3, 3000)): rng.uniform(-5, 5) for _ in range(20)}},
        {"min_tokens": 6, "stop": ["\n\n", "return"]},
        {"bad_words": ["self", "return"]},
    ]
    return Case(f"{index} greedy, edited", {"prompt": text[-400:], **_common(rng), **rng.choice(edits)})


def _seeded(index: int, text: str, rng: random.Random) -> Case:
    sampling: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"top_p": 0.8, "top_k": 50}]
    drawn = {"temperature": rng.choice((0.7, 1.0)), "seed": rng.randrange(1000), "n": rng.choice((1, 2, 4))}
    return Case(
        f"{index} seeded", {"prompt": text[-300:], **_common(rng), **drawn, **rng.choice(sampling)}, sampled=True
    )


def _grammar(index: int, text: str, rng: random.Random) -> Case:
    body = {"prompt": text[-200:], **_common(rng), "ignore_eos": False, "max_tokens": 64}
    return Case(f"{index} grammar", {**body, "structured_outputs": rng.choice(GRAMMARS)})


def _chat(index: int, text: str, rng: random.Random) -> Case:
    messages = [{"role": "system", "content": "# Python"}, {"role": "user", "content": text[-700:]}]
    return Case(f"{index} chat", {"messages": messages[rng.randrange(2) :], **_common(rng)}, chat=True)
