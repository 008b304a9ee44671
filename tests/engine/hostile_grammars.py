"""Grammars as hostile clients would write them, by class: endless, long, ambiguous, in every alphabet."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

WORDS = "abcdefgh", "ab ", "\u4f60\u597d", "\U0001f600", "x", '\\"', "\u00e9\u00e8", "aaaa", "\n"


def schemas(rng: np.random.Generator, word: str, num: int) -> Iterator[tuple[str, Any]]:
    """By class, a JSON schema."""
    key = json.dumps(word * 3)[1:-1]
    node = {"type": "object", "properties": {key: {"$ref": "#/$defs/n"}}, "required": [key]}
    yield "recursive", {"$defs": {"n": {**node, "additionalProperties": False}}, "$ref": "#/$defs/n"}
    yield "long const", {"const": word * num}
    many = [{"const": word}] * min(num, 200)
    yield "array", {"type": "array", "prefixItems": many, "items": False, "minItems": len(many)}
    yield "choice", {"enum": [word * 40 + str(number) for number in rng.integers(0, 99, 5).tolist()]}
    properties = {f"{word}_{index}": {"type": ("string", "integer")[index % 2]} for index in range(6)}
    yield "object", {"type": "object", "properties": properties, "required": list(properties)[: int(rng.integers(7))]}


def grammars(rng: np.random.Generator, word: str) -> Iterator[tuple[str, str]]:
    """By class, an EBNF grammar as xgrammar reads it; of Lark's form, which both read, those with "start"."""
    word = json.dumps(word)
    yield "endless", f"root ::= {word} root"
    yield "endless by turns", f"root ::= {word} other\nother ::= root | {word} root"
    yield "ambiguous", f"root ::= root root | {word}"
    yield "ends or goes on", f'root ::= {word} root | {word} | ""'
    yield "nullable", f'root ::= empty root | {word}\nempty ::= "" | {word} empty'
    yield "Lark, endless", f"start: {word} start"
    yield "Lark, ambiguous", f"start: {word} start | start {word} | {word}"


def regexes(rng: np.random.Generator, word: str, num: int) -> Iterator[tuple[str, str]]:
    """By class, a regular expression."""
    plain = word.replace("\\", "").replace("\n", "n")
    yield "repeated", f"({plain}){{{num}}}"
    yield "a letter", f"a{{{num}}}"
    yield "any number", f"({plain})+{plain}"
    yield "alternatives", f"({plain}{plain}1|{plain}{plain}2|{plain})[0-9]{{2}}{plain}"


def hostile(seed: int, num: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """One grammar of each class, as the field of vLLM's `structured_outputs`, with texts of about `num` words."""
    rng = np.random.default_rng(seed)
    word = WORDS[seed % len(WORDS)]
    for name, schema in schemas(rng, word, num):
        yield f"schema, {name}", {"json": schema}
    for name, grammar in grammars(rng, word):
        yield f"grammar, {name}", {"grammar": grammar}
    for name, regex in regexes(rng, word, num):
        yield f"regex, {name}", {"regex": regex}
    tag = {"begin": f"<{word}>", "schema": {"const": word * 9}, "end": f"</{word}>"}
    yield "structural tag", {"structural_tag": json.dumps({"structures": [tag], "triggers": ["<"]})}
