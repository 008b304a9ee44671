"""Collects what the sources below engine/ use of vLLM, and writes it down with the parameters of functions.

    python tests/engine/vllm_names.py [FOLDER]...

writes `engine/vllm_api/vllm_names.json` from the installed vLLM. A FOLDER is the package of another version that is
looked at, too: what one lacks is refused, and so are parameters that differ, but for VARIED.

It sees imports, names in strings, attributes of what RECEIVERS knows by its name, and what our subclasses take from
vLLM's classes or override. Where it knows neither the object nor the attribute, it asks for an entry in RECEIVERS. It
does not see: `getattr` with a name in a string, and attributes of an object that RECEIVERS does not
know, if something of ours, of Python, PyTorch or NumPy has an attribute of that name, too. These stand in UNSEEN.
"""

import ast
import asyncio
import importlib
import json
import multiprocessing
import os
import re
import sys
import types
from collections import deque, namedtuple
from collections.abc import Iterable, Iterator
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
import psutil  # type: ignore[import-untyped]
import torch
from llguidance import LLMatcher, LLTokenizer
from pydantic import ValidationError
from torch import distributed
from xgrammar import GrammarMatcher

from vllm_specplugins.engine.vllm_api import compat

NO_MODULES = ("vllm.specplugins", "vllm.general_plugins")  # a logger, a group of entry points
PACKAGE = Path(__file__).parents[2] / "vllm_specplugins"
ENGINE = PACKAGE / "engine"
Name = tuple[str, str]  # a file below vLLM's folder; "function", "Class.member" or a module's global name

