"""Uses OpenAI's `prediction` of a chat completion, which vLLM's protocol drops, as the option `reference`."""

from dataclasses import dataclass
from typing import Any

from vllm_specplugins.config import ConfigError, brief
from vllm_specplugins.engine.hooks import wrap
from vllm_specplugins.request_options import Limits, check_size


@dataclass(frozen=True, slots=True)
class Predicted:
    """The prediction of a request, and its options, which take precedence."""

    prediction: Any
    options: Any


def take_predictions() -> None:
    """Makes chat completions forward their prediction. Applied once per process, in the process that receives
    requests."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    wrap(ChatCompletionRequest, "to_sampling_params", _with_prediction)


def _with_prediction(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    params, prediction = original(self, *args, **kwargs), (self.model_extra or {}).get("prediction")
    if prediction is not None:
        extra = params.extra_args or {}
        params.extra_args = {**extra, "specplugins": Predicted(prediction, extra.get("specplugins"))}
    return params


def text_of(prediction: Any, limits: Limits) -> str:
    """Returns the text of `{"type": "content", "content": ...}`, where the content is a text or a list of text parts.
    Raises ConfigError for another form, and for a text that is too long for a reference."""
    is_content = isinstance(prediction, dict) and prediction.get("type") == "content"
    content = prediction.get("content") if is_content else None
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(map(_is_text, parts)):
        allowed = "{'type': 'content', 'content': a text or a list of text parts}"
        raise ConfigError(f"prediction must be {allowed}, not {brief(prediction)}.")
    check_size("prediction", sum(len(part["text"]) for part in parts), limits)
    return "".join(part["text"] for part in parts)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
