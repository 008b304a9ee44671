"""Every sampling parameter gives the same output with drafts and without, token for token."""

from typing import Any

import pytest
from cases import PROMPT_LOOKUP, mixed_prompts
from conftest import DEMO_MODEL, INTERPRETED, RUNNER
from scripted import CONFIG as SCRIPTED

REAL_KERNELS = True
NUM_TOKENS = 10 if INTERPRETED else 24
PARAMETERS: dict[str, dict[str, Any]] = {
    "none": {},
    "truncation": {"top_p": 0.5, "top_k": 9},
    "min_p": {"min_p": 0.25},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    "logit_bias": {"logit_bias": {}},  # these four are made from what the model says without them
    "bad_words": {"bad_words": []},
    "min_tokens": {"min_tokens": 7, "ignore_eos": False, "stop_token_ids": []},
    "allowed": {"allowed_token_ids": []},
}
Outputs = dict[str, list[int]]


def sampling_params(name: str, temperature: float, said: list[int], **more: Any) -> Any:
    """Returns parameters that change the output; `said` is the output without them."""
    from vllm import SamplingParams

    own = dict(PARAMETERS[name])
    if name == "logit_bias":
        own["logit_bias"] = {said[1]: -4.0, said[4]: 2.5, 77: 1.0}
    if name == "bad_words":
        own["bad_words"] = forbidding([said[i : i + length] for length in (2, 1) for i in range(1, NUM_TOKENS - 2)])
    if name == "min_tokens":
        own["stop_token_ids"] = sorted(set(said))
    if name == "allowed":
        own["allowed_token_ids"] = [token for token in range(3000) if token % 3 == 0 or token in said[3:6]]
    return SamplingParams(
        **{"temperature": temperature, "seed": 5, "max_tokens": NUM_TOKENS, "ignore_eos": True, **own, **more}
    )


def forbidding(parts: list[list[int]]) -> list[str]:
    """Two bad words that forbid some of these token sequences."""
    from vllm import SamplingParams
    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer(str(DEMO_MODEL))
    words = []
    for part in parts:
        params = SamplingParams(bad_words=[tokenizer.decode(part).strip() or "-"])
        params.update_from_tokenizer(tokenizer)
        if part in params.bad_words_token_ids:
            words += params.bad_words
    return words[:2]


