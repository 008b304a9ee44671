"""Runs engines for `bench` that serve many concurrent requests and are timed step by step. Each has a process. On a CPU
they run in time slices, and an engine's clock stops while others run, so a longer disturbance of the machine affects
all engines equally."""

import math
import os
import platform
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from operator import sub
from pathlib import Path
from typing import Any

from vllm_specplugins.engine.harness.process import EngineProcess, build_llm, faults, totals
from vllm_specplugins.engine.harness.traffic import Answer, Forced, Machine, Traffic, Turn
from vllm_specplugins.engine.hooks import wrap
from vllm_specplugins.engine.messages import facts_of
from vllm_specplugins.request_options import STORES_NOTHING

SLICE_S = 0.3
GO_ON = True  # the message
FORCED_LOG = "vllm_specplugins.engine.harness.forced.ForcedLog"
LOGGED = "specplugins_log"  # key of SamplingParams.extra_args: the request's row of a log that is forced
# Arguments of `vllm.LLM` that would make rounds unequal, or their times less comparable.
SETTINGS: dict[str, Any] = {"enable_prefix_caching": False}


def serving_engine(
    name: str,
    arguments: Mapping[str, Any],
    speculative_config: Mapping[str, Any] | None,
    log: Path,
    emits: Forced | None = None,
) -> EngineProcess:
    """Runs an engine with a method. It first sends its Machine. After Traffic it answers each GO_ON with the number of
    tokens so far, or with a Turn once everything is served."""
    blame = f"vLLM cannot serve this model with {name}"
    return EngineProcess(log, blame, _serve_all, dict(arguments), speculative_config, emits)


def serve_rounds(
    engines: Mapping[str, EngineProcess], rounds: Sequence[Traffic], advance: Callable[[], object]
) -> dict[str, list[Turn]]:
    """Returns the turns by method. In a round all engines serve the same traffic side by side; the first round is a
    warm-up."""
    turns: dict[str, list[Turn]] = {name: [] for name in engines}
    names = list(engines)
    for index, traffic in enumerate(rounds):
        first = index % len(names)  # the order may matter
        for name, turn in serve_round({name: engines[name] for name in names[first:] + names[:first]}, traffic).items():
            turns[name].append(turn)
        advance()
    return turns


def serve_round(engines: Mapping[str, EngineProcess], traffic: Traffic) -> dict[str, Turn]:
    """Runs one turn of each engine; the engine with the fewest tokens runs next."""
    turns: dict[str, Turn] = {}
    num_tokens = dict.fromkeys(engines, 0)
    for engine in engines.values():
        engine.send(traffic)
    while num_tokens:
        name = min(num_tokens, key=lambda name: num_tokens[name])
        match engines[name].ask(GO_ON):
            case Turn() as turn:
                turns[name] = turn
                del num_tokens[name]
            case count:
                num_tokens[name] = count
    return turns


def _serve_all(
    pipe: Connection, arguments: Mapping[str, Any], config: Mapping[str, Any] | None, emits: Forced | None
) -> None:
    from vllm.platforms import current_platform

    extension = {"worker_extension_cls": FORCED_LOG} if emits else {}
    llm, on_cpu = build_llm({**SETTINGS, **extension, **arguments}, config), current_platform.is_cpu()
    if emits:
        llm.collective_rpc("specplugins_force", args=(emits.outputs, emits.accepted if config else None))
    vllm_config = llm.llm_engine.vllm_config
    device = _processor_name() if on_cpu else current_platform.get_device_name()
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    pipe.send(Machine(device, dtype, "V2" if vllm_config.use_v2_model_runner else "V1"))
    ours = hasattr(vllm_config.speculative_config, "plugin_config")
    # A GPU would continue to work while the clock is stopped.
    clock = _Clock(pipe, SLICE_S if on_cpu else math.inf, llm.collective_rpc if ours else None)
    keeps = "store_path" in repr(config)  # the user's store, which must not change
    extra_args, salt = {"specplugins": STORES_NOTHING} if keeps else None, None
    steps = _Steps(llm, clock)
    while (traffic := pipe.recv()) is not None:
        if keeps:
            traffic = replace(traffic, salt=None)
        if ours and traffic.salt != salt:  # this also resets acceptance estimates
            llm.collective_rpc("specplugins_store", args=("reset",))
        salt = traffic.salt
        turn = _serve(llm, traffic, clock, extra_args)
        pipe.send(replace(turn, steps=steps.taken()))


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return f"{name[1] if name else platform.machine()}, {os.cpu_count()} cores"


