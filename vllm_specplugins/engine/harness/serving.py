"""Engines that serve traffic, many requests at a time, and are timed step by step; for `bench`.

Each has a process of its own. On a CPU their clocks stand still after every slice of time, so that others can go on:
what disturbs the machine for longer than a moment then disturbs all of them alike.
"""

import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_specplugins.engine.harness.process import EngineProcess, build_llm, faults, totals

SLICE_S = 0.3
GO_ON = True  # the message
# Arguments of `vllm.LLM` that would make a round differ from the one before, or its times say less.
SETTINGS: dict[str, Any] = {"enable_prefix_caching": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests of one kind.

    Args:
        prompts: token ids of each.
        temperature: of all.
        max_tokens: most output tokens of a request.
        at_a_time: how many are served together; one that is done makes room for the next.
        ignore_eos: whether a request that has ended its text goes on to max_tokens.
        salt: `cache_salt` of all: nothing is known to them of earlier requests of another salt.
        learns: whether later requests of the same salt may know what they say.
    """

    prompts: Sequence[Sequence[int]]
    temperature: float
    max_tokens: int
    at_a_time: int
    ignore_eos: bool = False
    salt: str | None = None
    learns: bool = True


@dataclass(slots=True)
class Answer:
    """What one request got, and when.

    Args:
        token_ids: [num_tokens] of the output.
        first_ms: from its arrival to its first token.
        step_ms: [num_steps] from each step that gave it tokens to the next one that did.
        num_first: tokens of the first step.
    """

    token_ids: list[int] = field(default_factory=list)
    first_ms: float = 0.0
    step_ms: list[float] = field(default_factory=list)
    num_first: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """What an engine made of some traffic.

    Args:
        seconds: from the first arrival to the last token.
        answers: in the order of the prompts.
        cpu_seconds: for which the engine's threads computed, all of them together.
        num_drafts: how often a request's step had a draft.
        num_draft_tokens: how many tokens these held.
        num_accepted_tokens: how many of them were right.
        num_faults: of our proposer, which cost it drafts; none without speculation.
    """

    seconds: float
    answers: list[Answer]
    cpu_seconds: float = 0.0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_faults: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """What an engine runs on: the device's name, the dtype that it computes in, and vLLM's model runner."""

    device: str
    dtype: str
    runner: str


class ServingEngine(EngineProcess):
    """One engine for as long as a `with` block lasts; its output goes to `log`.

    Args:
        name: of the method, for the sentence if the engine fails.
        arguments: of `vllm.LLM`.
        speculative_config: None for no speculation.

    Raises:
        ConfigError: from every method, if the engine failed.
    """

    def __init__(
        self, name: str, arguments: Mapping[str, Any], speculative_config: Mapping[str, Any] | None, log: Path
    ):
        blame = f"{name} must be a method that vLLM can serve this model with"
        super().__init__(log, blame, _serve_all, dict(arguments), speculative_config)

    def wait(self) -> Machine:
        """Returns when the engine is up."""
        machine: Machine = self.receive()
        return machine

    def begin(self, traffic: Traffic) -> None:
        """Hands over traffic, of which nothing is served yet."""
        self.send(traffic)

    def go_on(self) -> Turn | int:
        """Serves for a slice of time: all of it, or how many tokens were made so far."""
        answer: Turn | int = self.ask(GO_ON)
        return answer


def _serve_all(pipe: Connection, arguments: Mapping[str, Any], config: Mapping[str, Any] | None) -> None:
    from vllm.platforms import current_platform

    llm, on_cpu = build_llm({**SETTINGS, **arguments}, config), current_platform.is_cpu()
    vllm_config = llm.llm_engine.vllm_config
    device = _processor_name() if on_cpu else current_platform.get_device_name()
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    pipe.send(Machine(device, dtype, "V2" if vllm_config.use_v2_model_runner else "V1"))
    ours = hasattr(vllm_config.speculative_config, "plugin_config")
    # A GPU would work on behind the back of a clock that stands still.
    clock = _Clock(pipe, SLICE_S if on_cpu else math.inf, llm.collective_rpc if ours else None)
    salt = None
    while (traffic := pipe.recv()) is not None:
        if "store_path" in repr(config):  # what was stored before is asked for, and stays as it is
            traffic = replace(traffic, salt=None, learns=False)
        if ours and traffic.salt != salt:  # of how often drafts were right, too, nothing is known
            llm.collective_rpc("specplugins_store", args=("reset",))
        salt = traffic.salt
        pipe.send(_serve(llm, traffic, clock))


def _processor_name() -> str:
    """As the operating system calls it, with the number of its cores."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(": ", 1)[1] for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


class _Clock:
    """Time, less that in which the other engines had their turns; `tell`, if any, has our workers leave that out."""

    def __init__(self, pipe: Connection, slice_s: float, tell: Callable[..., object] | None):
        self._pipe, self._slice_s, self._tell = pipe, slice_s, tell
        self._paused_s = self._resumed = 0.0

    def now(self) -> float:
        """In seconds."""
        return time.perf_counter() - self._paused_s

    def wait(self) -> None:
        """Stands still until this engine may go on."""
        start = self.now()
        if self._pipe.recv() is None:
            raise SystemExit  # in the midst of traffic
        if self._tell is not None:
            self._tell("specplugins_paused", args=((self.now() - start) * 1000,))
        self._resumed = start
        self._paused_s += self.now() - start

    def give_way(self, num_tokens: int) -> None:
        """Lets others go on, if this engine had its slice."""
        if self.now() - self._resumed >= self._slice_s:
            self._pipe.send(num_tokens)
            self.wait()


def _serve(llm: Any, traffic: Traffic, clock: _Clock) -> Turn:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=traffic.temperature,
        max_tokens=traffic.max_tokens,
        ignore_eos=traffic.ignore_eos,
        # Without a seed: on CPUs vLLM 0.32 dies of a seeded request whose prompt is computed in pieces.
        detokenize=False,  # in a server, another process does that
        output_kind=RequestOutputKind.DELTA,
        extra_args=None if traffic.learns else {"specplugins": {"learn": False}},
    )
    before = _counts(llm)
    clock.wait()
    start, cpu_start = clock.now(), time.process_time()
    answers = _answer(llm.llm_engine, traffic, params, clock)
    seconds, cpu_seconds = clock.now() - start, time.process_time() - cpu_start
    counts = (after - earlier for after, earlier in zip(_counts(llm), before, strict=True))
    return Turn(seconds, answers, cpu_seconds, *counts)