def with_script(params: Any, script: list[int], num_prompt_tokens: int, depth: int) -> Any:
    params = params.clone()
    options = {"script": script, "depth": depth, "num_prompt_tokens": num_prompt_tokens}
    params.extra_args = {**(params.extra_args or {}), "specplugins": options}
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
    """All parameters in one batch, against vLLM without speculation, logprobs included. Kills: penalties, bad words or
    min_tokens that do not count earlier drafts; a bias on a request's first row alone; a parameter of another request;
    logprobs of another row.
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


def assert_same_logprobs(ours: Any, theirs: Any, up_to_rank: int = 10_000) -> None:
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        our, their = (
            {token: entry for token, entry in x.items() if (entry.rank or 0) <= up_to_rank} for x in (our, their)
        )
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


@pytest.mark.parametrize("depth", [5] if INTERPRETED else [1, 5])
def test_sampled(llm: Any, prompt: list[int], drawn: list[int], undrafted: Outputs, depth: int) -> None:
    """At temperature 0.8, with a seed: the same tokens with drafts of 1 and 5 and without. Kills: noise by row, step or
    draft; a parameter that drafted positions do not have; temperature applied twice.
    """
    params = [
        with_script(sampling_params(name, 0.8, drawn), undrafted[name], len(prompt), depth) for name in PARAMETERS
    ]
    before = accepted_tokens(llm)
    for name, output in zip(PARAMETERS, run(llm, prompt, params), strict=True):
        assert list(output.token_ids) == undrafted[name], name
    assert accepted_tokens(llm) - before > len(PARAMETERS) * NUM_TOKENS // (8 // depth + 3)
    same = [name for name, tokens in undrafted.items() if tokens == drawn]
    assert same == ["none"], "each parameter must matter"


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


RARE: dict[str, Any] = {
    "logprobs_mode": "processed_logprobs",
    "reasoning_config": {"reasoning_start_str": "def", "reasoning_end_str": "return x"},
    **({} if RUNNER == "v2" else {"logits_processors": ["scripted:NeverTwice"]}),
}


def rare_params() -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    common: dict[str, Any] = {"temperature": 0.0, "seed": 5, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    # vLLM's kernel of top-k and top-p does not run through Triton's interpreter.
    truncation: dict[str, Any] = {} if INTERPRETED else {"top_p": 0.8, "top_k": 30}
    params = {
        "processed": SamplingParams(**common, logprobs=4, logit_bias={10: 1.0}, presence_penalty=0.5),
        "truncated": SamplingParams(**{**common, "temperature": 1.3}, logprobs=4, min_p=0.01, **truncation),
        "chosen": SamplingParams(**common, logprob_token_ids=[10, 20, 30]),
        "budget": SamplingParams(**common, thinking_token_budget=4),
        "grammar": SamplingParams(**common, structured_outputs=StructuredOutputsParams(regex="[a-z ]{4,9}[0-9]{40}")),
        "custom": SamplingParams(**common, extra_args={"never_twice": True}),
    }
    if RUNNER == "v2":  # its processors are another class, and see positions
        del params["custom"]
    if INTERPRETED:  # vLLM's kernel of bitmasks does not run there either
        del params["grammar"]
    return params


@pytest.fixture(scope="module")
def rare_prompt(prompt: list[int]) -> list[int]:
    from transformers import AutoTokenizer

    return [*prompt[-30:], *AutoTokenizer.from_pretrained(DEMO_MODEL).encode("def")]


@pytest.fixture(scope="module")
def rare_of_vllm(engine: Any, rare_prompt: list[int]) -> dict[str, Any]:
    params = rare_params()
    return dict(zip(params, run(engine(**RARE), rare_prompt, list(params.values())), strict=True))


def test_rare_parameters(engine: Any, rare_prompt: list[int], rare_of_vllm: dict[str, Any]) -> None:
    """Against vLLM without speculation: logprobs after all parameters, chosen logprobs, budgets, grammars, processors.
    Kills: a draft verified past the end of a budget; a processor of the user's own applied to another request's row;
    logprobs of the logits as the model made them.
    """
    params = rare_params()
    llm = engine(SCRIPTED, **RARE)
    undrafted = dict(zip(params, run(llm, rare_prompt, list(params.values())), strict=True))
    scripted = [
        with_script(param, list(undrafted[name].token_ids), len(rare_prompt), 5) for name, param in params.items()
    ]
    before = accepted_tokens(llm)
    drafted = dict(zip(params, run(llm, rare_prompt, scripted), strict=True))
    assert accepted_tokens(llm) - before > NUM_TOKENS
    for name, theirs in rare_of_vllm.items():
        assert drafted[name].token_ids == undrafted[name].token_ids, name
        if name != "truncated":
            assert drafted[name].token_ids == theirs.token_ids, name
        if theirs.logprobs is not None:
            assert_same_logprobs(drafted[name].logprobs, undrafted[name].logprobs)
            assert_same_logprobs(drafted[name].logprobs[:1], theirs.logprobs[:1], up_to_rank=4)
    assert_same_logprobs(drafted["processed"].logprobs, rare_of_vllm["processed"].logprobs)
    assert_same_logprobs(drafted["chosen"].logprobs, rare_of_vllm["chosen"].logprobs)
    # The few tokens that are drawn through the interpreter may not show one of them.
    num_different = len({tuple(output.token_ids) for output in drafted.values()})
    assert num_different >= len(params) - INTERPRETED, "each must matter"


def test_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """min_p and logit_bias pass for our methods, and are refused as before where vLLM verifies."""
    from types import SimpleNamespace

    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from vllm_specplugins.engine.frontend.options import check_requests
    from vllm_specplugins.parsing import parse_config

    monkeypatch.setattr(SamplingParams, "_validate_spec_decode", SamplingParams._validate_spec_decode)
    check_requests()
    params = SamplingParams(min_p=0.1, logit_bias={3: 1.0})
    ours = parse_config(PROMPT_LOOKUP)
    model = SimpleNamespace(get_vocab_size=lambda: 100)
    params._validate_spec_decode(SimpleNamespace(plugin_config=ours, target_model_config=model))
    assert (params.min_p, params.logit_bias) == (0.1, {3: 1.0})
    monkeypatch.setenv("VLLM_SPECPLUGINS_VERIFICATION", "vllm")
    for config in (SimpleNamespace(plugin_config=ours, target_model_config=model), SimpleNamespace()):
        with pytest.raises(VLLMValidationError, match="min_p"):
            params._validate_spec_decode(config)


def test_who_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a value that nobody understands; drafts with a q that vLLM never gets."""
    from vllm_specplugins.config import ConfigError
    from vllm_specplugins.engine.verify import check_verifier, verifies
    from vllm_specplugins.parsing import parse_config

    drawn = parse_config({"method": "early_exit", "exit_layer": 1, "draft_sample_method": "probabilistic"})
    for value, ours in (("", True), ("plugin", True), ("vllm", False)):
        monkeypatch.setenv("VLLM_SPECPLUGINS_VERIFICATION", value)
        check_verifier(parse_config(PROMPT_LOOKUP))
        assert verifies() == ours
    with pytest.raises(ConfigError, match="must be plugin with 'probabilistic' drafts, not vllm"):
        check_verifier(drawn)
    monkeypatch.setenv("VLLM_SPECPLUGINS_VERIFICATION", "fused")
    with pytest.raises(ConfigError, match="must be plugin or vllm, not 'fused'"):
        check_verifier(drawn)
