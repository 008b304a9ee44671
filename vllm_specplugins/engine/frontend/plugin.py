"""The entry point: adds the plugin's methods to vLLM's `--speculative-config`. It wraps two methods of `EngineArgs`,
which pass calls with other methods to vLLM unchanged. All other changes (vllm_api/replaced.toml) follow only for a
method of the plugin."""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from vllm_specplugins.config import ConfigError, SpecConfig, brief, did_you_mean
from vllm_specplugins.custom import registrations
from vllm_specplugins.engine.frontend import fallback
from vllm_specplugins.engine.frontend.scheduling import vllm_methods
from vllm_specplugins.engine.hooks import replaced, sentence_instead_of_traceback, wrap
from vllm_specplugins.engine.vllm_api import compat
from vllm_specplugins.methods import METHODS
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.plan import wanted_schedule

logger = logging.getLogger("vllm.specplugins")


def install() -> None:
    """Wraps EngineArgs, once per process. With VLLM_SPECPLUGINS_DISABLE=1 it only removes the plugin's methods from a
    configuration."""
    try:
        from vllm.engine.arg_utils import EngineArgs

        for name in "create_speculative_config", "create_engine_config":
            getattr(EngineArgs, name)
    except (AttributeError, ImportError) as error:  # vLLM calls this at each start, with any method
        logger.error("vllm-specplugins does not support this vLLM (%s); vLLM runs without it.", error)
        return
    if fallback.is_disabled():
        wrap(EngineArgs, "create_engine_config", _without_ours)
        return
    wrap(EngineArgs, "create_speculative_config", _speculative_config)
    wrap(EngineArgs, "create_engine_config", _engine_config)


def requested(args: Any) -> dict[str, Any] | None:
    """Returns the `speculative_config` of EngineArgs, with --spec-* flags, if it names a method of the plugin,
    otherwise None. Raises ConfigError for a method that neither the plugin nor vLLM has, and for a key that is set
    twice."""
    raw = args.speculative_config
    if raw is not None and not isinstance(raw, Mapping):
        return None
    written: dict[Any, Any] = {}
    for key in raw or {}:
        name = key.replace("-", "_") if isinstance(key, str) else key
        if (other := written.setdefault(name, key)) != key:
            raise ConfigError(f"speculative_config: {name} is set twice, as {other!r} and as {key!r}; remove one.")
    merged = {name: (raw or {})[key] for name, key in written.items()}
    flags = {"method": args.spec_method, "model": args.spec_model, "num_speculative_tokens": args.spec_tokens}
    given = {key: value for key, value in flags.items() if value is not None}
    method = given.get("method", merged.get("method"))
    if method is None:
        return None
    registered = registrations((*METHODS, *vllm_methods()))
    for refusal in filter(None, (entry.refusal for entry in registered)):
        logger.error("vllm-specplugins: %s", refusal)
    if method in vllm_methods() and not (method in METHODS and METHODS[method].our_field in merged):
        return None
    names = (*METHODS, *(entry.name for entry in registered if entry.refusal is None))
    if not isinstance(method, str) or method not in names:
        hint = did_you_mean(method, [*names, *map(str, vllm_methods())])
        raise ConfigError(
            f"speculative_config: method must be {', '.join(names)} or one of vLLM's, not {brief(method)}{hint}"
        )
    for key in given.keys() & merged.keys():
        raise ConfigError(f"speculative_config: {key} is set twice, in the JSON and as a flag; remove one.")
    return {**merged, **given}


def _speculative_config(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    build = getattr(self, "_specplugins_build", None)
    return original(self, *args, **kwargs) if build is None else build(*args, **kwargs)


def _engine_config(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with sentence_instead_of_traceback():
        raw = requested(self)
        if raw is None:
            return original(self, *args, **kwargs)
        config = parse_config(raw)
        try:
            compat.check_installed()
            if version := compat.untested_version():
                fallback.check_choice(f"vllm-specplugins was tested with vLLM {compat.SUPPORTED}, not {version}")
            vllm_config = _with_method(config, original, self, *args, **kwargs)
        except compat.NotSupportedError as error:
            problem = f"vllm-specplugins does not support this vLLM ({error})"
            fallback.check_choice(problem)
            return fallback.serve_without_us(raw, problem, original, self, *args, **kwargs)
        if version:
            words = "vllm-specplugins was tested with vLLM %s, not %s. It drafts, because all names that it uses exist."
            logger.warning(words, compat.SUPPORTED, version)
        return vllm_config


def _without_ours(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        raw = requested(self)
    except ConfigError:  # an unknown method
        raw = None
    if raw is None:
        return original(self, *args, **kwargs)
    reason = "VLLM_SPECPLUGINS_DISABLE is set"
    return fallback.serve_without_us(raw, reason, original, self, *args, **kwargs)


def _with_method(
    config: SpecConfig, original: Any, engine_args: Any, usage_context: Any = None, *args: Any, **kwargs: Any
) -> Any:
    from vllm_specplugins.engine import trees
    from vllm_specplugins.engine.frontend import entrances, scheduling, spec_config

    scheduling.give_time(config)
    asked = engine_args.async_scheduling
    wanted = wanted_schedule(config, asked, engine_args.pipeline_parallel_size)
    build = partial(spec_config.build, config, engine_args, usage_context)
    ours = {"_specplugins_build": build, "async_scheduling": wanted} | trees.backend(config, engine_args)
    with replaced(engine_args, ours), scheduling.may_be_asynchronous(config.method):
        vllm_config = original(engine_args, usage_context, *args, **kwargs)
    compat.check_installed("v2" if vllm_config.use_v2_model_runner else "v1")
    trees.check_trees(vllm_config)
    spec_config.take_over(vllm_config, asked)
    if (shorter := scheduling.fitting(vllm_config)) is not None:
        return _with_method(shorter, original, engine_args, usage_context, *args, **kwargs)
    entrances.check_front_end(vllm_config)
    if vllm_config.use_v2_model_runner:
        from vllm_specplugins.engine.self_check import stop_if_only

        stop_if_only(vllm_config)
    return vllm_config