def _counts(llm: Any) -> list[int]:
    return [*totals(llm), sum(faults(llm).values())]


def _answer(engine: Any, traffic: Traffic, params: Any, clock: _Clock) -> list[Answer]:
    """Steps the engine until all of the traffic is served."""
    answers = [Answer() for _ in traffic.prompts]
    last_s: dict[int, float] = {}  # when a request arrived, or last got tokens
    waiting, num_tokens = list(range(len(answers)))[::-1], 0
    while waiting or engine.has_unfinished_requests():
        clock.give_way(num_tokens)
        while waiting and engine.get_num_unfinished_requests() < traffic.at_a_time:
            index = waiting.pop()
            prompt = {"type": "token", "prompt_token_ids": list(traffic.prompts[index])}
            if traffic.salt:
                prompt["cache_salt"] = traffic.salt
            last_s[index] = clock.now()
            engine.add_request(str(index), prompt, params)
        results, now = engine.step(), clock.now()
        for result in results:
            index, token_ids = int(result.request_id), result.outputs[0].token_ids
            if token_ids:
                _record(answers[index], token_ids, (now - last_s[index]) * 1000)
                last_s[index] = now
                num_tokens += len(token_ids)
    return answers


def _record(answer: Answer, token_ids: Sequence[int], elapsed_ms: float) -> None:
    """Adds the tokens of a step."""
    if answer.token_ids:
        answer.step_ms.append(elapsed_ms)
    else:
        answer.first_ms, answer.num_first = elapsed_ms, len(token_ids)
    answer.token_ids.extend(token_ids)
