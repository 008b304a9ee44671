"""The policy `auto` on recorded texts, and what it drafts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from played import MACHINES, Engine, cells, speed_of
from stages import LAYERS, Played, Request, load

from vllm_specplugins.draft import DraftBatch
from vllm_specplugins.methods import build_proposer
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.structures.drafts import DraftArrays

WIDTH, MOST = 12, 4
LOOKUP = {"method": "prompt_lookup", "min_ngram": 2}  # with 1 there is less left for the other stage
EXIT = {
    "method": "early_exit", "exit_layer": LAYERS[1], "num_speculative_tokens": MOST, "draft_sample_method": "greedy",
}  # fmt: skip
MODEL = {"method": "draft_model", "model": "of the trace", "num_speculative_tokens": MOST}


def cascade(policy: str, *stages: dict[str, Any]) -> dict[str, Any]:
    return {"method": "cascade", "policy": policy, "num_speculative_tokens": WIDTH, "stages": list(stages)}


@pytest.fixture(scope="module")
def texts() -> dict[str, list[Request]]:
    return cells(load())


@pytest.mark.parametrize(
    ("cell", "batch", "machine"), [("sampled", 4, "gpu"), ("mixed", 4, "gpu"), ("copying", 4, "cpu")]
)
def test_as_good_as_the_best(texts: Any, cell: str, batch: int, machine: str) -> None:
    """Fails if passes of the model have no price, or if those who follow a draft that was right need not pay for
    theirs."""
    speeds = [
        speed_of(config, texts[cell], batch, MACHINES[machine], 2000)
        for config in (
            cascade("auto", LOOKUP, EXIT), cascade("verify", LOOKUP, EXIT),
            cascade("auto", LOOKUP), cascade("auto", EXIT),
        )
    ]  # fmt: skip
    assert speeds[0] >= 0.98 * max(speeds[1:])
    assert cell == "copying" or speeds[0] >= 1.05 * max(speeds[2:])


def test_as_good_as_the_best_beside_a_built_in_stage(texts: Any) -> None:
    """Fails if a stage that has drafted anyhow is priced, or is never chosen before a lookup."""
    configs = [cascade("auto", LOOKUP, MODEL), cascade("auto", LOOKUP), cascade("auto", MODEL)]
    auto, *others = (speed_of(config, texts["sampled"], 4, MACHINES["gpu"], 2000) for config in configs)
    assert auto >= 1.05 * max(others)


def test_never_loses_where_drafting_is_dear(texts: Any) -> None:
    """An exit that costs as much as the target, on text that lookup finds little of. Fails if trials take more of the
    time than EXPLORE_SHARE."""
    machine = MACHINES["cpu"]
    dear = type(machine)(machine.step_ms, machine.token_ms, machine.step_ms, machine.token_ms)
    auto, alone = (speed_of(config, texts["sampled"], 1, dear, 500) for config in (
        cascade("auto", LOOKUP, EXIT), cascade("auto", LOOKUP)))  # fmt: skip
    assert auto >= 0.97 * alone


def test_verify_is_no_slower_than_its_last_stage(texts: Any) -> None:
    """Drafts are short here and passes dear, so that it hardly pays to check what was found: now and then it is tried,
    for a hundredth of the time. Fails if that is always done."""
    weak = {**EXIT, "exit_layer": LAYERS[0]}
    checked, alone = (speed_of(config, texts["continuing"], 4, MACHINES["cpu"]) for config in (
        cascade("verify", LOOKUP, weak), cascade("auto", weak)))  # fmt: skip
    assert checked >= 0.99 * alone


def drafts_of(
    texts: list[Request],
    config: dict[str, Any],
    watch: Callable[[DraftBatch, DraftArrays], None],
    options: Callable[[str], dict[str, Any]] = lambda name: {},
    machine: str = "gpu",
) -> None:
    """Plays texts to a cascade whose drafts are shown."""

    def build(context: Any) -> Played:
        proposer: Any = build_proposer(parse_config(config), context)
        right, propose = proposer._draft, proposer.propose

        def watched(batch: DraftBatch, gate: Any) -> DraftArrays:
            drafts: DraftArrays = right(batch, gate)
            assert (drafts.num_draft <= batch.max_num_draft).all()
            watch(batch, drafts)
            return drafts

        proposer._draft = watched
        proposer.propose = lambda batch: propose(replace(batch, options=list(map(options, batch.request_ids))))
        return Played(proposer, texts)

    Engine(texts, 4, MACHINES[machine], WIDTH, build, 1000).played()


def test_drafts(texts: Any) -> None:
    """Every token is what its stage predicts after the text and the earlier tokens. Fails if the exit reads another
    draft than the stored one, if the lookup does not follow its tokens or follows others, or if the exit drafts more
    than its K."""
    requests, kinds = texts["mixed"], set()

    def watch(batch: DraftBatch, drafts: DraftArrays) -> None:
        for row, (name, history) in enumerate(zip(batch.request_ids, batch.token_ids, strict=True)):
            request = requests[int(name.rpartition("-")[2]) % len(requests)]
            count = int(drafts.num_draft[row])
            tokens, stages = (part[row, :count].tolist() for part in (drafts.token_ids, drafts.stage))
            kinds.add(
                "".join("LM"[stage] for place, stage in enumerate(stages) if stages[place - 1 : place] != [stage])
            )
            assert stages.count(1) <= MOST
            for place, stage in enumerate(stages):
                before = tokens[:place]
                if stage == 1:
                    said = request.next(1, len(history), before)
                    assert said in (-1, tokens[place])
                else:
                    text = np.append(history, before).tolist()
                    # Where copying goes on one equal token is enough.
                    ends = [end for end in range(1, len(text)) if text[end - 1] == text[-1]]
                    assert tokens[place] in [text[end] for end in ends if end < len(text)]

    for machine in MACHINES:  # tokens that cost nothing are looked up to the end, and ones that do are not
        drafts_of(requests, cascade("auto", LOOKUP, EXIT), watch, machine=machine)
    assert {"L", "M", "LM", "ML"} <= kinds


def test_requests_that_allow_one_stage(texts: Any) -> None:
    """Fails if a stage drafts for a request that does not allow it."""
    found: set[tuple[int, int]] = set()

    def allowed(name: str) -> dict[str, Any]:
        return {"stages": ("prompt_lookup", "early_exit")[int(name[-1]) % 2 :][:1]}

    def watch(batch: DraftBatch, drafts: DraftArrays) -> None:
        for name, stages, count in zip(batch.request_ids, drafts.stage.tolist(), drafts.num_draft, strict=True):
            found.update((int(name[-1]) % 2, stage) for stage in stages[:count])

    drafts_of(texts["copying"][:2], cascade("auto", LOOKUP, EXIT), watch, allowed)
    assert found == {(0, 0), (1, 1)}
