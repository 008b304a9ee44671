"""Proposers of the user's own, and of other packages: how they are found, asked what they want, and built."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from vllm_specplugins.config import ConfigError, CustomConfig, SpecConfig, brief, error_text, stage_configs
from vllm_specplugins.draft import PROTOCOL_VERSION, Proposer, ProposerContext
from vllm_specplugins.isolation.guard import cause_text


def build_custom(method: str, config: CustomConfig, context: ProposerContext) -> Proposer:
    """A proposer of the user's own, which has no part in what ranks tell each other."""
    build = import_object(config.proposer, method)
    options = getattr(config, "settings", config.options)
    try:
        proposer: Proposer = build(options, replace(context, num_ranks=1, rank=0, agreed=lambda value: value))
        missing = [name for name in ("propose", "observe", "forget") if not callable(getattr(proposer, name, None))]
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(f"{method}: proposer {config.proposer!r} cannot be built ({cause_text(error)}).") from error
    if missing:
        raise ConfigError(f"{method}: proposer {config.proposer!r} has no method {', '.join(missing)}.")
    return proposer


def option_checks(config: SpecConfig) -> list[Callable[[Mapping[str, Any]], None]]:
    """`check_options` of the user's own proposers in a method: it raises ValueError for options that it refuses."""
    found = [check_of(part.proposer, config.method) for part in stage_configs(config, CustomConfig)]
    return [check for check in found if check is not None]


def check_of(path: str, method: str) -> Callable[[Mapping[str, Any]], None] | None:
    check: Callable[[Mapping[str, Any]], None] | None
    check = attribute(import_object(path, method), "check_options", method)
    if check is not None and not callable(check):
        raise ConfigError(f"{method}: check_options of {path} must be a function, not {brief(check)}.")
    return check


def attribute(found: Any, name: str, method: str, default: Any = None) -> Any:
    """An attribute of a class of the user's own, whose metaclass may raise anything."""
    try:
        return getattr(found, name, default)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(f"{method}: {name} of the proposer cannot be read ({error_text(error)}).") from error


def import_object(path: str, method: str = "custom") -> Callable[..., Any]:
    """The class or function at "package.module:name", for this method.

    Raises:
        ConfigError: it is not there, its module raises or exits, or it cannot be called or follows another protocol.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the module does, SystemExit included
        cause = f"{type(error).__name__}: {error_text(error)}"
        hint = "; PYTHONPATH=. lets it be found in the current folder" if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"{method}: proposer {brief(path)} cannot be imported ({cause}{hint}).") from error
    if not callable(found):
        raise ConfigError(f"{method}: proposer must name a class, or a function that makes one, not {brief(found)}.")
    version = attribute(found, "protocol_version", method, PROTOCOL_VERSION)
    if version != PROTOCOL_VERSION:
        raise ConfigError(
            f"{method}: protocol_version of {path} must be {PROTOCOL_VERSION}, that of vllm_specplugins.draft here, "
            f"not {brief(version)}."
        )
    return found  # type: ignore[no-any-return]


def reads_likeliest(config: SpecConfig) -> bool:
    """Whether a proposer of the user's own asks for `DraftBatch.likeliest`: its class has `reads_likeliest = True`."""
    found = [import_object(part.proposer, config.method) for part in stage_configs(config, CustomConfig)]
    return any(attribute(its, "reads_likeliest", config.method) is True for its in found)
