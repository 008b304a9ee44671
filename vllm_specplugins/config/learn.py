"""Defines the field `learn` of a method, which trains a part while the engine serves."""

from dataclasses import dataclass, fields
from typing import Any

from vllm_specplugins.config.fields import check_fields, check_names, integer, number, optional, path


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnConfig:
    """The settings of `learn`.

    Args:
        busy_share: The largest share of time for training while requests are served.
        idle_share: The largest share of time for training while there are no requests.
        memory_bytes: The device memory for training data, which is allocated at the start.
        path: The folder from which weights are loaded and to which they are saved. Data-parallel engines add ".dp1" and
            so on to the name.
        save_every_s: The time between saves, in seconds. A killed process loses later training.
    """

    busy_share: float = number(0.1, 0.001, 1)
    idle_share: float = number(0.5, 0.001, 1)
    memory_bytes: int = integer(1 << 28, 1 << 20, 1 << 36)
    path: str | None = optional(path())
    save_every_s: int = integer(300, 1, 1_000_000)

    @classmethod
    def parse(cls, method: str, raw: Any) -> Any:
        """Returns the settings for true or a dictionary, and None for false; `check_fields` refuses other values
        later."""
        if not isinstance(raw, dict):
            return cls() if raw is True else None if raw is False else raw
        check_names(raw, [entry.name for entry in fields(cls)], f"{method}: learn")
        config = cls(**raw)
        check_fields(config, f"{method}: learn")
        return config


LEARN = {  # of the field
    "allowed": "true, false or a dictionary",
    "fits": lambda value: value is None or isinstance(value, LearnConfig),
    "parsed": LearnConfig.parse,
}
