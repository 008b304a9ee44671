"""The plan of each configuration on each engine, held against answers from before there was one table for them."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from vllm_specplugins.config import ConfigError, SpecConfig
from vllm_specplugins.methods import reads_history
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.plan import Conditions, make_plan, wanted_schedule

PLANS = json.loads(Path(__file__).with_name("plans.json").read_text())
LOOKUP, SUFFIX, EXIT = ({"method": name} for name in ("prompt_lookup", "suffix_lookup", "early_exit"))
JUMP, MEDUSA = {"method": "jump", "head": "folder"}, {"method": "medusa", "heads": "folder"}
GRAMMAR, REMOTE = {"method": "grammar"}, {"method": "remote", "url": "http://host/v1", "model": "m"}
CUSTOM = {"method": "custom", "proposer": f"{__name__}:Waits"}
LATE = {"method": "custom", "proposer": f"{__name__}:Late"}
DRAFTERS = [{"method": name, "model": "m"} for name in ("draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark")]
TREE, OFF = {"tree": 7}, {"gate": "off"}
MORE = "learn", "draft_sample_method", "policy"


class Waits:
    """A proposer that is never built."""


class Late:
    """Another one, that may draft from older tokens."""

    may_be_late = True


def cascade(*stages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"method": "cascade", "stages": list(stages), **more}


ALONE = [LOOKUP, SUFFIX, EXIT, JUMP, MEDUSA, GRAMMAR, REMOTE, CUSTOM, LATE]
CONFIGS = [
    *ALONE,
    *({**config, **OFF} for config in ALONE),
    *({**config, **TREE} for config in (EXIT, JUMP, MEDUSA)),
    {**EXIT, "learn": True}, {**EXIT, "draft_sample_method": "probabilistic"},
    *(cascade(LOOKUP, part) for part in (EXIT, JUMP, MEDUSA, GRAMMAR, CUSTOM, LATE, REMOTE, *DRAFTERS)),
    *(cascade(SUFFIX, part) for part in (EXIT, JUMP, MEDUSA, GRAMMAR, *DRAFTERS)),
    cascade(LOOKUP, EXIT, **OFF), cascade(LOOKUP, EXIT, **TREE), cascade(LOOKUP, EXIT, policy="verify"),
    cascade(SUFFIX, EXIT, **OFF), cascade(LOOKUP, DRAFTERS[1], **OFF),
    cascade(LOOKUP), cascade(SUFFIX), cascade(EXIT), cascade(LATE), cascade(EXIT, LOOKUP), cascade(LATE, EXIT),
    cascade(DRAFTERS[0], LOOKUP), cascade(LOOKUP, EXIT, GRAMMAR), cascade(LOOKUP, EXIT, JUMP), cascade(EXIT, JUMP),
]  # fmt: skip
# Of an engine. "untrimmable" stands for all reasons but graphs and LoRA for which vLLM cannot trim drafts.
AXES: dict[str, tuple[Any, ...]] = {
    "runner": ("V1", "V2"),
    "asked": (None, True, False),
    "vllm_is_async": (True, False),
    "scheduler_cls": (None, "a.Scheduler"),
    "pipeline": (1, 2),
    "tensor": (1, 2),
    "data": (1, 2),
    "kind": ("plain", "no graphs", "LoRA", "untrimmable"),
}
UNTRIMMED = {"plain": None, "no graphs": "it needs graphs", "LoRA": "not with LoRA", "untrimmable": "a reason"}


def engines() -> Iterator[dict[str, Any]]:
    return (dict(zip(AXES, values, strict=True)) for values in product(*AXES.values()))


def name(raw: dict[str, Any]) -> str:
    """The name of a configuration in plans.json."""
    fields = [f"{key}={value}" for key, value in raw.items() if key in (*TREE, *OFF, *MORE)]
    methods = raw.get("stages") or [raw]
    words = "+".join(stage.get("proposer", stage["method"]).rpartition(":")[2] for stage in methods)
    return " ".join([("cascade " if "stages" in raw else "") + words, *fields])


def expected(tree: Any, engine: dict[str, Any]) -> str:
    """The answer for an engine: a tree branches by an axis, and its leaves are numbers of answers."""
    while isinstance(tree, dict):
        [(axis, branches)] = tree.items()
        tree = branches[str(engine[axis])]
    answer: str = PLANS["answers"][tree]
    return answer


def conditions(engine: dict[str, Any]) -> Conditions:
    return Conditions(
        use_v2_model_runner=engine["runner"] == "V2",
        asked_async=engine["asked"],
        async_scheduling=engine["vllm_is_async"],
        scheduler_cls=engine["scheduler_cls"],
        pipeline_parallel_size=engine["pipeline"],
        tensor_parallel_size=engine["tensor"],
        world_size=engine["pipeline"] * engine["tensor"],
        data_parallel_size=engine["data"],
        has_full_cudagraphs=engine["kind"] != "no graphs",
        has_lora=engine["kind"] == "LoRA",
        untrimmed_for=UNTRIMMED[engine["kind"]],
    )


def answers(config: SpecConfig, engine: dict[str, Any]) -> dict[str, str]:
    asked = {"asked of vLLM": str(wanted_schedule(config, engine["asked"], engine["pipeline"]))}
    try:
        plan = make_plan(config, conditions(engine))
    except ConfigError as error:
        return {**asked, "schedule": str(error).replace(f"{config.method}: ", "METHOD: ")}
    place, schedule, chooser, trimming = str(plan).split("; ")
    scheduler = (plan.scheduler or engine["scheduler_cls"]).rpartition(".")[2]
    return {
        **asked,
        "place": place,
        "schedule": f"{schedule}: {plan.is_async} {scheduler}",
        "chooser": chooser,
        "trimming": trimming,
        "on device": f"{plan.on_device} {plan.is_late} {plan.on_device and reads_history(config)}",
    }


@pytest.mark.parametrize("raw", CONFIGS, ids=name)
def test_plans(raw: dict[str, Any]) -> None:
    """Kills: another answer than in the table, for any configuration in any of 768 engines."""
    config = parse_config(raw)
    trees = {part: tree for part, plans in PLANS["plans"].items() for names, tree in plans if name(raw) in names}
    for engine in engines():
        found = answers(config, engine)
        assert found == {part: expected(trees[part], engine) for part in found}, engine
