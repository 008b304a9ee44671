"""Requests of hostile clients, by class: a path of the API, and what is posted there."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bad_options import known, predictions, variants

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from hostile_grammars import hostile

Body = dict[str, Any]
MESSAGES = [{"role": "user", "content": "def f(x):"}]
HUGE = 10**30
ODD: list[Any] = [-1, 0, 2**31, 2**63, HUGE, -HUGE, 0.5, 1e308, float("nan"), float("inf"), True, "x", [], {}, [[]]]
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "required": ["next"]}


def requests(seed: int) -> Iterator[tuple[str, str, Body]]:
    """(class, path, body) of each; a few hundred."""
    for name, fields in structured(seed):
        yield "structured outputs", "completions", {"structured_outputs": fields, "ignore_eos": bool(len(name) % 2)}
    for fields in formats():
        yield "response formats", "chat/completions", {"messages": MESSAGES, "response_format": fields}
    for tools in tool_calls():
        yield "tools", "chat/completions", {"messages": MESSAGES, **tools}
    for _, fields in list(structured(seed + 1))[::4]:
        yield "thinking", "chat/completions", {"messages": MESSAGES, "structured_outputs": fields}
    for prediction in [*predictions(seed, 30), *map(prediction_of, ODD)]:
        yield "predictions", "chat/completions", {"messages": MESSAGES, "prediction": prediction}
    for options in [*(bad.options for bad in (*known(), *variants(seed, 30))), *ODD]:
        yield "options", "completions", {"vllm_xargs": {"specplugins": options}}
    for fields in (*sampling(), *(lists())):
        yield "sampling", "completions", fields
    for prompt in prompts():
        yield "prompts", "completions", {"prompt": prompt}


def prediction_of(value: Any) -> Any:
    return {"type": "content", "content": [{"type": "text", "text": value}]}


def structured(seed: int) -> Iterator[tuple[str, Any]]:
    """Values of `structured_outputs`, by name: endless, long, recursive, deep, wrong."""
    for number, words in enumerate((3, 300, 3_000)):
        yield from hostile(seed + number, words)
    for number, regex in enumerate(regexes()):
        yield f"regex {number}", {"regex": regex}
    for number, schema in enumerate(schemas()):
        yield f"schema {number}", {"json": schema}
    for number, grammar in enumerate(GRAMMARS):
        yield f"grammar {number}", {"grammar": grammar}
    choices = (
        [],
        [""],
        ["a"] * 1000,
        [f"{n}" for n in range(20_000)],
        ["\x00"],
        ["a\ud800"],
        [1],
        "a",
        [["a"]],
        {"a": 1},
    )
    for number, choice in enumerate((*choices, ["x" * 100_000], ["\U0001f600" * 99, "\U0001f600" * 98])):
        yield f"choice {number}", {"choice": choice}
    yield "two", {"json": {}, "regex": "a"}
    yield "none", {}
    for number, fields in enumerate(ODD):
        yield f"odd {number}", fields
        yield f"odd tag {number}", {"structural_tag": fields}
    yield "unknown", {"xml": "a"}
    yield "an object", {"json_object": True}
    yield "no object", {"json_object": False}
    yield "backend", {"json": {"type": "integer"}, "_backend": "nobody"}
    yield "whitespace", {"json": {"type": "object"}, "whitespace_pattern": "(((("}
    yield "no whitespace", {"json": {**NODE, "$defs": {"n": NODE}}, "disable_any_whitespace": True}


GRAMMARS = (
    "", "root", "root ::= ", "root ::= root", "root ::= other", "x ::= y", 'root ::= "a" | root | root root',
    'root ::= ("a"{99999})', "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, 'root ::= ("a" | ""){9999} "b"',
    "root ::= " + " | ".join(f'"{n}"' for n in range(9999)), 'root ::= [\\U0010FFFF-\\u0000]', 'root ::= "\ud800"',
    "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(60)) + '\nr60 ::= "a"\nroot ::= r0', "%import common.INT",
    "start: start", "start: /(((/", "start: /a{99999}/", "start: (start start)* | \"a\"", "root ::= \x00",
    'é ::= "é"', "SELECT * FROM x", 'root ::= ((("a"*)*)*)*', 'root ::= "a"+ "a"+ "a"+ "a"+ "a"+ "a"+ "b"', 7, ["root"],
)  # fmt: skip


def regexes() -> list[Any]:
    return [
        "", "(", "a{300000}", "a{3,300000}b", "(a{1000}){1000}", "((((a*)*)*)*)*b", "(a|a)*b", "(.*)*x{9999}",
        "[^\\W]{9}",
        "\\d{1,9999}", "(?=a)b", "(?<!a)b", "(a)\\1", "\\p{L}{500}", "[\U0001f600-\U0001f64f]{900}", "^a$", "a^b", "$a",
        "\x00", "a\ud800", "|" * 20_000, "a?" * 5_000, "(" * 900 + "a" + ")" * 900, ".{100000}", "(a|b|ab){30}c", "\\",
        "[z-a]", "a{9,1}", "*", "(?i)a{100}", "x" * 200_000, "(x+x+)+y", 7, ["a"], {"a": 1}, "\\b", "[[:alpha:]]{99}",
    ]  # fmt: skip


def schemas() -> list[Any]:
    """JSON schemas that no one needs, but for those that end vLLM's API server, as {"type": "array", "minItems": 10**9}
    does, or that keep its grammar compilers busy for minutes, as 2,000 properties do."""
    many = {f"k{number}": {"type": "string"} for number in range(300)}
    return [
        "", "{", "null", "true", "[]", '"a"', "{" * 5000, True, 7, [], {}, {"type": "nonsense"},
        {"type": ["string", 7]},
        {"$ref": "#"}, {"$ref": "#/nowhere"}, {"$ref": "http://127.0.0.1:9/x"}, {"$ref": "file:///etc/passwd"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, {"allOf": [{}] * 900},
        {"$defs": {"n": NODE}, **NODE}, {"$defs": {"n": {**NODE, "additionalProperties": False}}, "$ref": "#/$defs/n"},
        nested({"type": "integer"}, 20), nested({"type": "integer"}, 400),
        {"anyOf": [{"const": n} for n in range(300)]},
        {"type": "object", "properties": many, "required": list(many)}, {"type": "object", "properties": many},
        {"type": "object", "patternProperties": {"((((": {}}}, {"type": "string", "pattern": "("},
        {"const": "a" * 9999},
        {"type": "string", "pattern": "^(a+)+$"}, {"type": "string", "minLength": 10**9},
        {"type": "string", "maxLength": -1},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 9},
        {"type": "integer", "minimum": -HUGE, "maximum": HUGE}, {"type": "integer", "minimum": 9, "maximum": 1},
        {"type": "number", "multipleOf": 1e-300}, {"enum": []}, {"enum": [[], {}, None, "a" * 9999, 1e308]},
        {"not": {}},
        {"enum": [f"{'p' * 99}{n}" for n in range(300)]}, {"const": nested("x", 30)}, {"format": "date-time"},
        {"type": "object", "properties": {"\ud800": {}}},
        {"type": "object", "properties": {"\x00\n\"": {"const": "\x00"}}},
        {"type": "object", "required": ["a"] * 1000}, {"type": "object", "minProperties": 10**9},
        {"if": {}, "then": False},
        {"type": "array", "prefixItems": [{"const": "ab"}] * 3000, "items": False, "minItems": 3000},
        {"const": float("nan")},
        {"type": "string", "minLength": 3000, "maxLength": 3000}, {"type": "array", "maxItems": 0},
        {"const": "\U0001f600" * 999},
    ]  # fmt: skip


def nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}, "required": ["a"], "additionalProperties": False}
    return value


def formats() -> Iterator[Any]:
    """Values of `response_format`."""
    yield from ODD
    for schema in schemas()[::3]:
        yield {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    yield from ({"type": kind} for kind in ("json_object", "json_schema", "text", "structural_tag", "grammar", None))
    tag = {"begin": "<a>", "schema": {"const": "x" * 9999}, "end": "</a>"}
    yield {"type": "structural_tag", "structures": [tag] * 300, "triggers": ["<"]}
    yield {"type": "structural_tag", "structures": [{**tag, "end": ""}], "triggers": [""]}
    yield {"type": "structural_tag", "format": {"type": "const_string", "value": "ab" * 20_000}}
    yield {"type": "structural_tag", "format": nested({"type": "any_text"}, 50)}


def tool_calls() -> Iterator[Body]:
    """Tools, and which of them must be called."""
    for schema in schemas()[1::4]:
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        yield {"tools": [tool], "tool_choice": "required"}
        yield {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    tool = {"type": "function", "function": {"name": "f" * 5000, "parameters": {"type": "object"}}}
    for value in (*ODD, [tool] * 200, [{}]):
        yield {"tools": value, "tool_choice": "required"}
    for value in (*ODD, "nobody", {"type": "function", "function": {"name": "g"}}):
        yield {"tools": [tool], "tool_choice": value}


NUMBERS = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "logprobs", "prompt_logprobs",
    "presence_penalty", "repetition_penalty", "truncate_prompt_tokens", "priority",
)  # fmt: skip


def sampling() -> Iterator[Body]:
    """A number of each kind, wrong in a way of its own, and the extremes that are allowed."""
    for number, name in enumerate(NUMBERS):
        yield from ({name: ODD[(number + place) % len(ODD)]} for place in range(0, len(ODD), 3))
    yield from ({name: value} for name in ("max_tokens", "n", "logprobs") for value in ODD)
    yield {"n": 64, "temperature": 1, "seed": 1}
    yield {"max_tokens": 500, "min_tokens": 500, "stop": ["e"]}
    yield {"max_tokens": 2**31 - 1, "stop": ["\n"]}
    yield {"use_beam_search": True, "n": 8}
    yield {"temperature": 5e-324}
    yield {"temperature": 1e-6, "top_p": 1e-9, "top_k": 1, "seed": 2**63 - 1}
    yield {"echo": True, "logprobs": 5, "prompt_logprobs": 5}
    yield {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    yield {"cache_salt": "x" * 200}
    yield {"cache_salt": ""}
    yield {"skip_special_tokens": "x"}


def lists() -> Iterator[Body]:
    """Fields that are lists or dictionaries, of any length, type and depth."""
    stops = (
        ["a"] * 5000,
        ["x" * 200_000],
        [""],
        ["\ud800"],
        ["\x00"],
        [["a"]],
        {"a": 1},
        [1],
        "\n",
        [f"{n}" for n in range(999)],
    )
    yield from ({"stop": value} for value in (*stops, *ODD[::3]))
    biases = (
        {str(n): 1e30 for n in range(8000)},
        {"-1": 1},
        {"x": 1},
        {"5": "x"},
        {"5": float("nan")},
        {"5": float("inf")},
    )
    yield from (
        {"logit_bias": value}
        for value in (*biases, {"99999999": 1}, {"5": -1e39}, {"5": 100}, {str(HUGE): 1}, *ODD[::3])
    )
    for name in ("stop_token_ids", "allowed_token_ids", "bad_words", "logprob_token_ids", "prompt_embeds"):
        yield from (
            {name: value} for value in ([], [-1], [HUGE], ["x"], [""], [[]], list(range(5000)), "x", {}, [None])
        )
    for value in ({"max_pattern_size": 9**9}, {"x": 1}, [], {"max_pattern_size": 2, "min_count": 2}):
        yield {"repetition_detection": value}
    yield from ({"vllm_xargs": value} for value in (*ODD, {"a": [[]]}, {"specplugins_tenant": "x"}, {"x" * 99_999: 1}))
    yield from ({"kv_transfer_params": value} for value in ODD[::4])


def prompts() -> list[Any]:
    return [
        "", [], [[]], [0], [-1], [8191], [8192], [2**31], [HUGE], [0.5], ["a", "b"], [[1], [2]], "a" * 500_000,
        [5] * 511,
        [5] * 512, [5] * 600, None, 7, {}, "\ud800", "\x00" * 99, "\U0001f600" * 200, [5, "a"], [None], ["a"] * 300,
        [[5]] * 300,
    ]  # fmt: skip


def posted(body: Body, at_most: int = 24) -> bytes:
    """As JSON, surrogates and NaN included; greedy and short where the body does not say otherwise."""
    common = {"model": "demo", "max_tokens": at_most, "temperature": 0}
    if "messages" not in body:
        common["prompt"] = "import os\n\ndef"
    return json.dumps({**common, **body}).encode()
