"""Every sampling parameter gives the same output with drafts and without, token for token."""

from typing import Any

import pytest
from cases import PROMPT_LOOKUP, early_exit, generate, mixed_prompts
from conftest import DEMO_MODEL, INTERPRETED, NUM_LAYERS
from scripted import CONFIG as SCRIPTED

NUM_TOKENS = 10 if INTERPRETED else 24
PARAMETERS: dict[str, dict[str, Any]] = {
    "none": {},
    "truncation": {"top_p": 0.9, "top_k": 40},
    "min_p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    "logit_bias": {"logit_bias": {}},  # these four are made from what the model says without them
    "bad_words": {"bad_words": []},
    "min_tokens": {"min_tokens": 7, "ignore_eos": False, "stop_token_ids": []},
    "allowed": {"allowed_token_ids": []},
}
Outputs = dict[str, list[int]]


def sampling_params(name: str, temperature: float, said: list[int], **more: Any) -> Any:
    """Parameters that change what is said: `said` is the output without them."""
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    own = dict(PARAMETERS[name])
    if name == "logit_bias":
        own["logit_bias"] = {said[1]: -4.0, said[4]: 2.5, 77: 1.0}
    if name == "bad_words":
        tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
        own["bad_words"] = [tokenizer.decode(said[i : i + 2]).strip() or "def" for i in (2, 5)]
    if name == "min_tokens":
        own["stop_token_ids"] = sorted(set(said))
    if name == "allowed":
        own["allowed_token_ids"] = [token for token in range(3000) if token % 3 == 0 or token in said[3:6]]
    return SamplingParams(
        **{"temperature": temperature, "seed": 5, "max_tokens": NUM_TOKENS, "ignore_eos": True, **own, **more}
    )


def with_script(params: Any, script: list[int], num_prompt_tokens: int, depth: int) -> Any:
    params = params.clone()
    params.extra_args = {"specplugins": {"script": script, "depth": depth, "num_prompt_tokens": num_prompt_tokens}}
    return params


def run(llm: Any, prompt: list[int], params: list[Any]) -> list[Any]:
    """The outputs of one prompt under each parameters, in one batch."""
    results = llm.generate([{"prompt_token_ids": prompt}] * len(params), params, use_tqdm=False)
    return [result.outputs[0] for result in results]


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return mixed_prompts(str(DEMO_MODEL), 8)[5]


@pytest.fixture(scope="module")
def said(engine: Any, prompt: list[int]) -> list[int]:
    """What vLLM says without any parameters."""
    [output] = run(engine(), prompt, [sampling_params("none", 0.0, [])])
    return list(output.token_ids)


@pytest.fixture(scope="module")
def of_vllm(engine: Any, prompt: list[int], said: list[int]) -> dict[str, Any]:
    """vLLM's own outputs, without speculation and at temperature 0, with logprobs."""
    params = [sampling_params(name, 0.0, said, logprobs=3, prompt_logprobs=2) for name in PARAMETERS]
    return dict(zip(PARAMETERS, run(engine(), prompt, params), strict=True))


@pytest.fixture(scope="module")
def llm(engine: Any, of_vllm: Any) -> Any:
    return engine(SCRIPTED)


def accepted_tokens(llm: Any) -> int:
    [stats] = llm.collective_rpc("specplugins_stats")
    assert stats["faults"] == {}
    return int(stats["accepted_tokens"])


def test_temperature_0(llm: Any, prompt: list[int], said: list[int], of_vllm: dict[str, Any]) -> None:
    """All parameters in one batch, against vLLM without speculation, logprobs included.

    Kills: penalties, bad words or min_tokens that do not count earlier drafts; a bias on a request's first row alone;
    a parameter of another request; logprobs of another row.
    """
    params = [
        with_script(sampling_params(name, 0.0, said, logprobs=3), list(of_vllm[name].token_ids), len(prompt), 5)
        for name in PARAMETERS
    ]
    before = accepted_tokens(llm)
    for name, output in zip(PARAMETERS, run(llm, prompt, params), strict=True):
        assert output.token_ids == of_vllm[name].token_ids, name
        assert_same_logprobs(output.logprobs, of_vllm[name].logprobs)
    assert accepted_tokens(llm) - before > len(PARAMETERS) * NUM_TOKENS // 4
    changed = [name for name in PARAMETERS if list(of_vllm[name].token_ids) != said]
    assert changed == ["penalties", "logit_bias", "bad_words", "min_tokens", "allowed"]