# The name of a variable or an attribute, as it ends -> classes of vLLM whose objects it stands for, or a module.
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
    "EngineArgs()": "EngineArgs",
    "args": "EngineArgs",
    "array": "UvaBackedTensor",
    "attention_config": "AttentionConfig",
    "aux_output_config": "AuxOutputConfig",
    "backend": "AttentionBackendEnum AttentionBackend StructuredOutputBackend",
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
    "envs": "envs.py",
    "RequestOutputKind": "RequestOutputKind",
    "scheduler_stats": "SchedulerStats",
    "config": "VllmConfig ModelConfig SpeculativeConfig",
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
    "cut": "LlamaModel compilation/decorators.py",
    "engine_args": "EngineArgs",
    "grammar": "XgrammarGrammar GuidanceGrammar",
    "draft_token_ids": "DraftTokenIds",
    "structured_outputs": "StructuredOutputManager",
    "structured_output_manager": "StructuredOutputManager",
    "structured_output_request": "StructuredOutputRequest",
    "get_class()": "AttentionBackend",
    "get_tp_group()": "GroupCoordinator",
    "pp_group": "GroupCoordinator",
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
    "buffer_utils": "v1/worker/gpu/buffer_utils.py",
    "scheduled": "SchedulerOutput",
    "mine": "SamplingParams",
    "model": "ModelConfig LlamaForCausalLM",
    "model_config": "ModelConfig",
    "model_runner": "GPUModelRunner v1/worker/gpu/model_runner.py",
    "models": "_ModelRegistry",
    "new": "NewRequestData",
    "output": "AsyncOutput CompletionOutput",
    "parallel": "ParallelConfig",
    "parallel_config": "ParallelConfig",
    "params": "SamplingParams",
    "penalties": "PenaltiesState",
    "processor": " ".join(f"{kind}LogitsProcessor" for kind in ("Adapter", "", "MinP", "LogitBias", "MinTokens")),
    "registry": "_ModelRegistry",
    "rejection_sampler": "v1/sample/rejection_sampler.py RejectionSampler",
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
    "step": "ExecuteModelState",
    "theirs": "SpeculativeConfig DraftModelSpeculator PrometheusStatLogger SpecDecodingProm",
    "thinking_budget_state": "ThinkingBudgetState",
    "vllm_config": "VllmConfig",
    "vllm_config_module": "config/vllm.py",
    "gpu_model_runner": "v1/worker/gpu_model_runner.py",
    "dispatcher": "triton_utils/dispatcher.py",
}
# Where the classes stand that RECEIVERS names.
FILES: dict[str, str] = {
    "compilation/wrapper.py": "TorchCompileWithNoGuardsWrapper",
    "config/attention.py": "AttentionConfig",
    "config/aux_output.py": "AuxOutputConfig",
    "config/compilation.py": "CUDAGraphMode CompilationConfig",
    "config/model.py": "ModelConfig",
    "config/parallel.py": "ParallelConfig",
    "config/scheduler.py": "SchedulerConfig",
    "config/speculative.py": "SpeculativeConfig",
    "config/vllm.py": "VllmConfig",
    "distributed/ec_transfer/ec_connector/metrics.py": "ECConnectorStats",
    "distributed/parallel_state.py": "GroupCoordinator",
    "engine/arg_utils.py": "EngineArgs",
    "entrypoints/llm.py": "LLM",
    "entrypoints/openai/chat_completion/protocol.py": "ChatCompletionRequest",
    "model_executor/layers/logits_processor.py": "LogitsProcessor",
    "model_executor/models/interfaces.py": "SupportsEagle3",
    "model_executor/models/llama.py": "LlamaForCausalLM LlamaModel",
    "model_executor/models/registry.py": "_LazyRegisteredModel _ModelRegistry",
    "outputs.py": "CompletionOutput RequestOutput",
    "platforms/interface.py": "Platform",
    "sampling_params.py": "RequestOutputKind SamplingParams",
    "v1/attention/backend.py": "AttentionBackend AttentionMetadataBuilder CommonAttentionMetadata",
    "v1/attention/backends/registry.py": "AttentionBackendEnum",
    "v1/core/sched/async_scheduler.py": "AsyncScheduler",
    "v1/core/sched/output.py": "NewRequestData SchedulerOutput",
    "v1/core/sched/scheduler.py": "Scheduler",
    "v1/engine/__init__.py": "EngineCoreRequest",
    "v1/engine/async_llm.py": "AsyncLLM",
    "v1/engine/input_processor.py": "InputProcessor",
    "v1/engine/llm_engine.py": "LLMEngine",
    "v1/kv_cache_interface.py": "KVCacheConfig",
    "v1/metrics/loggers.py": "PrometheusStatLogger StatLoggerManager",
    "v1/metrics/reader.py": "Counter Metric",
    "v1/metrics/stats.py": "SchedulerStats",
    "v1/outputs.py": "DraftTokenIds ECConnectorOutput ModelRunnerOutput",
    "v1/request.py": "Request",
    "v1/sample/logits_processor/__init__.py": "AdapterLogitsProcessor",
    "v1/sample/logits_processor/builtin.py": "LogitBiasLogitsProcessor MinPLogitsProcessor MinTokensLogitsProcessor",
    "v1/sample/logits_processor/interface.py": "LogitsProcessor",
    "v1/sample/logits_processor/state.py": "LogitsProcessors",
    "v1/sample/metadata.py": "SamplingMetadata",
    "v1/sample/sampler.py": "Sampler",
    "v1/sample/thinking_budget_state.py": "ThinkingBudgetStateHolder",
    "v1/spec_decode/llm_base_proposer.py": "SpecDecodeBaseProposer",
    "v1/spec_decode/metadata.py": "SpecDecodeMetadata",
    "v1/structured_output/__init__.py": "StructuredOutputManager",
    "v1/structured_output/backend_guidance.py": "GuidanceGrammar",
    "v1/structured_output/backend_xgrammar.py": "XgrammarGrammar",
    "v1/structured_output/backend_types.py": "StructuredOutputBackend",
    "v1/structured_output/request.py": "StructuredOutputRequest",
    "v1/worker/block_table.py": "BlockTable",
    "v1/worker/cpu_worker.py": "CPUWorker",
    "v1/worker/gpu/async_utils.py": "AsyncOutput",
    "v1/worker/gpu/block_table.py": "BlockTables",
    "v1/worker/gpu/buffer_utils.py": "StagedWriteTensor UvaBackedTensor UvaBuffer",
    "v1/worker/gpu/cudagraph_utils.py": "BatchExecutionDescriptor CudaGraphManager",
    "v1/worker/gpu/input_batch.py": "InputBatch InputBuffers",
    "v1/worker/gpu/lora_utils.py": "LoraState",
    "v1/worker/gpu/model_runner.py": "ExecuteModelState GPUModelRunner",
    "v1/worker/gpu/model_states/interface.py": "ModelState",
    "v1/worker/gpu/sample/bad_words.py": "BadWordsState",
    "v1/worker/gpu/sample/logit_bias.py": "LogitBiasState",
    "v1/worker/gpu/sample/logits_processor/interface.py": "LogitsContext LogitsProcRequestState LogitsProcessor",
    "v1/worker/gpu/sample/logprob.py": "LogprobTokenIdsState",
    "v1/worker/gpu/sample/output.py": "SamplerOutput",
    "v1/worker/gpu/sample/penalties.py": "PenaltiesState",
    "v1/worker/gpu/sample/sampler.py": "Sampler",
    "v1/worker/gpu/sample/states.py": "SamplingStates",
    "v1/worker/gpu/sample/thinking_budget.py": "ThinkingBudgetState",
    "v1/worker/gpu/spec_decode/adaptive_verification.py": "AdaptiveVerificationManager",
    "v1/worker/gpu/spec_decode/rejection_sampler.py": "RejectionSampler",
    "v1/worker/gpu/spec_decode/speculator.py": "BaseSpeculator DraftModelSpeculator",
    "v1/worker/gpu/spec_decode/target_dependent_ar/cudagraph_utils.py": "SpeculatorCudaGraphManager",
    "v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py": "TargetDependentARSpeculator",
    "v1/worker/gpu/spec_decode/utils.py": "DraftTokensHandler",
    "v1/worker/gpu/states.py": "RequestState",
    "v1/worker/gpu_input_batch.py": "CachedRequestState InputBatch",
    "v1/worker/gpu_model_runner.py": "GPUModelRunner",
    "v1/worker/gpu_worker.py": "Worker",
    "v1/worker/lora_model_runner_mixin.py": "LoRAModelRunnerMixin",
    "v1/worker/utils.py": "AttentionGroup",
}
# Attributes that are vLLM's wherever they stand.
_SET_BY_US = frozenset({"adapter", "specplugins", "aux_hidden_state_layers"})  # on objects of vLLM's
ATTRIBUTES = {"gpu": "UvaBackedTensor StagedWriteTensor", "np": "UvaBackedTensor UvaBuffer CpuGpuBuffer"}
_OF_PYTHON = (
    *(
        str,
        bytes,
        int,
        float,
        list,
        dict,
        set,
        tuple,
        type,
        property,
        BaseException,
        UnicodeDecodeError,
        types.FunctionType,
        os.stat_result,
        psutil.virtual_memory(),
    ),
    *(types.CodeType, types.ModuleType, types.FrameType, Path, re.Pattern, ast.AST, ast.Name, ast.Attribute, ast.alias),
    *(ast.FunctionDef, ast.ImportFrom, ast.ClassDef, ast.arguments, ast.arg, ast.Module, asyncio.AbstractEventLoop),
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
        LLMatcher,
        LLTokenizer,
        GrammarMatcher,
    ),
)


