"""The rows of a log that commands understand, each as the prompts and outputs that it holds: our form, messages of a
chat, and those of public benchmarks.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vllm_specplugins.config import ConfigError, brief, error_text

FORMATS = (
    '{"prompt": text or token ids, "output": text or token ids}, {"messages": [...]} as for chat, with answers of the '
    'assistant or "choices" as in an answer of OpenAI\'s API, a row of Spec-Bench, SpecDecode-Bench, tau-bench or '
    'BFCL, or {"text": text}'
)
Tokenizer = Callable[[], Any]  # loads one of transformers; called at the first text


def chat_prompt(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of a conversation whose next turn is the model's, by the tokenizer's template if it has one."""
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
    turns = [f"{message['role'].capitalize()}: {message['content']}\n\n" for message in messages]
    ids = tokenizer("".join(turns) + "Assistant:")["input_ids"]
    return ids


def token_ids(value: Any, key: str, tokenizer: Tokenizer, is_start: bool = False) -> list[int]:
    """Of text, which begins a request or does not, or as they stand.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise ConfigError(f"must hold text without lone surrogates as {key}, not {brief(value)}.")
        ids: list[int] = tokenizer()(value, add_special_tokens=is_start)["input_ids"]
        return ids
    if isinstance(value, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in value):
        return value
    raise ConfigError(f"must hold text or token ids as {key}, not {brief(value)}.")


def accepted_lengths(row: Mapping[str, Any], drafter: str | None) -> dict[str, list[int]]:
    """By drafter and number of output tokens so far, how many tokens of its draft would be accepted: in our form, or in
    SpecDecode-Bench's, which counts one token more.

    Args:
        drafter: that the row must hold lengths of; None: none.

    Raises:
        ConfigError: lengths of another form, or of other drafters alone.
    """
    given = row.get("accepted", {})
    if not isinstance(given, dict):
        raise ConfigError(f"must hold a JSON object as accepted, not {brief(given)}.")
    theirs = {
        key[4:]: [max(0, length - 1) for length in value["acc_len"]]
        for key, value in row.items()
        if key.startswith("acc_") and isinstance(value, dict) and _are_lengths(value.get("acc_len"))
    }
    for name, lengths in given.items():
        if not _are_lengths(lengths):
            raise ConfigError(f"must hold token counts of 0 or more as accepted[{name!r}], not {brief(lengths)}.")
    if drafter is not None and drafter not in given and drafter not in theirs:
        raise ConfigError(f'must hold "accepted": {{"{drafter}": [...]}} for --drafter, not {brief(given or theirs)}.')
    return theirs | given


def _are_lengths(value: Any) -> bool:
    return isinstance(value, list) and all(type(length) is int and 0 <= length < 1 << 31 for length in value)


def parsed(row: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[int] | None]]:
    """Prompt and output of each sample of a line, as token ids; no output where there is none.

    Raises:
        ConfigError: the row holds nothing of FORMATS.
    """
    match row:
        case {"messages": messages}:
            yield from _conversation(messages, row, tokenizer)
        case {"turns": [str() as first, *_]}:  # a later turn needs an answer to the one before
            yield _rendered(tokenizer(), [{"role": "user", "content": first}]), None
        case {"prompt_token_ids": prompt, "generated_token_ids": output}:  # SpecDecode-Bench
            yield token_ids(prompt, "prompt_token_ids", tokenizer), token_ids(output, "generated_token_ids", tokenizer)
        case {"traj": messages}:  # tau-bench
            yield from _conversation(messages, {}, tokenizer)
        case {"question": [[*messages], *_]}:  # BFCL
            yield from _called(messages, row, tokenizer)
        case {"prompt": prompt}:
            output = token_ids(row["output"], "output", tokenizer) if "output" in row else None
            yield token_ids(prompt, "prompt", tokenizer, is_start=True), output
        case {"text": text}:
            yield [], token_ids(text, "text", tokenizer)
        case _:
            raise ConfigError(f"must hold {FORMATS}, not {brief(dict(row))}.")


def _conversation(
    messages: Any, row: Mapping[str, Any], tokenizer: Tokenizer
) -> Iterator[tuple[list[int], list[int] | None]]:
    """Each answer of the assistant with all that stands before it as its prompt; the last alone, where a log of
    requests holds it apart, as "choices": what was answered before is in the lines before, too."""
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        raise ConfigError(f"must hold messages that have a role and a content, not {brief(messages)}.")
    turns = [{"role": message["role"], "content": _text(message)} for message in messages]
    ends = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    match row.get("choices"):
        case None:
            pass
        case [{"message": dict() as answer}, *_]:
            ends = [len(turns)]
            turns.append({"role": "assistant", "content": _text(answer)})
        case choices:
            raise ConfigError(f"must hold a message in its first choice, not {brief(choices)}.")
    for end in ends:
        output = token_ids(turns[end]["content"], "content", tokenizer)
        yield (_rendered(tokenizer(), turns[:end]) if output else []), output
    if not ends:  # of SPEED-Bench's questions the first: a later one needs an answer to the one before
        turns = turns[: 1 + next((index for index, turn in enumerate(turns) if turn["role"] == "user"), len(turns))]
    if turns[-1]["role"] != "assistant":
        yield _rendered(tokenizer(), turns), None


def _called(
    messages: Any, row: Mapping[str, Any], tokenizer: Tokenizer
) -> Iterator[tuple[list[int], list[int] | None]]:
    """A question of BFCL after its functions. Its answer is the calls, with the first value of each argument."""
    calls = row.get("ground_truth", [])
    if not (isinstance(calls, list) and all(map(_is_call, calls))):
        raise ConfigError(f"must hold calls as ground_truth, not {brief(calls)}.")
    answer = [
        {"name": name, "arguments": {key: values[0] for key, values in given.items() if values and values[0] != ""}}
        for call in calls for name, given in call.items()
    ]  # fmt: skip
    functions = {"role": "system", "content": json.dumps(row.get("function", []), ensure_ascii=False)}
    said = [{"role": "assistant", "tool_calls": answer}] if answer else []
    return _conversation([functions, *messages, *said], {}, tokenizer)


def _is_call(call: Any) -> bool:
    """Whether it is {function: {argument: [each value that is right]}}."""
    named = list(call.values()) if isinstance(call, dict) else [None]
    return all(isinstance(given, dict) and all(isinstance(each, list) for each in given.values()) for given in named)


def _rendered(tokenizer: Any, turns: Sequence[Mapping[str, str]]) -> list[int]:
    try:
        return chat_prompt(tokenizer, turns)
    except Exception as error:  # whatever a template raises
        raise ConfigError(
            f"must hold messages that the tokenizer's chat template takes ({error_text(error)})."
        ) from error


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and len(message) > 1


def _text(message: Mapping[str, Any]) -> str:
    """What a message says: its text, or its parts' texts, and its calls of tools as JSON."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if not isinstance(content, str):
        raise ConfigError(f"must hold text, or a list of parts, as content, not {brief(content)}.")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ConfigError(f"must hold a list of calls as tool_calls, not {brief(calls)}.")
    calls = [call.get("function", call) if isinstance(call, dict) else call for call in calls]
    return "\n".join([*filter(None, [content]), *(json.dumps(call, ensure_ascii=False) for call in calls)])
