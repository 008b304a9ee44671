"""Writes docs/configuration.md from the configuration's dataclasses: `python docs/configuration.py`."""

import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from inspect import cleandoc
from pathlib import Path
from typing import Any

from vllm_specplugins.config import CommonConfig, EarlyExitConfig
from vllm_specplugins.config.aliases import ALIASES
from vllm_specplugins.config.built_in import BUILT_IN_SETTINGS, BuiltInConfig
from vllm_specplugins.config.fields import ELSEWHERE
from vllm_specplugins.config.learn import LearnConfig
from vllm_specplugins.config.proposers import PartConfig
from vllm_specplugins.methods import BUILT_IN, METHODS

SHARED = "See `early_exit`."  # the meaning of a field that several methods have
PAGE = Path(__file__).with_suffix(".md")
BEGINNING = """# Configuration

<!-- Written by docs/configuration.py; edit the docstrings in vllm_specplugins/config/ instead. -->

`--speculative-config` (JSON) and `LLM(speculative_config=...)` (a dictionary) take these fields. Sizes are
integers, in bytes. Of several values, the first is the default. A wrong value stops the start with one sentence that
names the field and the allowed values.
"""
OTHERS = """## Settings of other engines

The plugin accepts names with a star. vLLM's `"method": "suffix"` (arctic-inference) is `suffix_lookup`, its `ngram` and
`ngram_gpu` still work, and `prompt_lookup` replaces them. Its `rejection_sample_method` must be "standard". llama.cpp's
`--lookup-cache-dynamic` is `store_path`, and OpenAI's `prediction` sets `reference`.

| engine | setting | here |
|---|---|---|
"""
REQUESTS = """## Options of one request

In Python, pass `SamplingParams(extra_args={"specplugins": {...}})`. Over HTTP, pass flat keys,
`"vllm_xargs": {"specplugins.max_draft": 4, "specplugins.enabled": 0}`, or JSON text,
`"vllm_xargs": {"specplugins": "{\\"enabled\\": false}"}`. The server answers 400 to a bad option. (A streamed answer
has an error event instead; [other front ends](operating.md#other-front-ends) ignore the options.)

- `enabled`: false disables drafts.
- `max_draft` (0 to 64): Limits the draft of a step.
- `max_context`: Ends drafting at this many tokens of prompt and output.
- `stages`: Selects stages of the cascade by name, `"early_exit"` or `"1 early_exit"`.
- `reference` (text or token ids, at most the model's context): Gives lookups a text that the output may repeat. The model
  does not see it.
- `learn`: false excludes the output from the store and from [learning](train.md#learn-while-serving).

A custom proposer may define [more options](write-a-proposer.md#options-of-a-request). Without the reference, the JSON
text has at most 65,536 characters and 4,096 brackets. Beam search gets no drafts.

OpenAI's `prediction` of a chat completion, `{"type": "content", "content": ...}` with a text or text parts, sets
`reference`, unless `vllm_xargs` does. `usage` does not report the prediction's accepted tokens, but
`--per-request-spec-decode-metrics summary` does.
"""
ENVIRONMENT = """## Environment variables

- `VLLM_SPECPLUGINS_METRICS_PORT` exports metrics on a port of the engine, [for other front
  ends](operating.md#other-front-ends).
- `VLLM_SPECPLUGINS_DISABLE=1` disables the plugin; a server that names its methods serves without them.
- `VLLM_SPECPLUGINS_VERIFICATION=vllm` leaves verification to vLLM, for a diagnosis.
- `VLLM_SPECPLUGINS_ON_ERROR`: `serve` (default) or `refuse`, [where the plugin cannot draft](operating.md#what-fails-at-the-start).
- `VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN` (vLLM's), if set, for example to `8192`, replaces our [costs](compatibility.md#costs-of-a-draft-token) of draft tokens by vLLM's.
- `VLLM_SPECPLUGINS_SELF_CHECK`: `1` (default) [checks kernels](support.md#what-is-checked) at the start,
  except on CPUs; `0` skips this; `only` checks, prints and exits.
"""


