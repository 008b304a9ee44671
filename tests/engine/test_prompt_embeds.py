"""Prompts that are embeddings: their places have no token ids, and V1 leaves there what stood in the row before."""

from typing import Any, ClassVar

import pytest
import torch
from cases import SUFFIX_LOOKUP, mixed_prompts
from conftest import DEMO_MODEL, INTERPRETED, RUNNER, spec_metrics
from safetensors.torch import load_file
from vllm import SamplingParams

from vllm_specplugins.draft import Draft, DraftBatch, Feedback
from vllm_specplugins.structures.suffix.store_file import tenant_of

pytestmark = pytest.mark.slow
NUM_TOKENS = 12 if INTERPRETED else 24


class Recorder:
    """Remembers what histories it was shown, and drafts nothing."""

    shown: ClassVar[list[list[int]]] = []
    facts: ClassVar[set[Any]] = set()  # tenants and lengths of prompts
    ended: ClassVar[list[tuple[list[int], bytes]]] = []

    def __init__(self, options: Any, context: Any): ...

    def propose(self, batch: DraftBatch) -> Draft:
        Recorder.shown.extend(history.tolist() for history in batch.token_ids)
        Recorder.facts.update(zip(batch.tenants, batch.prompt_lengths, strict=True))
        return Draft.empty(batch.num_reqs)

    def observe(self, feedback: Feedback) -> None: ...

    def finish(self, request_id: str, token_ids: Any, tenant: bytes) -> None:
        Recorder.ended.append((token_ids.tolist(), tenant))

    def forget(self, request_ids: Any) -> None: ...


METHODS = {
    "custom": {"method": "custom", "proposer": "test_prompt_embeds:Recorder"},
    "prompt_lookup": {"method": "prompt_lookup", "min_ngram": 1},
    "suffix_lookup": SUFFIX_LOOKUP,
}


def embedded(token_ids: list[int]) -> torch.Tensor:
    [weights] = [load_file(path) for path in DEMO_MODEL.glob("*.safetensors")]
    return next(weights[name] for name in weights if name.endswith("embed_tokens.weight"))[token_ids].float()


def test_nobody_is_shown_another_tenants_text(engine: Any) -> None:
    """A sends ids, then B, in the same row, embeddings, and last A ids again: outputs are those without drafts, and
    nothing is drafted for B or remembered of it. Kills: histories that are read where nothing was written; a request
    that is left out for good, or with others; a custom class that is not told whose text it is, which part of it is
    the prompt, or its end.
    """
    first, second = mixed_prompts(str(DEMO_MODEL), 2)
    prompts = [
        {"prompt_token_ids": first, "cache_salt": "a"},
        {"prompt_embeds": embedded(second), "cache_salt": "b"},
        {"prompt_token_ids": first, "cache_salt": "a"},
    ]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    outputs: dict[str, Any] = {}
    for name, config in METHODS.items():
        llm = engine(config, enable_prompt_embeds=True)
        tokens, drafts = [], [spec_metrics(llm)["draft_tokens"]]
        for prompt in prompts:
            [output] = llm.generate(prompt, params, use_tqdm=False)
            tokens.append(list(output.outputs[0].token_ids))
            drafts.append(spec_metrics(llm)["draft_tokens"])
        outputs[name] = tokens
        if name.endswith("lookup"):
            assert drafts[0] < drafts[1] <= drafts[2] < drafts[3]
            # On V2 lookups read on the device, where no id stands in these places, and B's output behind them.
            is_shown = RUNNER == "v2"
            assert drafts[1] == drafts[2] or is_shown, "B gets no drafts, and the others theirs"
        if name == "suffix_lookup":
            [[held]] = [found.values() for found in llm.collective_rpc("specplugins_store")]
            assert held["texts"] > 0 and held["tenants"] == 1, "and nothing of B is stored"
    assert all(tokens == outputs["custom"] for tokens in outputs.values()), "which drafts nothing"
    import test_prompt_embeds as the_engines

    shown = the_engines.Recorder.shown
    told = the_engines.Recorder
    assert told.facts == {(tenant_of("a"), len(first))}
    assert told.ended[0] == ([*first, *outputs["custom"][0]], tenant_of("a"))
    assert len(shown) >= 2 * (NUM_TOKENS - 1) and all(history[: len(first)] == first for history in shown)
