"""The entry point: lets vLLM's `--speculative-config` name our methods. It wraps two methods of `EngineArgs`, which
pass calls with other methods to vLLM unchanged; all other changes (vllm_api/replaced.toml) follow a call with ours."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from vllm_specplugins.config import ConfigError, SpecConfig, brief, did_you_mean
from vllm_specplugins.custom import registrations
from vllm_specplugins.engine.frontend.scheduling import vllm_methods
from vllm_specplugins.engine.hooks import replaced, sentence_instead_of_traceback, wrap
from vllm_specplugins.engine.vllm_api import compat
from vllm_specplugins.methods import METHODS
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.plan import wanted_schedule

logger = logging.getLogger("vllm.specplugins")


def install() -> None:
    """Wraps EngineArgs, once per process. With VLLM_SPECPLUGINS_DISABLE=1 it only refuses our methods."""
    try:
        from vllm.engine.arg_utils import EngineArgs

        for name in "create_speculative_config", "create_engine_config":
            getattr(EngineArgs, name)
    except (AttributeError, ImportError) as error:  # vLLM calls this at each start, whatever the method is
        logger.error("vllm-specplugins does not support this vLLM: %s.", error)
        return
    if os.environ.get("VLLM_SPECPLUGINS_DISABLE", "0") not in ("", "0"):
        wrap(EngineArgs, "create_engine_config", _refuse_ours)
        return
    wrap(EngineArgs, "create_speculative_config", _speculative_config)
    wrap(EngineArgs, "create_engine_config", _engine_config)


def requested(args: Any) -> dict[str, Any] | None:
    """The `speculative_config` of EngineArgs, with --spec-* flags, if it names a method of ours, else None. Raises
    ConfigError: neither we nor vLLM know the method, or a key is given twice."""
    raw = args.speculative_config
    if raw is not None and not isinstance(raw, Mapping):
        return None
    written: dict[Any, Any] = {}
    for key in raw or {}:
        name = key.replace("-", "_") if isinstance(key, str) else key
        if (other := written.setdefault(name, key)) != key:
            raise ConfigError(f"speculative_config: {name} is given twice, as {other!r} and as {key!r}.")
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
        raise ConfigError(f"speculative_config: {key} is given twice, in the dictionary and as a flag.")
    return {**merged, **given}


def _speculative_config(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    config = getattr(self, "_specplugins_config", None)
    if config is None:
        return original(self, *args, **kwargs)
    from vllm_specplugins.engine.frontend.spec_config import build

    return build(config, *args, **kwargs)


def _engine_config(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with sentence_instead_of_traceback():
        raw = requested(self)
        if raw is None:
            return original(self, *args, **kwargs)
        config, problems = parse_config(raw), compat.probe_installed()
        if not problems:
            return _with_method(config, original, self, *args, **kwargs)
        logger.error(
            "vllm-specplugins does not support this vLLM (%s); serving without speculative decoding.", problems[0]
        )
        nothing = {"speculative_config": None, "spec_method": None, "spec_model": None, "spec_tokens": None}
        with replaced(self, nothing):
            return original(self, *args, **kwargs)


def _refuse_ours(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    raw = self.speculative_config
    method = self.spec_method or (raw.get("method") if isinstance(raw, Mapping) else None)
    if isinstance(method, str) and method in METHODS and method not in vllm_methods():
        with sentence_instead_of_traceback():
            raise ConfigError(
                f"speculative_config: method must be one of vLLM's while VLLM_SPECPLUGINS_DISABLE is set, not "
                f"{method!r}."
            )
    return original(self, *args, **kwargs)


def _with_method(config: SpecConfig, original: Any, engine_args: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm_specplugins.engine import trees
    from vllm_specplugins.engine.frontend import entrances, scheduling, spec_config

    scheduling.give_time(config)
    asked = engine_args.async_scheduling
    wanted = wanted_schedule(config, asked, engine_args.pipeline_parallel_size)
    ours = {"_specplugins_config": config, "async_scheduling": wanted} | trees.backend(config, engine_args)
    with (
        replaced(engine_args, ours),
        scheduling.may_be_asynchronous(config.method),
    ):
        vllm_config = original(engine_args, *args, **kwargs)
    trees.check_trees(vllm_config)
    spec_config.take_over(vllm_config, asked)
    if (shorter := scheduling.fitting(vllm_config)) is not None:
        return _with_method(shorter, original, engine_args, *args, **kwargs)
    entrances.check_front_end(vllm_config)
    if vllm_config.use_v2_model_runner:
        from vllm_specplugins.engine.self_check import stop_if_only

        stop_if_only(vllm_config)
    return vllm_config