def arguments(owner: type) -> dict[str, str]:
    """The Args sections of a class's docstring and its bases', by name."""
    sections = [cleandoc(each.__doc__ or "").partition("Args:\n")[2] for each in reversed(owner.__mro__)]
    entries = re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)", "\n".join(sections), re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in entries}


def summary(owner: type) -> str:
    """What a class's docstring says before its Args section."""
    return cleandoc(owner.__doc__ or "").partition("\n\nArgs:")[0]


def begun(text: str) -> str:
    """The text with a capital letter."""
    return text[:1].upper() + text[1:]


def default(entry: "Field[Any]", allowed: str) -> str:
    """The words for a field's default; none for null, an empty dictionary or the first of several values."""
    if entry.default is not MISSING:
        return (
            ""
            if entry.default is None or allowed.startswith(f"`{entry.default}`")
            else f"; default {sizes(str(entry.default))}"
        )
    return "" if entry.default_factory is not MISSING else "; required"


def sizes(text: str) -> str:
    """The text with sizes of a MiB or more in MiB, GiB or TiB.

    >>> sizes("1048576 to 68719476736")
    '1 MiB to 64 GiB'
    """
    units = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"))
    for number in re.findall(r"\d{7,}", text):
        for size, unit in units:
            if int(number) % size == 0:
                text = text.replace(number, f"{int(number) // size} {unit}")
                break
    return text


def rows(owner: type) -> Iterator[str]:
    if not fields(owner):
        return
    words, entries = arguments(owner), sorted(fields(owner), key=lambda entry: entry.name not in owner.__annotations__)
    inherited = arguments(PartConfig) if issubclass(owner, PartConfig) and owner is not EarlyExitConfig else {}
    shared = [entry.name for entry in entries if words[entry.name] in (SHARED, inherited.get(entry.name))]
    for entry in (entry for entry in entries if entry.name not in shared):
        allowed = sizes(entry.metadata["allowed"]).replace("'", "`").removeprefix("one of ")
        allowed = allowed.replace("an integer from ", "").replace("a number from ", "").removesuffix(" or null")
        allowed = allowed.replace("a dictionary with string keys", "a dictionary")
        yield f"- `{entry.name}` ({allowed.removesuffix(',')}{default(entry, allowed)}): {words[entry.name]}"
    if shared:
        yield f"- {', '.join(f'`{name}`' for name in shared)}: {SHARED}"


def elsewhere() -> Iterator[str]:
    """The settings of other engines, and our names."""
    accepted = {name for names in ALIASES.values() for name in names}
    for name, (engine, ours) in ELSEWHERE.items():
        star = " *" if name in accepted else ""
        yield f"| {engine} | `{name}`{star} | {', '.join(f'`{each}`' for each in ours)} |"


def page() -> str:
    """The page's text."""
    parts = [BEGINNING, "## Every method", *rows(CommonConfig), ""]
    for name, method in METHODS.items():
        parts += [f"## `{name}`", "", begun(summary(method.config).partition(": ")[2]), "", *rows(method.config), ""]
        if name == "early_exit":
            parts += ["`learn` may be a dictionary with these fields:", "", *rows(LearnConfig), ""]
    names = ", ".join(f"`{name}`" for name in BUILT_IN)
    parts += [
        "## Stages built into vLLM",
        "",
        f"One stage of a cascade may be {names}. It takes `model` ({arguments(BuiltInConfig)['model'].rstrip('.')}), "
        "`num_speculative_tokens` and these keys, which vLLM checks:",
        "",
        ", ".join(f"`{name}`" for name in BUILT_IN_SETTINGS) + ".",
        "",
        REQUESTS,
        ENVIRONMENT,
        OTHERS + "\n".join([*elsewhere(), ""]),
    ]
    return "\n".join(parts).replace("## Every method\n-", "## Every method\n\n-")


if __name__ == "__main__":
    PAGE.write_text(page())