class Use(NamedTuple):
    """One place that uses something of vLLM's; `names` are empty where nobody knows what it is."""

    where: str
    text: str
    names: tuple[Name, ...]
    is_replaced: bool = False


def main(folders: list[str]) -> None:
    packages = [installed(), *map(Path, folders)]
    compat.NAMES_FILE.write_text(json.dumps(described(names(), packages), indent=1) + "\n")


def names() -> set[Name]:
    """All that is used, and all that is replaced."""
    seen = {name for use in uses() for name in use.names}
    replaced = {(record.file, name) for record in compat.replaced() for name in record.names}
    return seen | replaced | {(file, name) for file, unseen in UNSEEN.items() for name in unseen.split()}


def described(names: Iterable[Name], packages: list[Path]) -> dict[str, dict[str, str | None]]:
    """File -> name -> its parameters: None of what is no function in one of the versions, and of VARIED."""
    result: dict[str, dict[str, str | None]] = {}
    for file, name in sorted(names):
        found = [compat.find(_parsed(package / file), name) for package in packages]
        if None in found:
            raise SystemExit(f"{packages[found.index(None)] / file}: {name} is missing")
        signatures = {compat.parameters_of(node) for node in found if node is not None}
        if None in signatures or (file, name) in VARIED:
            signatures = {None}
        if len(signatures) > 1:
            raise SystemExit(f"{file}: {name} takes {' or '.join(map(str, signatures))}: VARIED must name it")
        result.setdefault(file, {})[name] = signatures.pop()
    return result


