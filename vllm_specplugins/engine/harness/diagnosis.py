"""Diagnoses an installation, a device and a configuration without starting an engine; for `doctor`."""

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, fields, replace
from importlib.metadata import entry_points
from io import StringIO
from textwrap import shorten
from types import SimpleNamespace
from typing import Any

from vllm_specplugins import __version__
from vllm_specplugins.config import ConfigError, EarlyExitConfig, SpecConfig, methods_of, one_line
from vllm_specplugins.config.fields import check_names
from vllm_specplugins.custom import registrations
from vllm_specplugins.engine.frontend import fallback
from vllm_specplugins.engine.frontend.plugin import install, requested
from vllm_specplugins.engine.frontend.scheduling import vllm_methods
from vllm_specplugins.engine.vllm_api import compat
from vllm_specplugins.methods import METHODS
from vllm_specplugins.parsing import parse_config

OK, ADVICE, PROBLEM = "ok", "advice", "problem"
READY = {"method": "prompt_lookup"}

UNTRAINED = (
    "a model that was not trained for early exits gains little: measure each exit_layer with `calibrate`, find better "
    "layers with `calibrate --layers`, or train an exit_head with `train-exit-head`"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a diagnosis. Its state is OK, ADVICE (a better choice exists) or PROBLEM (vLLM would not serve
    it)."""

    name: str
    value: str
    state: str = OK


def diagnose(
    raw: Mapping[str, Any] | None,
    model: str | None,
    serve: Sequence[str] = (),
    default: Mapping[str, Any] | None = READY,
) -> list[Finding]:
    """Returns all findings about a value of --speculative-config, a checkpoint, and other arguments of `vllm serve` or
    its whole command line, in the report's order. Without a configuration, it checks `default`, if any."""
    findings = [*_versions(), *_plugin(), _device(), *_vllm_names()]
    if not compat.probe_installed():  # an unsupported vLLM may fail anywhere
        try:
            raw, model, serve = _command_line(raw, model, serve)
        except ConfigError as error:
            return [*findings, Finding("arguments", str(error), PROBLEM)]
        findings += _registered()
        if (given := default if raw is None else raw) is not None:
            checked = list(_configuration(dict(given), model))
            findings += checked
            if checked[0].state != PROBLEM:
                findings += _runner(dict(given), model, serve)
    return [*findings, _kernels()]


def _command_line(
    raw: Mapping[str, Any] | None, model: str | None, serve: Sequence[str]
) -> tuple[Mapping[str, Any] | None, str | None, Sequence[str]]:
    """Returns the configuration, the model and the other arguments of `vllm serve MODEL ...`. Raises ConfigError for a
    command line that vLLM's parser refuses."""
    if list(serve[:2]) != ["vllm", "serve"]:
        return raw, model, serve
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    output = StringIO()
    try:
        with redirect_stderr(output):
            given = vars(make_arg_parser(FlexibleArgumentParser()).parse_args(list(serve[2:])))
    except SystemExit:
        reason = output.getvalue().strip().rpartition("error: ")[2].rstrip(".")
        raise ConfigError(f"vllm serve: {one_line(reason, 300)}.") from None
    asked, tag = given["speculative_config"], given["model_tag"]
    words = list(serve[2:])
    if tag is not None:
        words.remove(tag)  # only once, since a flag may have the same value
    return raw if asked is None else asked, tag or model or given["model"], words


def _versions() -> Iterator[Finding]:
    yield Finding("vllm-specplugins", __version__)
    yield Finding("python", platform.python_version())
    for name in ("torch", "triton", "vllm", "transformers"):
        number = compat.version_of(*(compat.VLLM if name == "vllm" else (name,)))
        if number is None:
            yield Finding(name, "is not installed", PROBLEM if name in ("torch", "vllm") else ADVICE)
        elif name == "triton" and not _has_triton():
            yield Finding(name, f"{number}, which has no backend for this device; vLLM runs without it")
        else:
            yield Finding(name, number)


def _has_triton() -> bool:
    with suppress(ImportError):  # an unsupported vLLM may lack the module
        from vllm.triton_utils import HAS_TRITON

        return bool(HAS_TRITON)
    return True


def _plugin() -> Iterator[Finding]:
    if not any(point.value.startswith("vllm_specplugins:") for point in entry_points(group="vllm.general_plugins")):
        words = "vLLM does not find the entry point of this package: install it with pip; PYTHONPATH is not enough"
        yield Finding("plugin", words, PROBLEM)
    elif fallback.is_disabled():
        words = "VLLM_SPECPLUGINS_DISABLE is set: vLLM would serve without speculation"
        yield Finding("plugin", words, PROBLEM)
    elif (wanted := os.environ.get("VLLM_PLUGINS")) is not None and "specplugins" not in wanted.split(","):
        yield Finding("plugin", f"VLLM_PLUGINS must include specplugins, not {wanted!r} alone", PROBLEM)
    else:
        yield Finding("plugin", "vLLM loads it")


def _registered() -> Iterator[Finding]:
    for entry in registrations((*METHODS, *vllm_methods())):
        if entry.refusal is None:
            yield Finding("registered method", f"{entry.name} ({entry.proposer}, of {entry.package})")
        else:
            yield Finding("registered method", entry.refusal, ADVICE)


def _device() -> Finding:
    import torch

    if torch.cuda.is_available():
        return Finding("device", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    return Finding("device", f"CPU with {os.cpu_count()} cores; torch finds no GPU")


def _vllm_names() -> Iterator[Finding]:
    problems, wanted = compat.probe_installed(), sum(map(len, compat.names().values()))
    untested = compat.untested_version()
    if problems:
        more = f" (and {len(problems) - 1} more of {wanted} names)" if len(problems) > 1 else ""
        words = f"{problems[0]}{more}; {_consequence()}"
        yield Finding("vllm version", words, PROBLEM)
    elif untested:
        words = _consequence() if (refused := fallback.refuses()) else "all names that the plugin uses exist"
        words = f"the plugin was tested with {compat.SUPPORTED}, not {untested}; {words}"
        yield Finding("vllm version", words, PROBLEM if refused else ADVICE)
    else:
        yield Finding("vllm version", f"supported: all {wanted} internal names that the plugin uses exist")
    patches = {name for record in compat.replaced() if record.kind == "patch" for name in record.names}
    yield Finding("replaced in vLLM", f"{len(patches)} functions, if a method of this package is selected")


def _consequence() -> str:
    return f"{fallback.ON_ERROR} would end the start" if fallback.refuses() else "vLLM would serve without speculation"


def _configuration(asked: Mapping[str, Any], model: str | None) -> Iterator[Finding]:
    from vllm.config.speculative import SpeculativeConfig

    name, arguments = asked.get("method"), {"spec_method": None, "spec_model": None, "spec_tokens": None}
    try:
        if name is None:
            raise ConfigError("speculative_config: method is missing.")
        raw = requested(SimpleNamespace(speculative_config=asked, **arguments))
        if raw is None and (name not in METHODS or "model" in asked):
            check_names(asked, [entry.name for entry in fields(SpeculativeConfig)], str(name))
            yield Finding("configuration", f"{name} is a method of vLLM, which serves it without this package", ADVICE)
            return
        config = parse_config(asked if raw is None else raw)
    except ConfigError as error:
        yield Finding("configuration", str(error), PROBLEM)
        return
    without = "" if model else "; add --model MODEL to check them for that model"
    yield Finding("configuration", f"{name}: all fields are valid{without}")
    if any(
        isinstance(part.method_config, EarlyExitConfig) and part.method_config.exit_head is None
        for part in config.parts
    ):
        yield Finding("early_exit", UNTRAINED, ADVICE)
    if names := _research(config):
        yield Finding("research", f"no figure shows that {', '.join(names)} makes a server faster", ADVICE)


def _research(config: SpecConfig) -> list[str]:
    """Returns what a configuration uses without a figure of this project that shows a gain in speed
    (docs/research/figures.md)."""
    parts = [config.method_config, *(stage.method_config for stage in config.stages)]
    names = [name for name in ("tree", "look_ahead", "learn", "shared") if any(getattr(x, name, None) for x in parts)]
    values = ("policy", "verify"), ("rejection", "rounds")
    names += [f"{name} {value!r}" for name, value in values if any(getattr(x, name, None) == value for x in parts)]
    return names + [name for name in methods_of(config) if name == "lookahead"]


def _runner(asked: Mapping[str, Any], model: str | None, serve: Sequence[str]) -> Iterator[Finding]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if model is None:
        yield Finding("runner", "runner and scheduling depend on the model; name one with --model")
        return
    install()
    try:
        parsed, _ = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_known_args([*serve, "--model", model])
        args = replace(EngineArgs.from_cli_args(parsed), speculative_config=dict(asked))
        config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except Exception as error:  # vLLM may raise anything for a model or a configuration that it refuses
        yield Finding("model", shorten(str(error), 400, placeholder=" ...") or type(error).__name__, PROBLEM)
        return
    if problems := compat.probe_installed("v2" if config.use_v2_model_runner else "v1"):
        yield Finding("runner", f"{problems[0]}; {_consequence()}", PROBLEM)
    yield Finding("model", f"{model}: {asked['method']} supports {config.model_config.architecture}")
    yield Finding("draft", f"at most {config.num_speculative_tokens} tokens per request (num_speculative_tokens)")
    unsupported = ", ".join(config._get_v2_model_runner_unsupported_features())
    why = "" if config.use_v2_model_runner or not unsupported else f"; V2 does not support {unsupported}"
    yield Finding("runner", f"{'V2' if config.use_v2_model_runner else 'V1'}{why}")
    yield Finding("scheduling", "asynchronous" if config.scheduler_config.async_scheduling else "synchronous")
    if (plan := getattr(config.speculative_config, "plan", None)) is not None:
        yield Finding("drafting", f"{plan}" if plan.on_device else f"{plan} Why on the host: {plan.host_reason}.")


def _kernels() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("kernels", "not checked without a GPU: on a CPU, compiled reference code verifies drafts")
    from vllm_specplugins.kernels.self_check import Shapes, check_device

    model: dict[str, Any] = {"vocab_size": 32_000, "dtype": torch.bfloat16}
    lookup = Shapes(**model, max_num_draft=31, samples=False, looks_up=True, trims=True)
    part = Shapes(**model, max_num_draft=15, samples=True, heads=(32, 8, 128))
    findings = [finding for shapes in (lookup, part) for finding in check_device(torch.device("cuda"), shapes)]
    differing = [f"{name}: {problem}" for name, problem in findings if problem]
    if differing:
        return Finding(
            "kernels", f"some kernels differ from their references on this GPU ({'; '.join(differing)})", PROBLEM
        )
    return Finding("kernels", "all equal their references on this GPU")
