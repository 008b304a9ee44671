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
import importlib
import importlib.machinery
import json
import multiprocessing
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]
import torch

from vllm_specplugins.engine.vllm_api import compat

NO_MODULES = ("vllm.specplugins", "vllm.general_plugins")  # a logger, a group of entry points
PACKAGE = Path(__file__).parents[2] / "vllm_specplugins"
ENGINE = PACKAGE / "engine"
Name = tuple[str, str]  # a file below vLLM's folder; "function", "Class.member" or a module's global name

# Classes of vLLM, or a module, and the names of variables or attributes, as they end, that stand for their objects;
# a name that is a class's own, as `scheduler_config` is SchedulerConfig's, is not listed.
OBJECTS: dict[str, str] = {
    "AdaptiveVerificationManager": "manager _manager",
    "AsyncOutput CompletionOutput ModelRunnerOutput": "output",
    "AttentionBackend": "get_class()",
    "AttentionBackendEnum AttentionBackend StructuredOutputBackend": "backend",
    "Attention": "layer",
    "AttentionGroup GroupCoordinator KVCacheGroupSpec": "group",
    "BadWordsState": "bad_words",
    "BlockTable": "tables[]",
    "CachedRequestState": "requests[] cached",
    "CommonAttentionMetadata": "common",
    "Counter": "metric",
    "CpuGpuBuffer": "_stale_confidences[]",
    "CudaGraphManager": "graphs",
    "DraftModelSpeculator": "_speculator ours speculator",
    "DeltaFunctionCall": "part last_part",
    "DeltaMessage": "message first second",
    "DeltaToolCall": "call last",
    "EngineArgs": "args",
    "ECConnectorOutput": "sent",
    "EngineCoreOutput": "core_output",
    "EngineCoreRequest": "core_request",
    "IncrementalDetokenizer BaseIncrementalDetokenizer": "detokenizer",
    "InprocClient EngineCore": "engine_core",
    "ExecuteModelState": "step",
    "GPUModelRunner LoRAModelRunnerMixin": "_runner runner",
    "GPUModelRunner v1/worker/gpu/model_runner.py": "model_runner",
    "GroupCoordinator": "_group get_tp_group() pp_group",
    "InputBatch BatchExecutionDescriptor": "batch",
    "InputBuffers": "buffers",
    "LLMEngine": "engine",
    "LlamaForCausalLM SupportsEagle3": "_target",
    "KVConnector": "connector",
    "LlamaModel": "_body body",
    "LlamaModel compilation/decorators.py": "cut",
    "LogitBiasState": "bias _bias",
    "LogitsContext": "context",
    "LogitsProcessor ModelState LogprobTokenIdsState LoraState": "state",
    "LogitsProcessors": "logitsprocs",
    "ModelConfig": "target_model_config",
    "ModelConfig LlamaForCausalLM": "model",
    "ModelRunnerOutput": "carrier",
    "NewRequestData": "new",
    "ParallelConfig": "parallel",
    "Parser ToolParser ReasoningParser": "parser",
    "PenaltiesState": "penalties",
    "Platform": "current_platform",
    "Request": "session",
    "Request CachedRequestState": "request",
    "RequestOutput": "outputs[]",
    "RequestOutput SpeculativeConfig": "result",
    "RequestState": "_req_states",
    "RequestState LogitsProcRequestState": "req_states",
    "Sampler RejectionSampler": "sampler",
    "SamplingMetadata": "metadata",
    "SamplingParams": "mine params",
    "SamplingStates": "states",
    "SchedulerConfig": "scheduler",
    "SchedulerOutput": "scheduled",
    "SpeculativeConfig": "_config",
    "DraftModelSpeculator TargetDependentARSpeculator SpeculativeConfig PrometheusStatLogger "
    "SpecDecodingProm": "theirs vllm_logger",
    "SpeculatorCudaGraphManager CudaGraphManager": "_graphs",
    "StructuredOutputManager": "structured_outputs",
    "StepTimingSample": "sample",
    "ThinkingBudgetStateHolder": "holder",
    "TokenizerLike": "tokenizer",
    "TritonAttentionMetadata": "attn_metadata",
    "UvaBackedTensor": "array",
    "UvaBuffer": "buffer",
    "VllmConfig ModelConfig SpeculativeConfig": "config",
    "XgrammarGrammar GuidanceGrammar": "grammar",
    "_ModelRegistry": "models registry",
    " ".join(f"{kind}LogitsProcessor" for kind in ("Adapter", "", "MinP", "LogitBias", "MinTokens")): "processor",
    "config/vllm.py": "vllm_config_module",
    "envs.py": "envs",
    "triton_utils/dispatcher.py": "dispatcher",
    "v1/sample/rejection_sampler.py RejectionSampler": "rejection_sampler",
    "v1/worker/gpu/buffer_utils.py": "buffer_utils",
    "v1/worker/gpu_model_runner.py": "gpu_model_runner",
}
RECEIVERS = {name: classes for classes, names in OBJECTS.items() for name in names.split()}
# Files whose classes are named as those that we use.
NAMESAKES = re.compile(
    r"models/(inkling/|llama\w+\.py)|utils/counter|worker/cpu/|output_processor|kv_offload|moe/oracle|third_party"
)
# Attributes that we set on objects of vLLM.
_SET_BY_US = frozenset({"adapter", "specplugins", "aux_hidden_state_layers", "speculative_config"})
# Attributes that are vLLM's wherever they stand.
ATTRIBUTES = {"gpu": "UvaBackedTensor StagedWriteTensor", "np": "UvaBackedTensor UvaBuffer CpuGpuBuffer"}
# Whose attributes are nobody's business: classes, and modules, of Python and of what we build on.
_OF_OTHERS: dict[str, str] = {
    "builtins": "str bytes int float list dict set tuple type property BaseException UnicodeDecodeError",
    "types": "FunctionType CodeType ModuleType FrameType",
    "ast": "AST Name Attribute alias FunctionDef ImportFrom ClassDef arguments arg Module Constant keyword stmt Store",
    "argparse": "ArgumentParser",
    "asyncio": "AbstractEventLoop",
    "collections": "deque",
    "concurrent.futures": "Future",
    "importlib.machinery": "ModuleSpec",
    "io": "IOBase TextIOBase StringIO",
    "logging": "Logger",
    "multiprocessing": "Process connection.Connection",
    "numpy": "ufunc ndarray generic random random.Generator",
    "os": "stat_result",
    "pathlib": "Path",
    "prometheus_client": "Gauge Counter",
    "pydantic": "ValidationError",
    "re": "Pattern",
    "socketserver": "BaseServer",
    "threading": "Semaphore",
    "torch": "Tensor nn.Module device dtype Generator distributed cuda cuda.Event mps.event.Event",
    "llguidance": "LLMatcher LLTokenizer",
    "xgrammar": "GrammarMatcher",
}


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
        if listed := OPEN.get(name.rpartition(".")[2]):
            signatures = {listed} if all(compat.fit(str(each), listed) for each in signatures) else signatures
        if len(signatures) > 1:
            raise SystemExit(f"{file}: {name} takes {' or '.join(map(str, signatures))}: VARIED must name it")
        result.setdefault(file, {})[name] = signatures.pop()
    return result