class _Clock:
    """Counts time without the slices of other engines, and reports its pauses to the plugin's workers by `tell`, if
    given."""

    def __init__(self, pipe: Connection, slice_s: float, tell: Callable[..., object] | None):
        self._pipe, self._slice_s, self._tell = pipe, slice_s, tell
        self._paused_s = self._resumed = 0.0

    def now(self) -> float:
        return time.perf_counter() - self._paused_s

    def wait(self) -> None:
        start = self.now()
        if self._pipe.recv() is None:
            raise SystemExit  # during traffic
        if self._tell is not None:
            self._tell("specplugins_paused", args=((self.now() - start) * 1000,))
        self._resumed = start
        self._paused_s += self.now() - start

    def give_way(self, num_tokens: int) -> None:
        """Lets other engines run if this engine's time slice is over."""
        if self.now() - self._resumed >= self._slice_s:
            self._pipe.send(num_tokens)
            self.wait()


class _Steps:
    """Times the steps of an engine without a prefill (see Turn), each from the end of the previous step."""

    def __init__(self, llm: Any, clock: _Clock):
        self._clock, self._ended, self._steps = clock, math.nan, list[tuple[int, float]]()
        wrap(llm.llm_engine.engine_core.engine_core.scheduler, "update_from_output", self._update)

    def _update(self, update: Any, scheduled: Any, output: Any) -> Any:
        before, self._ended = self._ended, self._clock.now()
        num_reqs, num_tokens = len(scheduled.num_scheduled_tokens), scheduled.total_num_scheduled_tokens
        num_drafted = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        if num_reqs and num_tokens == num_reqs + num_drafted and self._ended > before:
            num_verified = facts_of(output).num_verified
            num_trimmed = 0 if num_verified is None else num_drafted - min(num_drafted, num_verified)
            self._steps.append((num_tokens - num_trimmed, 1000 * (self._ended - before)))
        return update(scheduled, output)

    def taken(self) -> list[tuple[int, float]]:
        """Returns the steps since the last call; the engine is idle until the next call."""
        steps, self._steps, self._ended = self._steps, [], math.nan
        return steps


def _serve(llm: Any, traffic: Traffic, clock: _Clock, extra_args: Any) -> Turn:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    lengths, more = traffic.output_lengths, dict(traffic.sampling)
    if "structured_outputs" in more:
        more["structured_outputs"] = StructuredOutputsParams(**more["structured_outputs"])
    params = [
        SamplingParams(
            temperature=traffic.temperature,
            max_tokens=lengths if isinstance(lengths, int) else lengths[index],
            ignore_eos=traffic.ignore_eos,
            # Without a seed: on CPUs, a seeded request with a chunked prefill ends vLLM 0.32.
            detokenize=False,  # a server does this in another process
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra_args if traffic.logged is None else {**(extra_args or {}), LOGGED: traffic.logged[index]},
            **more,
        )
        for index in range(len(traffic.prompts))
    ]
    before = _counts(llm)
    clock.wait()
    start, cpu_start = clock.now(), time.thread_time()
    answers = _answer(llm.llm_engine, traffic, params, clock)
    seconds, cpu_seconds = clock.now() - start, time.thread_time() - cpu_start
    return Turn(seconds, answers, cpu_seconds, *map(sub, _counts(llm), before))


def _counts(llm: Any) -> list[int]:
    return [*totals(llm), sum(faults(llm).values())]


def _answer(engine: Any, traffic: Traffic, params: Sequence[Any], clock: _Clock) -> list[Answer]:
    answers = [Answer() for _ in traffic.prompts]
    start, arrivals = clock.now(), traffic.arrivals
    last_s: dict[int, float] = {}  # when a request arrived, or last received tokens
    waiting, num_tokens = deque(range(len(answers))), 0
    while waiting or engine.has_unfinished_requests():
        clock.give_way(num_tokens)
        while waiting and engine.get_num_unfinished_requests() < traffic.at_a_time:
            arrives_s = clock.now() if arrivals is None else start + arrivals[waiting[0]]
            if arrives_s > clock.now():
                break
            index = waiting.popleft()
            last_s[index] = arrives_s
            prompt = {"type": "token", "prompt_token_ids": list(traffic.prompts[index])}
            prompt |= {"cache_salt": traffic.salt} if traffic.salt else {}
            engine.add_request(str(index), prompt, params[index])
        if not engine.has_unfinished_requests():
            time.sleep(0.001)  # until the next request arrives
            continue
        results, now = engine.step(), clock.now()
        for result in results:
            if token_ids := result.outputs[0].token_ids:
                index = int(result.request_id)
                answers[index].add(token_ids, (now - last_s[index]) * 1000)
                last_s[index] = now
                num_tokens += len(token_ids)
    return answers
