"""Collects what the sources below engine/ use of vLLM, to be held against the lists of seams.

It sees imports, names in strings, attributes of what RECEIVERS knows by its name, and what our subclasses take from
vLLM's classes or override. Where it knows neither the object nor the attribute, it asks for an entry in RECEIVERS. It
does not see: `getattr` with a name in a string, keyword arguments, and attributes of an object that RECEIVERS does not
know, if something of ours, of Python, PyTorch or NumPy has an attribute of that name, too.
"""

import ast
import importlib
import multiprocessing
import re
import types
from collections import deque, namedtuple
from collections.abc import Iterator
from concurrent.futures import Future
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from io import IOBase
from logging import Logger
from multiprocessing import Process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import prometheus_client
import torch
from pydantic import ValidationError
from torch import distributed

from vllm_specplugins.engine.versions import compat

NO_MODULES = ("vllm.specplugins", "vllm.general_plugins")  # a logger, a group of entry points
PACKAGE = Path(__file__).parents[2] / "vllm_specplugins"
ENGINE = PACKAGE / "engine"

# The name of a variable or an attribute, as it ends -> classes of vLLM whose objects it stands for.
RECEIVERS: dict[str, str] = {
    "SamplingParams": "SamplingParams",
    "_config": "SpeculativeConfig",
    "_graphs": "SpeculatorCudaGraphManager CudaGraphManager",
    "graphs": "CudaGraphManager",
    "_llm": "LLM",
    "_model_config": "ModelConfig",
    "_stale_confidences[]": "CpuGpuBuffer",
    "_req_states": "RequestState",
    "_runner": "GPUModelRunner LoRAModelRunnerMixin",
    "_sampler": "Sampler",
    "_speculator": "DraftModelSpeculator",
    "CUDAGraphMode": "CUDAGraphMode",
    "ChatCompletionRequest": "ChatCompletionRequest",
    "EngineArgs": "EngineArgs",
    "args": "EngineArgs",
    "array": "UvaBackedTensor",
    "attention_config": "AttentionConfig",
    "aux_output_config": "AuxOutputConfig",
    "backend": "AttentionBackendEnum AttentionBackend",
    "bad_words": "BadWordsState",
    "batch": "InputBatch BatchExecutionDescriptor",
    "bias": "LogitBiasState",
    "_bias": "LogitBiasState",
    "_target": "LlamaForCausalLM SupportsEagle3",
    "common": "CommonAttentionMetadata",
    "compilation_config": "CompilationConfig",
    "carrier": "ModelRunnerOutput",
    "current_platform": "Platform",
    "engine": "LLMEngine",
    "envs": "",
    "RequestOutputKind": "RequestOutputKind",
    "scheduler_stats": "SchedulerStats",
    "config": "VllmConfig ModelConfig",
    "metric": "Counter",
    "outputs[]": "RequestOutput",
    "core_request": "EngineCoreRequest",
    "request": "Request CachedRequestState",
    "requests[]": "CachedRequestState",
    "result": "RequestOutput SpeculativeConfig",
    "state": "LogitsProcessor ModelState LogprobTokenIdsState LoraState",
    "tables[]": "BlockTable",
    "target_model_config": "ModelConfig",
    "block_tables": "BlockTables",
    "_body": "LlamaModel",
    "body": "LlamaModel",
    "buffers": "InputBuffers",
    "context": "LogitsContext",
    "cudagraph_mode": "CUDAGraphMode",
    "cut": "LlamaModel",
    "engine_args": "EngineArgs",
    "get_class()": "AttentionBackend",
    "get_tp_group()": "GroupCoordinator",
    "group": "AttentionGroup GroupCoordinator KVCacheGroupSpec",
    "holder": "ThinkingBudgetStateHolder",
    "input_batch": "InputBatch",
    "kv_cache_config": "KVCacheConfig",
    "llm": "LLM",
    "lora_state": "LoraState",
    "llm_engine": "LLMEngine",
    "logitsprocs": "LogitsProcessors",
    "metadata": "SamplingMetadata",
    "manager": "AdaptiveVerificationManager",
    "_manager": "AdaptiveVerificationManager",
    "buffer": "UvaBuffer",
    "buffer_utils": "UvaBuffer is_uva_available",
    "scheduled": "SchedulerOutput",
    "mine": "SamplingParams",
    "model": "ModelConfig LlamaForCausalLM",
    "model_config": "ModelConfig",
    "model_runner": "GPUModelRunner maybe_create_adaptive_verification_manager",
    "models": "_ModelRegistry",
    "new": "NewRequestData",
    "output": "AsyncOutput CompletionOutput",
    "parallel": "ParallelConfig",
    "parallel_config": "ParallelConfig",
    "params": "SamplingParams",
    "penalties": "PenaltiesState",
    "processor": " ".join(f"{kind}LogitsProcessor" for kind in ("Adapter", "", "MinP", "LogitBias", "MinTokens")),
    "registry": "_ModelRegistry",
    "rejection_sampler": "",  # the module
    "req_states": "RequestState LogitsProcRequestState",
    "runner": "GPUModelRunner LoRAModelRunnerMixin",
    "sampler": "Sampler RejectionSampler",
    "sampling_metadata": "SamplingMetadata",
    "sampling_params": "SamplingParams",
    "sampling_states": "SamplingStates",
    "scheduler": "SchedulerConfig",
    "scheduler_config": "SchedulerConfig",
    "scheduler_output": "SchedulerOutput",
    "spec_decode_metadata": "SpecDecodeMetadata",
    "speculative_config": "SpeculativeConfig",
    "speculator": "DraftModelSpeculator",
    "states": "SamplingStates",
    "theirs": "SpeculativeConfig DraftModelSpeculator PrometheusStatLogger SpecDecodingProm",
    "thinking_budget_state": "ThinkingBudgetState",
    "vllm_config": "VllmConfig",
    "vllm_config_module": "",
    "gpu_model_runner": "",
    "dispatcher": "",
}
# Attributes that are vLLM's wherever they stand.
_SET_BY_US = frozenset({"adapter", "specplugins", "aux_hidden_state_layers"})  # on objects of vLLM's
ATTRIBUTES = {"gpu": "UvaBackedTensor StagedWriteTensor", "np": "UvaBackedTensor CpuGpuBuffer"}
_OF_PYTHON = (
    *(str, bytes, int, float, list, dict, set, tuple, type, property, BaseException, types.FunctionType),
    *(types.CodeType, types.ModuleType, types.FrameType, Path, re.Pattern, ast.AST, ast.Name, ast.Attribute, ast.alias),
    *(ast.FunctionDef, ast.ImportFrom, ast.ClassDef, ast.arguments, ast.arg, ast.Module),
    *(
        Connection,
        Process,
        ModuleSpec("", None),
        Logger,
        IOBase,
        ast.Constant,
        multiprocessing,
        torch.cuda,
        torch.cuda.Event,
    ),
    *(
        Future,
        deque,
        distributed,
        prometheus_client.Gauge,
        prometheus_client.Counter,
        np.ufunc,
        np.random,
        np.random.Generator,
        ValidationError,
        namedtuple("A", ""),
        ast.keyword,
        ast.stmt,
        ast.Store,
    ),
    *(
        torch.cuda,
        torch.cuda.Event,
        torch.Tensor,
        torch.nn.Module(),
        torch.device,
        torch.dtype,
        torch.Generator,
        np.ndarray,
        np.generic,
    ),
)


