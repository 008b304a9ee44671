"""OpenAI's `prediction` of a chat completion, which vLLM's protocol drops: it is our option `reference`."""

from dataclasses import dataclass
from typing import Any

from vllm_specplugins.config import ConfigError, brief
from vllm_specplugins.engine.hooks import wrap


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a request predicts, and its own options as they came, which come before that."""

    prediction: Any
    options: Any


def take_predictions() -> None:
    """Has chat completions pass on what they predict; once per process, where requests come in."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    if not hasattr(ChatCompletionRequest.to_sampling_params, "__wrapped__"):
        wrap(ChatCompletionRequest, "to_sampling_params", _with_prediction)


def _with_prediction(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    params, prediction = original(self, *args, **kwargs), (self.model_extra or {}).get("prediction")
    if prediction is not None:
        extra = params.extra_args or {}
        params.extra_args = {**extra, "specplugins": Predicted(prediction, extra.get("specplugins"))}
    return params


def text_of(prediction: Any) -> str:
    """The text of `{"type": "content", "content": ...}`, which is a text or a list of text parts.

    Raises:
        ConfigError: it is something else.
    """
    content = prediction.get("content") if isinstance(prediction, dict) else None
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if isinstance(parts, list):
        texts = [text for part in parts if isinstance(text := _text(part), str)]
        if len(texts) == len(parts):
            return "".join(texts)
    allowed = "{'type': 'content', 'content': a text or a list of text parts}"
    raise ConfigError(f"prediction must be {allowed}, not {brief(prediction)}.")


def _text(part: Any) -> Any:
    return part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
