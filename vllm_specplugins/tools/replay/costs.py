"""What a step costs: the time of a forward pass that verifies so many tokens. Measured by others, or given by hand."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class CostTable:
    """Time of a step by the tokens in it; between those that were measured it follows the line, after them the last.

    Args:
        ms: by tokens verified, those of all requests together; a request without a draft verifies one.
        context_ms: for each token of context of each request: attention reads its keys and values.
        source: where the figures are from.
    """

    ms: Mapping[int, float]
    context_ms: float = 0.0
    source: str = ""
    _known: tuple[list[int], list[float]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tokens = sorted(self.ms)
        object.__setattr__(self, "_known", (tokens, [self.ms[count] for count in tokens]))

    @classmethod
    def line(cls, step_ms: float, token_ms: float) -> "CostTable":
        """One request's step, and what each draft token adds to it.

        >>> CostTable.line(10.0, 0.5).step_ms(num_reqs=1, num_draft=4)
        12.0
        """
        source = f"{step_ms:g} ms, and {token_ms:g} ms for each draft token"
        return cls({1: step_ms, 2: step_ms + token_ms}, source=source)

    def step_ms(self, num_reqs: int, num_draft: int, num_context: int = 0) -> float:
        """ms of a step of num_reqs requests with so many draft tokens and tokens of context, in all."""
        tokens, ms = self._known
        count = num_reqs + num_draft
        if count > tokens[-1] and len(tokens) > 1:
            slope = (ms[-1] - ms[-2]) / (tokens[-1] - tokens[-2])
            return ms[-1] + slope * (count - tokens[-1]) + self.context_ms * num_context
        return float(np.interp(count, tokens, ms)) + self.context_ms * num_context


def _h100(layers: int, kv_bytes: int, model: str, us: Mapping[int, float]) -> CostTable:
    """A model's table from the medians of its layers' kernels, in us of one layer."""
    return CostTable(
        ms={tokens: layers * value / 1000 for tokens, value in us.items()},
        context_ms=1000 * kv_bytes / BANDWIDTH,
        source=f"{model}, one H100: {layers} times the medians of a layer's matrices, norms and activations that Vidur "
        "recorded (Agrawal et al. 2024, data/profiling/compute/h100); attention as the bytes of keys and values at "
        "3.35 TB/s (data sheet); no sampling, no scheduling",
    )


@dataclass(frozen=True, slots=True)
class HostCost:
    """What the engine's thread does in a step. Where drafting is on the device, host and device work side by side, and
    a step takes as long as the slower one; what drafts on the host waits for the device.

    Args:
        us: at 1, 8 and 32 requests.
        waits: whether drafting waits for the step before it.
    """

    us: tuple[float, float, float]
    waits: bool = False

    def step_ms(self, num_reqs: int, device_ms: float) -> float:
        """Of a step with so many requests that keeps the device busy for so long."""
        low, middle, high = self.us
        slope = (high - middle) / (32 - 8)
        within = float(np.interp(num_reqs, (1, 8, 32), (low, middle, high)))
        ms = (within + slope * max(0, num_reqs - 32)) / 1000
        return device_ms + ms if self.waits else max(device_ms, ms)


# us of the engine's thread, Model Runner V2, asynchronous, minima on the null device: an engine whose device does
# nothing (an EPYC core, vLLM 0.32.0, K = 5; the driver's own calls are not in it).
NO_SPECULATION_US, LOOKUP_US = (556.0, 663.0, 956.0), (1085.0, 1234.0, 1680.0)
HOST_SOURCE = (
    "the host's share as measured on an engine whose device does nothing: 0.56, 0.66 and 0.96 ms a step at 1, 8 and 32 "
    "requests without speculation, 1.09, 1.23 and 1.68 with prompt_lookup beside the device; what drafts on the host "
    "makes the device wait"
)
BANDWIDTH = 3.35e12  # bytes per second of an H100 SXM
# Tables by the name that --gpu takes.
TABLES: Mapping[str, CostTable] = {
    "h100": _h100(
        32,
        32 * 2 * 4096 * 2,
        "Llama 2 7B",
        {1: 175, 16: 181, 32: 181, 64: 183, 96: 228, 128: 199, 160: 230.5, 192: 231.5, 224: 281, 256: 286, 320: 305,
         384: 345, 448: 391.5, 512: 374.5, 640: 491, 768: 588, 896: 644, 1024: 657, 1280: 827, 1536: 1043, 2048: 1260},
    ),
    "h100-34b": _h100(
        48,
        48 * 2 * 1024 * 2,
        "Code Llama 34B",
        {1: 507.5, 16: 512, 32: 518, 64: 522.5, 96: 568, 128: 551, 160: 609.5, 192: 658, 224: 639.5, 256: 636,
         320: 817, 384: 1192.5, 448: 1199.5, 512: 1113, 640: 1709, 768: 1810.5, 896: 2034.5, 1024: 2372.5,
         1280: 2716.5, 1536: 3281.5, 2048: 4300.5},
    ),
}  # fmt: skip
