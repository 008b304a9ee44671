"""Reads vLLM's source to find whether a model's layers can be cut, and which kinds of state they have, before an engine
starts. The import of a model class takes seconds and may initialise a device. In unclear cases the worker decides
(layers.py)."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec, resolve_name
from pathlib import Path

from vllm_specplugins.config import ConfigError

# The attributes of a decoder's body that can be cut.
PARTS = ("layers", "start_layer", "end_layer", "norm")
# Names of arguments in the call of a layer that reads only states, and settings that all layers get.
_PLAIN_INPUTS = {
    *("layer", "positions", "position_ids", "hidden_states", "x", "residual"),
    *("kwargs", "extra_layer_kwargs", "llama_4_scaling"),
}


def uncuttable(method: str, model: str) -> ConfigError:
    wanted = "a decoder whose body runs `layers` from `start_layer` to `end_layer`, and then `norm`"
    return ConfigError(f"{method}: model must be {wanted}, as vLLM's Llama does, not {model}.")


def unskippable(method: str, model: str) -> ConfigError:
    wanted = "one whose layers read nothing but states of earlier layers"
    return ConfigError(f"{method}: remove layers: the model must be {wanted}, not {model}.")


def takes_no_states(method: str, model: str) -> ConfigError:
    wanted = "a decoder whose body passes `inputs_embeds` unchanged to its layers, as vLLM's Llama does"
    return ConfigError(f"{method}: model must be {wanted}, not {model}.")


def may_be_cut(module: str) -> bool:
    """Returns False if no class of this module, or of the modules of its base classes, is a body that can be cut.

    >>> may_be_cut("vllm.model_executor.models.mistral"), may_be_cut("vllm.model_executor.models.opt")
    (True, False)
    """
    sources = list(_sources(module, set()))
    return not sources or any(_is_body(node) for source in sources for node in source.body)


def may_skip(module: str) -> bool:
    """Returns False if a layer of a body in these modules receives more than the states of earlier layers, or reads
    their keys, or if a body treats its layers by their places.

    >>> may_skip("vllm.model_executor.models.gemma3"), may_skip("vllm.model_executor.models.gemma4")
    (True, False)
    """
    sources = list(_sources(module, set()))
    nodes = [node for source in sources for body in filter(_is_body, source.body) for node in ast.walk(body)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "layer"]
    given = {part.id for call in calls for part in ast.walk(call) if isinstance(part, ast.Name)}
    keywords = {node.arg for source in sources for node in ast.walk(source) if isinstance(node, ast.keyword)}
    shares = "kv_sharing_target_layer_name" in keywords or any(map(_compares_places, nodes))
    return not sources or (bool(calls) and given <= _PLAIN_INPUTS and not shares)


def _compares_places(node: ast.AST) -> bool:
    """Returns whether a loop over layers compares their places, except for the states that it passes to vLLM's
    drafters."""
    if not isinstance(node, ast.For) or "end_layer" not in ast.unparse(node.iter):
        return False
    places = {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
    compared = (ast.unparse(part) for part in ast.walk(node) if isinstance(part, ast.Compare))
    return any(test.split()[0] in places for test in compared if "aux_hidden_state_layers" not in test)


def kinds_of_state(module: str) -> set[str]:
    """Returns the kinds of state that every token changes, by the names of vLLM's functions that copy them.

    >>> kinds_of_state("vllm.model_executor.models.jamba")
    {'mamba1'}
    """
    end = "_state_copy_func"
    nodes = (node for source in _sources(module, set()) for node in ast.walk(source))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute) and node.attr.endswith(end)}
    return {name.removesuffix(end) for name in names} - {"get_mamba"}


def _is_body(node: ast.stmt) -> bool:
    if not isinstance(node, ast.ClassDef):
        return False
    attributes = [part for part in ast.walk(node) if isinstance(part, ast.Attribute)]
    bound = {part.attr for part in attributes if isinstance(part.ctx, ast.Store)}
    read = {part.attr for part in attributes if isinstance(part.ctx, ast.Load)}
    return bound.issuperset(PARTS) and "end_layer" in read


def _sources(module: str, seen: set[str]) -> Iterator[ast.Module]:
    """Yields a module of vLLM, and the modules of its base classes, or of a package's names."""
    path = _path(module)
    if module in seen or path is None:
        return
    seen.add(module)
    source = ast.parse(path.read_text("utf-8"))
    yield source
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    bases = {ast.unparse(base) for node in ast.walk(source) if isinstance(node, ast.ClassDef) for base in node.bases}
    for node in ast.walk(source):
        if not isinstance(node, ast.ImportFrom):
            continue
        if package == module or bases & {name.asname or name.name for name in node.names}:
            yield from _sources(resolve_name("." * node.level + (node.module or ""), package), seen)


def _path(module: str) -> Path | None:
    """Returns the file of a module of vLLM's models; `find_spec` would import its package."""
    if not module.startswith(("vllm.model_executor.models.", "vllm.models.")):
        return None
    vllm = find_spec("vllm")
    assert vllm is not None and vllm.submodule_search_locations
    stem = Path(vllm.submodule_search_locations[0]).joinpath(*module.split(".")[1:])
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)
