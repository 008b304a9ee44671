"""Training and the engine: acceptance that it prints, which the engine has."""

from typing import Any

import pytest
from cases import early_exit, mixed_prompts
from conftest import DEMO_MODEL, RUNNER, spec_metrics

from vllm_specplugins.tools.base_model import BaseModel
from vllm_specplugins.tools.training.kinds import exit_guesser, initial_head
from vllm_specplugins.tools.training.scores import scores, write_texts

pytestmark = pytest.mark.skipif(RUNNER == "v2", reason="the engine of the tools is V1's on a CPU")
K, NUM_TOKENS = 3, 96


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return BaseModel.load(str(DEMO_MODEL), "cpu")


@pytest.fixture(scope="module")
def rows() -> list[list[int]]:
    return [prompt[:NUM_TOKENS] for prompt in mixed_prompts(str(DEMO_MODEL), 24) if len(prompt) >= NUM_TOKENS]


@pytest.mark.slow
def test_printed_is_measured(engine: Any, base: BaseModel, rows: list[list[int]]) -> None:
    """At temperatures 0 and 1, of coupled drafts; the engine writes the same texts, to the token. Fails if every token
    counts as the beginning of a step, if drafts are compared with other text than the model's, or if a race runs with
    other noise.
    """
    from vllm import SamplingParams

    # First the engine: vLLM's kernels on a CPU do not come up where the host's compiled loops already are.
    llm = engine({**early_exit(2, K), "draft_sample_method": "coupled"})
    texts = [write_texts(base, rows, heat) for heat in (0.0, 1.0)]
    found = scores(base, *texts, exit_guesser(base, initial_head(base, 2)), K)
    for own, printed in zip(texts, (found.length, found.sampled_lengths["coupled"]), strict=True):
        before = spec_metrics(llm)
        prompts = [{"prompt_token_ids": text.row[: text.begin]} for text in own]
        params = [
            SamplingParams(
                temperature=text.temperature, seed=text.seed, max_tokens=len(text.row) - text.begin, detokenize=False
            )
            for text in own
        ]
        results = llm.generate(prompts, params, use_tqdm=False)
        after = spec_metrics(llm)
        assert [list(result.outputs[0].token_ids) for result in results] == [text.row[text.begin :] for text in own]
        drafts, accepted = (after[name] - before[name] for name in ("drafts", "accepted_tokens"))
        assert printed == pytest.approx(1 + accepted / drafts, rel=0.05)