UNSEEN: dict[str, str] = {
    "compilation/decorators.py": "_model_hash_key do_not_compile",
    "compilation/wrapper.py": "TorchCompileWithNoGuardsWrapper.__init__",
    "config/vllm.py": "set_current_vllm_config",
    "distributed/ec_transfer/ec_connector/metrics.py": "ECConnectorStats.data",
    "model_executor/layers/layernorm.py": "RMSNorm.variance_epsilon RMSNorm.weight",
    "model_executor/models/llama.py": (
        "LlamaForCausalLM.model LlamaForCausalLM.lm_head LlamaForCausalLM.logits_processor"
    ),
    "model_executor/models/registry.py": "_LazyRegisteredModel.module_name",
    "sampling_params.py": "SamplingParams.min_p SamplingParams.logit_bias",
    "v1/attention/backend.py": (
        "AttentionMetadataBuilder.build AttentionMetadataBuilder.supports_draft_decode_metadata_update "
        "AttentionMetadataBuilder.update_draft_decode_metadata CommonAttentionMetadata.seq_lens_cpu_upper_bound"
    ),
    "v1/core/sched/scheduler.py": (
        "Scheduler.block_size Scheduler.dynamic_sd_lookup Scheduler.kv_cache_manager Scheduler.kv_holding_waiting "
        "Scheduler.max_num_running_reqs Scheduler.max_num_scheduled_tokens Scheduler.running Scheduler.vllm_config "
        "Scheduler.waiting"
    ),
    "v1/engine/async_llm.py": "AsyncLLM.input_processor",
    "v1/engine/input_processor.py": "InputProcessor.tokenizer",
    "v1/metrics/loggers.py": "StatLoggerManager.stat_loggers",
    "v1/outputs.py": "DraftTokenIds.draft_token_ids",
    "v1/spec_decode/llm_base_proposer.py": "SpecDecodeBaseProposer.prepare_next_token_ids_padded",
    "v1/worker/gpu/cudagraph_utils.py": "CudaGraphManager.__init__",
    "v1/worker/gpu/model_runner.py": "GPUModelRunner.req_states",
    "v1/worker/gpu/spec_decode/speculator.py": "DraftModelSpeculator._maybe_predict_acceptance",
}


# Functions that may get more parameters, which ours pass on or ignore.
OPEN = {
    "propose": "self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states num_sampled "
    "num_rejected ... dummy_run skip_attn_for_dummy_run is_profile num_speculative_tokens"
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
                owners = ATTRIBUTES.get(node.attr) or RECEIVERS.get(receiver) or _class_of(receiver)
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
    others = [resolve_name(f"{module}:{name}") for module, names in _OF_OTHERS.items() for name in names.split()]
    others += [torch.nn.Module(), importlib.machinery.ModuleSpec("", None), multiprocessing, psutil.virtual_memory()]
    return set(_ours() | _SET_BY_US).union(*map(dir, others), *of_syntax)


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
    files = _classes()[owner]
    own = [file for file in files if file.startswith("v1/worker/gpu/") == (runner == "v2")]
    return own if own and runner in ("v1", "v2") else files


@cache
def _classes() -> dict[str, list[str]]:
    """Class of vLLM's -> the files that have one of this name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(installed().rglob("*.py")):
        file = str(path.relative_to(installed()))
        if not NAMESAKES.search(file):
            for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE):
                found[name].append(file)
    return found


@cache
def _class_of(receiver: str) -> str | None:
    """The class that a variable is named for."""
    names = {name.lower(): name for name in _classes()}
    return names.get(receiver.removesuffix("()").replace("_", "").lower())


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