UNSEEN: dict[str, str] = {
    "compilation/decorators.py": "_model_hash_key do_not_compile",
    "compilation/wrapper.py": "TorchCompileWithNoGuardsWrapper.__init__",
    "config/vllm.py": "set_current_vllm_config",
    "distributed/ec_transfer/ec_connector/metrics.py": "ECConnectorStats.data",
    "model_executor/models/llama.py": (
        "LlamaForCausalLM.model LlamaForCausalLM.lm_head LlamaForCausalLM.logits_processor"
    ),
    "model_executor/models/registry.py": "_LazyRegisteredModel.module_name",
    "sampling_params.py": "SamplingParams.min_p SamplingParams.logit_bias",
    "v1/attention/backend.py": (
        "AttentionMetadataBuilder.build AttentionMetadataBuilder.supports_draft_decode_metadata_update "
        "AttentionMetadataBuilder.update_draft_decode_metadata CommonAttentionMetadata.seq_lens_cpu_upper_bound"
    ),
    "v1/core/sched/scheduler.py": "Scheduler.dynamic_sd_lookup Scheduler.vllm_config",
    "v1/engine/async_llm.py": "AsyncLLM.input_processor",
    "v1/engine/input_processor.py": "InputProcessor.tokenizer",
    "v1/metrics/loggers.py": "StatLoggerManager.stat_loggers",
    "v1/outputs.py": "DraftTokenIds.draft_token_ids",
    "v1/spec_decode/llm_base_proposer.py": "SpecDecodeBaseProposer.prepare_next_token_ids_padded",
    "v1/worker/gpu/cudagraph_utils.py": "CudaGraphManager.__init__",
    "v1/worker/gpu/model_runner.py": "GPUModelRunner.req_states",
    "v1/worker/gpu/spec_decode/speculator.py": "DraftModelSpeculator._maybe_predict_acceptance",
}


# Functions whose parameters differ between the versions that we support.
VARIED = {("v1/worker/gpu/dp_utils.py", "dispatch_cg_and_sync_dp")}


@cache
def installed() -> Path:
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def uses() -> Iterator[Use]:
    """All that is used, file by file."""
    known = known_attributes()
    for path in sorted(ENGINE.rglob("*.py")):
        yield from uses_in(path, ast.parse(path.read_text()), known)


def uses_in(path: Path, module: ast.Module, known: set[str]) -> Iterator[Use]:
    modules = {alias.asname or alias.name for node in ast.walk(module) for alias in _imported_modules(node)}
    imported, runner = _imported(module), path.relative_to(ENGINE).parts[0]
    for node in ast.walk(module):
        where = f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"
        match node:
            case ast.ImportFrom(module=str(source)) if (file := _file(source)) is not None:
                for alias in node.names:
                    if not _is_module(f"{source}.{alias.name}"):
                        yield Use(where, f"from {source} import {alias.name}", ((file, alias.name),))
            case ast.Constant(value=str(text)) if re.fullmatch(r"vllm(\.\w+)+", text) and text not in NO_MODULES:
                source, _, name = text.rpartition(".")
                if _file(text) is None and (file := _file(source)) is not None:
                    yield Use(where, text, ((file, name),))
            case ast.ClassDef():
                yield from _inherited(where, node, imported)
            case ast.Call(func=ast.Name(id=name)) if name in imported:
                members = _members(imported[name], name)
                given = [keyword.arg for keyword in node.keywords if keyword.arg in members]
                yield from (Use(where, f"{name}({member}=)", (members[member],)) for member in given)
            case ast.Attribute():
                receiver = _last_name(node.value)
                if receiver is None or receiver in modules - RECEIVERS.keys() or receiver in ("self", "super()"):
                    continue
                owners = ATTRIBUTES.get(node.attr) or RECEIVERS.get(receiver)
                names = _owned(owners.split(), node.attr, runner) if owners is not None else ()
                if names or node.attr not in known:
                    yield Use(where, f"{receiver}.{node.attr}", names, isinstance(node.ctx, ast.Store))