class Use(NamedTuple):
    """`names`: those of seams of which one must be there; empty: nobody knows what this is."""

    where: str
    text: str
    names: tuple[str, ...]


def uses() -> Iterator[Use]:
    """All that is used, file by file."""
    known = known_attributes()
    for path in sorted(ENGINE.rglob("*.py")):
        yield from uses_in(path, ast.parse(path.read_text()), known)


def uses_in(path: Path, module: ast.Module, known: set[str]) -> Iterator[Use]:
    modules = {alias.asname or alias.name for node in ast.walk(module) for alias in _imported_modules(node)}
    for node in ast.walk(module):
        where = f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"
        match node:
            case ast.ImportFrom(module=str(source)) if source.split(".")[0] == "vllm":
                for alias in node.names:
                    if not _is_module(f"{source}.{alias.name}"):
                        yield Use(where, f"from {source} import {alias.name}", (alias.name,))
            case ast.Constant(value=str(text)) if re.fullmatch(r"vllm(\.\w+)+", text) and text not in NO_MODULES:
                if not _is_module(text) and _is_module(text.rpartition(".")[0]):
                    yield Use(where, text, (text.rpartition(".")[2],))
            case ast.ClassDef():
                yield from _inherited(where, node, module)
            case ast.Attribute():
                receiver = _last_name(node.value)
                if receiver is None or receiver in modules - RECEIVERS.keys() or receiver in ("self", "super()"):
                    continue
                owners = ATTRIBUTES.get(node.attr) or RECEIVERS.get(receiver)
                names = _owned(owners.split(), node.attr) if owners is not None else ()
                if names or node.attr not in known:
                    yield Use(where, f"{receiver}.{node.attr}", names)


