"""Hostile request options: each affects at most its request."""

import json
import random
from dataclasses import dataclass
from typing import Any

NUMBERS = [-1, 0, 1, 64, 65, 2**31, 10**30, -(10**30), 0.5, 1e308, True, None]
STAGES = '"prompt_lookup",' * 100
TEXTS = ["", "x", "\ud800", "abc \ud800 def", "\x00", "é" * 100, "prompt_lookup", "early_exit", "custom"]


@dataclass(frozen=True, slots=True)
class Hostile:
    """A value of `vllm_xargs["specplugins"]`, and whether the server must answer 400 (None: 400, or as without
    options)."""

    name: str
    options: Any
    refused: bool | None = True


def known() -> list[Hostile]:
    """The worst that are known: all of them once took the engine, or the drafts of all, down."""
    return [
        Hostile("a lone surrogate", '{"reference": "abc \\ud800 def"}'),
        Hostile("1 MB of text", json.dumps({"reference": "def f(x): return x\n" * 55_000})),
        Hostile("10 MB of text", json.dumps({"reference": "lorem ipsum dolor " * 580_000})),
        Hostile("1 M token ids", json.dumps({"reference": [5, 6, 7, 8] * 250_000})),
        Hostile("200,000 brackets", "[" * 200_000),
        Hostile("200,000 objects", '{"a":' * 200_000),
        Hostile("10,000 digits", '{"max_draft": ' + "9" * 10_000 + "}"),
        Hostile("100,000 keys", "{" + ",".join(f'"k{index}":1' for index in range(100_000)) + "}", refused=None),
        Hostile("100 stages, and a nested list", f'{{"stages":[{STAGES}{"[" * 500 + "]" * 500}]}}'),
        Hostile("a context of letters", json.dumps({"reference": "a b " * 4_000})),  # a length that servers allow
        Hostile("37,000 stages", json.dumps({"stages": ["prompt_lookup"] * 37_000})),
        Hostile("no JSON", '{"enabled":'),
        Hostile("a number", 7.5),
        Hostile("a list", ["a", 1]),
        Hostile("not finite", '{"max_draft": NaN}'),
        Hostile("the same key twice", '{"max_draft": 1, "max_draft": -1}'),
    ]


def variants(seed: int, number: int) -> list[Hostile]:
    """Bad options of which each has one thing wrong, in any place and size, and such as are only odd."""
    rng = random.Random(seed)
    return [variant(rng) for _ in range(number)]


def variant(rng: random.Random) -> Hostile:
    """One of them."""
    size, stage = rng.choice((1, 3, 100, 500, 5000, 20_000)), rng.choice(("prompt_lookup", "1 early_exit", "\\ud800"))
    deep, objects = "[" * size + "]" * size, '{"a":' * 300 + "1" + "}" * 300
    tail = rng.choice((deep, '"\\ud800"', "1" + "0" * size, "null", objects, f'"{stage}"', "NaN"))
    names = ",".join([f'"{stage}"'] * rng.choice((1, 2, 100, 2000)))
    key = rng.choice(KEYS)
    text = rng.choice(
        (
            f'{{"stages":[{names},{tail}]}}',
            f'{{"stages":[{tail},{names}]}}',
            f'{{"{key}":{tail}}}',
            f'{{"{key}":{"9" * size}}}',
            f'{{"reference":[{"7," * size}{tail}]}}',
            f'{{"reference":"{"a b " * size}","reference":{tail}}}',
            f'{{"reference":"{"x" * size}","{key}":{tail}}}',
            f'{{"reference":"{chr(rng.randrange(1, 0xD7FF)) * size}"}}',
            f'{{"reference":[{"[]," * size}1]}}',
            "{" + ",".join(f'"{key}":{place}' for place in range(size)) + "}",
            f'{{"{key}":' * size + "1" + "}" * size,
        )
    )
    return Hostile(f"variant of {size}", text, refused=None)


def predictions(seed: int, number: int) -> list[Any]:
    """Yields values of a chat's `prediction`."""
    rng = random.Random(seed)
    part = lambda: {"type": rng.choice(("text", "image_url")), rng.choice(("text", "x")): _value(rng, 2)}  # noqa: E731
    content = lambda: rng.choice((_value(rng, 3), [part() for _ in range(rng.randrange(4))]))  # noqa: E731
    return [rng.choice((_value(rng, 3), {"type": "content", "content": content()})) for _ in range(number)]


KEYS = ["enabled", "max_draft", "max_context", "stages", "reference", "unknown", "", "__class__", "max-draft"]


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(4 if depth else 2)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(TEXTS)
    if kind == 2:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS): _value(rng, depth - 1) for _ in range(rng.randrange(3))}