def _imported(module: ast.Module) -> dict[str, str]:
    """Names of vLLM's -> the file that they are imported from."""
    return {
        alias.asname or alias.name: file
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and not node.level and (file := _file(node.module or "")) is not None
        for alias in node.names
    }


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


def _inherited(where: str, ours: ast.ClassDef, imported: dict[str, str]) -> Iterator[Use]:
    """What a subclass of ours takes from vLLM's classes: members that it overrides, reads or sets."""
    bases = [base.id for base in ours.bases if isinstance(base, ast.Name) and base.id in imported]
    members = {name: found for base in bases for name, found in _members(imported[base], base).items()}
    replaced = {node.name for node in ours.body if isinstance(node, ast.FunctionDef)}
    used = {
        node.attr
        for node in ast.walk(ours)
        if isinstance(node, ast.Attribute) and _last_name(node.value) in ("self", "super()")
    }
    for name in sorted((used | replaced) & members.keys()):
        yield Use(where, f"{ours.name}.{name}", (members[name],), name in replaced)


@cache
def _members(file: str, name: str) -> dict[str, Name]:
    """Member -> where it is bound, of a class of vLLM's and of its bases."""
    source = _parsed(installed() / file)
    imports = {name: (found, name) for name, found in _imported(source).items()}
    classes = {node.name: node for node in source.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        return _members(*imports[name]) if name in imports else {}
    members: dict[str, Name] = {}
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and (base.id in classes or base.id in imports):
            members |= _members(*((file, base.id) if base.id in classes else imports[base.id]))
    for node in classes[name].body:
        match node:
            case ast.FunctionDef(name=member) | ast.AnnAssign(target=ast.Name(id=member)):
                members[member] = (file, f"{name}.{member}")
            case ast.Assign(targets=targets):
                bound = [target.id for target in targets if isinstance(target, ast.Name)]
                members |= {member: (file, f"{name}.{member}") for member in bound}
    for node in ast.walk(classes[name]):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _last_name(node.value) == "self":
            members[node.attr] = (file, f"{name}.{node.attr}")
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


def _owned(owners: list[str], attribute: str, runner: str) -> tuple[Name, ...]:
    """What an attribute may be; nothing if no class of `owners` has it, and no module."""
    found: list[Name] = []
    for owner in owners:
        if owner.endswith(".py"):  # what no class has
            is_bound = compat.find(_parsed(installed() / owner), attribute) is not None
            found += [(owner, attribute)] if is_bound and not found else []
            continue
        classes = [_members(file, owner) for file in _files_of(owner, runner)]
        found += [members[attribute] for members in classes if attribute in members]
    return tuple(found)


def _files_of(owner: str, runner: str) -> list[str]:
    """Classes of one name: what our code for one of the runners uses is that runner's."""
    files = [file for file, classes in FILES.items() if owner in classes.split()]
    own = [file for file in files if file.startswith("v1/worker/gpu/") == (runner == "v2")]
    return own if own and runner in ("v1", "v2") else files


def _file(module: str) -> str | None:
    """A module of vLLM's -> its file, below vLLM's folder."""
    package, *parts = module.split(".")
    if package != "vllm":
        return None
    stem = "/".join(parts)
    names = [f"{stem}.py", f"{stem}/__init__.py"] if parts else ["__init__.py"]
    return next((name for name in names if (installed() / name).is_file()), None)


def _is_module(name: str) -> bool:
    if name.split(".")[0] == "vllm":
        return _file(name) is not None
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, AttributeError):
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