def _imported_modules(node: ast.AST) -> list[ast.alias]:
    """Modules other than vLLM's; of those that `from` imports it is enough to know the ones used as such."""
    if isinstance(node, ast.Import):
        return [alias for alias in node.names if alias.name.split(".")[0] != "vllm"]
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] != "vllm":
        return [alias for alias in node.names if _is_module(f"{node.module}.{alias.name}")]
    return []


def _last_name(node: ast.expr) -> str | None:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return f"{name}()"
        case ast.Subscript(value=value):
            name = _last_name(value)
            return name and f"{name}[]"
    return None


def _inherited(where: str, ours: ast.ClassDef, module: ast.Module) -> Iterator[Use]:
    """What a subclass of ours takes from vLLM's classes: members that it overrides, reads or sets."""
    imported = {
        alias.asname or alias.name: node.module
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }
    bases = [base.id for base in ours.bases if isinstance(base, ast.Name) and base.id in imported]
    if not bases:
        return
    members = {name: owner for base in bases for name, owner in _members(imported[base] or "", base).items()}
    used = {node.name for node in ours.body if isinstance(node, ast.FunctionDef)}
    used |= {
        node.attr
        for node in ast.walk(ours)
        if isinstance(node, ast.Attribute) and _last_name(node.value) in ("self", "super()")
    }
    for name in sorted(used & members.keys()):
        yield Use(where, f"{ours.name}.{name}", (f"{members[name]}.{name}",))


@cache
def _members(module: str, name: str) -> dict[str, str]:
    """Member -> the class that binds it, of a class of vLLM's and of its bases."""
    path = _path(module)
    if path is None:
        return {}
    source = ast.parse(path.read_text())
    imports = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    }
    classes = {node.name: node for node in source.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        return _members(*imports[name]) if name in imports and imports[name][0].startswith("vllm") else {}
    members: dict[str, str] = {}
    for base in classes[name].bases:
        if isinstance(base, ast.Name):
            members |= _members(module if base.id in classes else imports.get(base.id, ("", ""))[0], base.id)
    for node in classes[name].body:
        match node:
            case ast.FunctionDef(name=member) | ast.AnnAssign(target=ast.Name(id=member)):
                members[member] = name
            case ast.Assign(targets=targets):
                members |= {target.id: name for target in targets if isinstance(target, ast.Name)}
    for node in ast.walk(classes[name]):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _last_name(node.value) == "self":
            members[node.attr] = name
    return members


@cache
def _ours() -> frozenset[str]:
    """Names of attributes that classes and functions of ours bind."""
    names: set[str] = set()
    for path in (*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    names.add(name)
                case ast.AnnAssign(target=ast.Name(id=name)):
                    names.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self")):
                    names.add(name)
    return frozenset(names)


def known_attributes() -> set[str]:
    of_syntax = (getattr(kind, "_fields", ()) for kind in vars(ast).values())
    return set(_ours() | _SET_BY_US).union(*(dir(kind) for kind in _OF_PYTHON), *of_syntax)


def _owned(owners: list[str], attribute: str) -> tuple[str, ...]:
    """The names that seams of an attribute may have; none if no class of `owners` has it."""
    found = []
    for owner in owners:
        members = _members_by_name(owner)
        if attribute in members:
            found.append(f"{members[attribute]}.{attribute}")
    return tuple(found) or ((attribute,) if attribute in _top_names() else ())


@cache
def _members_by_name(owner: str) -> dict[str, str]:
    files = {seam.file for seam in compat.SEAMS if seam.name.partition(".")[0] == owner}
    return {
        name: kind
        for file in sorted(files)
        for name, kind in _members("vllm." + file.removesuffix(".py").replace("/", "."), owner).items()
    }


@cache
def _top_names() -> frozenset[str]:
    return frozenset(seam.name for seam in compat.SEAMS if "." not in seam.name)


def _path(module: str) -> Path | None:
    if not module.startswith("vllm"):
        return None
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    stem = Path(spec.submodule_search_locations[0]).joinpath(*module.split(".")[1:])
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


def _is_module(name: str) -> bool:
    if name.split(".")[0] == "vllm":
        return _path(name) is not None
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, AttributeError):
        return False
