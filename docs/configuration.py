"""Writes docs/configuration.md from the configuration's dataclasses: `python docs/configuration.py`."""

import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from inspect import cleandoc
from pathlib import Path
from typing import Any

from vllm_specplugins.config import BUILT_IN_SETTINGS, BuiltInConfig, CommonConfig, LearnConfig
from vllm_specplugins.methods import BUILT_IN, METHODS

PAGE = Path(__file__).with_suffix(".md")
BEGINNING = """# Configuration

<!-- Written by docs/configuration.py; edit the docstrings in vllm_specplugins/config/ instead. -->

What `--speculative-config` (JSON) or `LLM(speculative_config=...)` (a dictionary) may hold. A wrong value is refused
before the engine starts, in one sentence.
"""
REQUESTS = """## Options of one request

In Python `SamplingParams(extra_args={"specplugins": {...}})`; over HTTP as JSON text: `"vllm_xargs": {"specplugins":
"{\\"enabled\\": false}"}`. A bad one answers 400 in one sentence (streamed: an error event after a 200;
[other front ends](operating.md#other-front-ends) leave it out).

| option | allowed | meaning |
|---|---|---|
| `enabled` | true or false | false: no drafts for this request |
| `max_draft` | an integer from 0 to 64 | most tokens drafted in one step |
| `max_context` | an integer from 0 on | no drafts beyond so many tokens of prompt and output together |
| `stages` | names of the cascade's stages, `"early_exit"` or `"1 early_exit"` | those that draft for this request |
| `reference` | text, or token ids; at most the model's context | what the output is likely to repeat (a predicted output, a retrieved document): lookups search it, the model never sees it |
| `learn` | true or false | false: its output is not drafted from for others, nor [learned](choose-a-method.md#learn-while-serving) from |

A proposer of your own may have [options of its own](write-a-proposer.md#options-of-a-request). Beside the reference the
JSON text has at most 65,536 characters and 4,096 brackets. Beam search gets no drafts: vLLM's beams drop `vllm_xargs`.

**OpenAI's `prediction`** of a chat completion is the option `reference`: `{"type": "content", "content": ...}` with a
text or a list of text parts. A `reference` in `vllm_xargs` comes before it. `usage` has no `accepted_prediction_tokens`
and `rejected_prediction_tokens`; `--per-request-spec-decode-metrics summary` shows drafted and accepted tokens.
"""
ENVIRONMENT = """## Environment variables

| variable | meaning |
|---|---|
| `VLLM_SPECPLUGINS_METRICS_PORT` | the port on which the engine shows our metrics, [where the front end cannot](operating.md#other-front-ends) |
| `VLLM_SPECPLUGINS_DISABLE=1` | the plugin does nothing; a method of ours is then refused |
| `VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN` | vLLM's; left alone, a draft token's price is measured at the start [without another request's context](compatibility.md#scheduling); set, as to `8192`, vLLM's own table of costs counts |
| `VLLM_SPECPLUGINS_SELF_CHECK` | `1` (default): on a device that is not a CPU [kernels are checked](compatibility.md#kernels-on-a-new-device); `0`: not; `only`: check, print, stop |
"""


def arguments(owner: type) -> dict[str, str]:
    """The Args section of a class's docstring, by name."""
    _, _, section = cleandoc(owner.__doc__ or "").partition("Args:\n")
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in found}


def summary(owner: type) -> str:
    """What a class's docstring says before its Args section."""
    return cleandoc(owner.__doc__ or "").partition("\n\nArgs:")[0]


def default(entry: "Field[Any]") -> str:
    if entry.default is not MISSING:
        return "null" if entry.default is None else f"`{entry.default}`"
    return "`{}`" if entry.default_factory is not MISSING else "required"


def rows(owner: type) -> Iterator[str]:
    if not fields(owner):
        return
    words = arguments(owner)
    yield "| field | allowed | default | meaning |"
    yield "|---|---|---|---|"
    for entry in fields(owner):
        allowed = entry.metadata["allowed"].replace("'", "`").replace("an integer from ", "")
        yield f"| `{entry.name}` | {allowed} | {default(entry)} | {words[entry.name]} |"


def page() -> str:
    """The page's text."""
    parts = [BEGINNING, "## Every method", *rows(CommonConfig), ""]
    for name, method in METHODS.items():
        parts += [
            f"## `{name}`",
            "",
            summary(method.config).partition(": ")[2].capitalize(),
            "",
            *rows(method.config),
            "",
        ]
        if name == "early_exit":
            parts += ["`learn` may be a dictionary of:", "", *rows(LearnConfig), ""]
    names = ", ".join(f"`{name}`" for name in BUILT_IN)
    parts += [
        "## Stages built into vLLM",
        "",
        f"One stage of a cascade may be {names}. It takes `model` ({arguments(BuiltInConfig)['model']}), "
        "`num_speculative_tokens` and these settings of vLLM's own `speculative_config`, which vLLM checks:",
        "",
        ", ".join(f"`{name}`" for name in BUILT_IN_SETTINGS) + ".",
        "",
        REQUESTS,
        ENVIRONMENT,
    ]
    return "\n".join(parts).replace("## Every method\n|", "## Every method\n\n|")


if __name__ == "__main__":
    PAGE.write_text(page())