def assert_same_logprobs(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert our.keys() == their.keys()
        for token, entry in our.items():
            assert entry.logprob == pytest.approx(their[token].logprob, abs=1e-4)
            assert entry.rank == their[token].rank


@pytest.fixture(scope="module")
def drawn(llm: Any, prompt: list[int]) -> list[int]:
    """What is sampled without any parameters."""
    [output] = run(llm, prompt, [sampling_params("none", 0.8, [])])
    return list(output.token_ids)


@pytest.fixture(scope="module")
def undrafted(llm: Any, prompt: list[int], drawn: list[int]) -> Outputs:
    params = [sampling_params(name, 0.8, drawn) for name in PARAMETERS]
    return {name: list(output.token_ids) for name, output in zip(PARAMETERS, run(llm, prompt, params), strict=True)}


@pytest.mark.parametrize("depth", [1, 5])
def test_sampled(llm: Any, prompt: list[int], drawn: list[int], undrafted: Outputs, depth: int) -> None:
    """At temperature 0.8, with a seed: the same tokens with drafts of 1 and 5 and without.

    Kills: noise by row, step or draft; a parameter that drafted positions do not have; temperature applied twice.
    """
    params = [
        with_script(sampling_params(name, 0.8, drawn), undrafted[name], len(prompt), depth) for name in PARAMETERS
    ]
    before = accepted_tokens(llm)
    for name, output in zip(PARAMETERS, run(llm, prompt, params), strict=True):
        assert list(output.token_ids) == undrafted[name], name
    assert accepted_tokens(llm) - before > len(PARAMETERS) * NUM_TOKENS // (8 // depth + 3)
    assert len({tuple(tokens) for tokens in undrafted.values()}) == len(PARAMETERS), "each parameter must matter"


def test_alone(llm: Any, prompt: list[int], drawn: list[int], undrafted: Outputs) -> None:
    """In a batch of its own. Kills: noise that depends on the batch; a request's parameters by the wrong row."""
    for name in ("none", "truncation", "penalties"):
        params = with_script(sampling_params(name, 0.8, drawn), undrafted[name], len(prompt), 5)
        [output] = run(llm, prompt, [params])
        assert list(output.token_ids) == undrafted[name], name


def test_unseeded(llm: Any, prompt: list[int]) -> None:
    """Kills: seeds of requests without one that repeat."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True, n=2)
    outputs = [
        tuple(output.token_ids)
        for _ in range(2)
        for output in llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs
    ]
    assert len(set(outputs)) == 4


BATCH = {"temperature": 0.8, "top_p": 0.95, "seed": 3, "max_tokens": NUM_TOKENS}


@pytest.fixture(scope="module")
def one_by_one(llm: Any) -> list[list[int]]:
    return generate(llm, mixed_prompts(str(DEMO_MODEL), 4), [1], **BATCH)


@pytest.mark.skipif(INTERPRETED, reason="engines of other methods take minutes")
@pytest.mark.parametrize("config", [PROMPT_LOOKUP, early_exit(NUM_LAYERS // 2)], ids=lambda config: config["method"])
def test_methods(engine: Any, one_by_one: list[list[int]], config: dict[str, Any]) -> None:
    """A batch of 4 with drafts against single requests without."""
    llm = engine(config)
    assert generate(llm, mixed_prompts(str(DEMO_MODEL), 4), [4], **BATCH) == one_by_one
    assert accepted_tokens(llm) > 5
