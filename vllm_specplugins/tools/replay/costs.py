"""Computes the time of a step: a forward pass as a function of its verified tokens, and the host's work."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_specplugins.config import ConfigError, brief
from vllm_specplugins.config.fields import error_text
from vllm_specplugins.gate.usual import never_less


@dataclass(frozen=True, slots=True)
class CostTable:
    """The time of a step as a function of its tokens, linear between measured points. It is extrapolated unless it
    would fall. `ms` is ordered by verified tokens, summed over all requests; a request without a draft verifies one."""

    ms: Mapping[int, float]
    context_ms: float = 0.0  # for each token of context of each request: attention reads its keys and values
    source: str = ""  # of the figures

    @classmethod
    def line(cls, step_ms: float, token_ms: float) -> "CostTable":
        """Returns linear costs, from the time of one request's step and the time per draft token.

        >>> CostTable.line(10.0, 0.5).step_ms(num_reqs=1, num_draft=4)
        12.0
        """
        return cls(
            {1: step_ms, 2: step_ms + token_ms}, source=f"{step_ms:g} ms, and {token_ms:g} ms for each draft token"
        )

    def step_ms(self, num_reqs: int, num_draft: int = 0, num_context: int = 0) -> float:
        """Returns the time of a step in ms, from the total numbers of requests, draft tokens and tokens of context."""
        tokens, ms = list(self.ms), list(self.ms.values())
        count, slope = num_reqs + num_draft, (ms[-1] - ms[-2]) / (tokens[-1] - tokens[-2])
        after = max(0.0, slope) * max(0, count - tokens[-1])
        return float(np.interp(count, tokens, ms)) + after + self.context_ms * num_context


@dataclass(frozen=True, slots=True)
class Load:
    """The time of a step, and the number of concurrent requests. If drafting `waits` for the device, host and device
    take turns. Otherwise they work in parallel, and a step takes as long as the slower one."""

    costs: CostTable
    batch: int = 1
    draft_us: float | None = None  # us of drafting, for each request and step; None: measured on this machine
    host: CostTable | None = None  # time of the engine's thread in a step, by requests; None: the costs include it
    waits: bool = False

    def step_ms(self, num_reqs: int, num_draft: int, num_context: int) -> float:
        """Returns the time of a step in ms, with the host's share (CostTable.step_ms)."""
        ms = self.costs.step_ms(num_reqs, num_draft, num_context)
        host_ms = self.host.step_ms(num_reqs) if self.host else 0.0
        return ms + host_ms if self.waits else max(ms, host_ms)

    def profile(self, num_draft: int) -> dict[int, float]:
        """Returns the time of a step by its number of tokens, as an engine measures it at its start."""
        return {num: self.step_ms(num, 0, 0) for num in range(1, self.batch * (1 + num_draft) + 1)}

    def drafting_ms(self, num_reqs: int, measured_ms: float) -> float:
        """Returns the time of drafting in ms; if the device drafts, the host's share includes it."""
        if self.draft_us is not None:
            return self.draft_us * num_reqs / 1000
        return 0.0 if self.host and not self.waits else measured_ms


# Time of the engine's thread on Model Runner V2, asynchronous: minima on the null device, whose operations do nothing
# (an EPYC core, vLLM 0.32.0, K = 5; without calls of the driver).
NO_SPECULATION = CostTable({1: 0.556, 8: 0.663, 32: 0.956})
LOOKUP = CostTable({1: 1.085, 8: 1.234, 32: 1.68})
HOST_SOURCE = (
    "host time, measured on an engine whose device does nothing: 0.56, 0.66 and 0.96 ms per step at 1, 8 and 32 "
    "requests without speculation, and 1.09, 1.23 and 1.68 ms with prompt_lookup; the device waits for drafting on the "
    "host"
)
BANDWIDTH = 3.35e12  # bytes per second of an H100 SXM
LAYERS, KV_BYTES = 32, 32 * 2 * 4096 * 2  # of Llama 2 7B
# us of one of its layers, by tokens.
_LAYER_US = {
    1: 175, 16: 181, 32: 181, 64: 183, 96: 228, 128: 199, 160: 230.5, 192: 231.5, 224: 281, 256: 286, 320: 305,
    384: 345, 448: 391.5, 512: 374.5, 640: 491, 768: 588, 896: 644, 1024: 657, 1280: 827, 1536: 1043, 2048: 1260,
}  # fmt: skip
H100 = CostTable(
    ms={tokens: LAYERS * us / 1000 for tokens, us in _LAYER_US.items()},
    context_ms=1000 * KV_BYTES / BANDWIDTH,
    source=f"Llama 2 7B, one H100: {LAYERS} times the medians of a layer's matrices, norms and activations that Vidur "
    "recorded (Agrawal et al. 2024, data/profiling/compute/h100); attention as the bytes of keys and values at "
    "3.35 TB/s (data sheet); no sampling, no scheduling",
)
# 7.093 ms, and 21.0 us for each token of the step.
LLAMA_3_1_8B = CostTable(
    ms={1: 7.114, 2: 7.135},
    context_ms=3.93e-5,
    source="Llama 3.1 8B, one H100: a step as fitted by Liu et al. 2025 (arXiv 2601.11580): 5.886 ms, and 1.207 ms "
    "around it, 21.0 us for each token, 39.3 ns for each token of context",
)
COSTS = {"llama-2-7b": H100, "llama-3.1-8b": LLAMA_3_1_8B}


def costs_of(name: str) -> CostTable:
    """Returns the costs with a name in COSTS, linear costs as in 10:0.5, or the costs in a file of `bench`. Raises
    ConfigError otherwise."""
    if name in COSTS:
        return COSTS[name]
    allowed = (
        f"--costs must be {', '.join(COSTS)}, MS:MS_A_TOKEN, or a file that bench wrote, with steps of two lengths"
    )
    try:
        if line := re.fullmatch(r"([\d.]+):([\d.]+)", name):
            return CostTable.line(float(line[1]), float(line[2]))
        bench = json.loads(Path(name).read_text())
        ms = {int(tokens): float(median) for tokens, median in bench["step_ms_by_tokens"].items()}
        source = f"{Path(bench['model']).name}, {bench['machine']['device']}: steps that bench measured"
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{allowed}, not {brief(name)} ({error_text(error)}).") from None
    if len(ms) < 2:
        raise ConfigError(f"{allowed}, not {brief(name)}.")
    return CostTable(_rising(ms), source=source)


def _rising(ms: Mapping[int, float]) -> dict[int, float]:
    """Returns measured times without decreases, which are noise, and one more time on the line from the first time to
    the last one. By the last two times alone, further tokens could look free."""
    tokens = sorted(ms)
    rising = never_less(np.array([ms[number] for number in tokens], float), np.ones(len(tokens)))
    slope = (rising[-1] - rising[0]) / (tokens[-1] - tokens[0])
    return {**dict(zip(tokens, rising.tolist(), strict=True)), 2 * tokens[-1]: float(rising[-1] + slope * tokens[-1])}
