"""Prompts and generation helpers that the engine tests share."""

from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
from conftest import ALL, INTERPRETED, NUM_LAYERS
from prompts import load_prompts
from transformers import AutoTokenizer

PROMPT_LOOKUP = {"method": "prompt_lookup", "num_speculative_tokens": 4}

# K = 31 takes Triton's interpreter minutes a test.
IS_SHORT = INTERPRETED and not ALL
LONG = PROMPT_LOOKUP if IS_SHORT else {"method": "prompt_lookup"}

SUFFIX_LOOKUP = {"method": "suffix_lookup", "num_speculative_tokens": 4, "store_bytes": 1 << 22}


def early_exit(layer: int, num_draft: int = 4) -> dict[str, Any]:
    return {"method": "early_exit", "exit_layer": layer, "num_speculative_tokens": num_draft}


LOOKUP = {"method": "prompt_lookup"}
EXIT = {"method": "early_exit", "exit_layer": NUM_LAYERS // 2}


def cascade(policy: str, gate: str = "off", stages: Any = (LOOKUP, EXIT)) -> dict[str, Any]:
    config = {"method": "cascade", "num_speculative_tokens": 4, "stages": list(stages)}
    return {**config, "policy": policy, "gate": gate}


PLAIN_TOKENS = 24  # that each of the 50 prompts is answered without speculation
NUM_TOKENS = 21  # one from the prompt and four whole steps of K + 1, so that no draft is cut

# Hardly more blocks than one request can fill: of eight at a time, some are preempted.
STRESS: dict[str, Any] = {
    "max_model_len": 256 if INTERPRETED else 512,
    "num_gpu_blocks_override": 10 if INTERPRETED else 18,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 96,
}


def mixed_prompts(model: str, count: int) -> list[list[int]]:
    """Held-out prompts of both kinds as token ids, cut to mixed lengths of at least 3 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = load_prompts("continue", (count + 1) // 2) + load_prompts("edit", 30)
    prompts = [tokenizer.encode(text) for text in texts]
    longest = 150 if INTERPRETED else 331
    lengths = [3 + 17 * i % longest for i in range(count)]
    return [prompts[i % len(prompts)][-length:] for i, length in enumerate(lengths)]


def generate(llm: Any, prompts: list[list[int]], batch_sizes: list[int], **sampling: Any) -> list[list[int]]:
    """Output token ids of each prompt; the prompts go in batches of the given sizes, in turn."""
    from vllm import SamplingParams

    params = SamplingParams(
        **{
            "temperature": 0,
            "max_tokens": 16 if INTERPRETED else 24,
            "ignore_eos": True,
            "detokenize": False,
            **sampling,
        }
    )
    outputs: list[list[int]] = []
    turn = 0
    while len(outputs) < len(prompts):
        size = batch_sizes[turn % len(batch_sizes)]
        batch = [{"prompt_token_ids": prompt} for prompt in prompts[len(outputs) : len(outputs) + size]]
        results = llm.generate(batch, params, use_tqdm=False)
        outputs += [list(result.outputs[0].token_ids) for result in results]
        turn += 1
    return outputs


def ask_turns(llm: Any, turns: list[list[int]], each: Any = (), **sampling: Any) -> list[list[int]]:
    """What a session (vLLM's StreamingInput) answers to each turn, asked where the engine takes requests; `each` has
    sampling parameters of single turns."""
    from vllm import SamplingParams

    core, answers = llm.llm_engine.engine_core.engine_core, list[list[int]]()
    sampling = {"temperature": 0, "ignore_eos": True, "detokenize": False, **sampling}
    name = f"session {np.random.default_rng().integers(1 << 60)}"
    for tokens, own in zip_longest((*turns, None), each, fillvalue={}):  # without another turn, it ends
        request = llm.llm_engine.input_processor.process_inputs(
            name,
            {"type": "token", "prompt_token_ids": list(tokens or [0])},
            SamplingParams(**sampling | own),
            supported_tasks=("generate",),
            resumable=tokens is not None,
        )
        core.add_request(*core.preprocess_add_request(request))
        answer, is_over = list[int](), tokens is None
        while not is_over:
            stepped, is_executed = core.step_fn()
            core.post_step(is_executed)
            outputs = [output for each_client in (stepped or {}).values() for output in each_client.outputs]
            for output in (output for output in outputs if output.request_id == name):
                answer += output.new_token_ids
                is_over |= output.finish_reason is not None
        answers.append(answer)
    return answers[:-1]


def answered_alone(llm: Any, turns: list[list[int]], answers: list[list[int]], **sampling: Any) -> list[list[int]]:
    """What a session's turns are answered as prompts of the same tokens, without drafts."""
    so_far, whole, off = list[int](), list[list[int]](), {"specplugins": {"enabled": False}}
    for turn, answer in zip(turns, answers, strict=True):
        whole.append([*so_far, *turn])
        so_far = [*whole[-1], *answer[:-1]]  # vLLM goes on after the last computed token
    return generate(llm, whole, [len(whole)], **{"extra_args": off, **sampling})


def num_dropped(llm: Any) -> int:
    """Accepted tokens that came after an end, as the scheduler counts them."""
    return int(llm.llm_engine.engine_core.engine_core.scheduler._dropped.total())


def progress(llm: Any) -> np.ndarray:
    """Decoding steps of single requests, and draft tokens that they emitted, as our counters have them at rest."""
    for _ in range(3):  # as a server does when nothing is left to do
        llm.llm_engine.step()
    stats = llm.collective_rpc("specplugins_stats")[0]
    return np.array([stats["request_steps"], stats["accepted_tokens"]])


def check_counted(llm: Any, before: np.ndarray, answers: list[list[int]]) -> None:
    """Tokens a step since then are those of these requests' answers."""
    assert (progress(llm) - before).sum() == sum(map(len, answers)) - len(answers), "tokens a step, exactly"


def check_ends(llm: Any, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Requests side by side that end at a stop id, an end token, a stop string or `max_tokens`, and copies (n = 2), are
    counted up to their ends: exactly what the engine gives out, which knows no strings."""
    from vllm import SamplingParams

    tokenizer, longest = llm.get_tokenizer(), llm.llm_engine.vllm_config.num_speculative_tokens
    params = []
    for index, answer in enumerate(answers):
        own = SamplingParams(temperature=0, max_tokens=len(answer) - index % 3, ignore_eos=True)
        match index % 4:
            case 0:
                own.stop_token_ids = [answer[7]]
            case 1:
                own._eos_token_id = answer[9]
            case 2:
                own.stop, own.output_text_buffer_length = [tokenizer.decode(answer[4:6])], 8
            case 3:
                own.n, own.temperature, own.top_k = 2, 1.0, 1
        params.append(own)
    before, given = progress(llm), [0]
    take, core = llm.llm_engine.engine_core.get_output, llm.llm_engine.engine_core

    def counted() -> Any:
        taken = take()
        given[0] += sum(len(output.new_token_ids) for output in taken.outputs)
        return taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "get_output", counted)
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    outputs = [output for result in results for output in result.outputs]
    for answer, own, result in zip(answers, params, results, strict=True):
        found = [list(output.token_ids) for output in result.outputs]
        assert found == [answer[: len(found[0])]] * own.n and set(found[0][:-1]).isdisjoint(own.stop_token_ids)
    reasons = [output.stop_reason for output in outputs if output.finish_reason == "stop"]
    assert len(reasons) > len(prompts) // 2 and any(isinstance(reason, str) for reason in reasons)
    assert (progress(llm) - before).sum() == given[0] - len(outputs)
    num_strings = sum(bool(own.stop) for own in params)
    assert 0 <= given[0] - sum(len(output.token_ids) for output in outputs) <= longest * num_strings


def check_session(llm: Any, prompt: list[int], num_tokens: int = 11, **sampling: Any) -> None:
    """Three turns, a long one and one of a single token after it, are answered as prompts of the same tokens are."""
    turns = [prompt, prompt[3:11], prompt[5:6]]
    answers = ask_turns(llm, turns, max_tokens=num_tokens, **sampling)
    assert answered_alone(llm, turns, answers, max_tokens=num_tokens, **sampling) == answers


def edit_params(rng: np.random.Generator, vocab_size: int) -> list[Any]:
    """Each parameter that edits logits alone, all together, none."""
    from vllm import SamplingParams

    def tokens(number: int) -> list[int]:
        return rng.choice(vocab_size, number, replace=False).tolist()

    parameters: list[dict[str, Any]] = [
        {"allowed_token_ids": tokens(60)},
        {"logit_bias": dict(zip(tokens(30), rng.normal(size=30).tolist(), strict=True))},
        {"min_tokens": 4, "stop_token_ids": tokens(20)},
        {"repetition_penalty": 1.7, "frequency_penalty": -0.3, "presence_penalty": 0.8},
    ]
    together = {name: value for own in parameters for name, value in own.items()}
    made = [SamplingParams(**own) for own in (*parameters, together, {})]
    made[4]._bad_words_token_ids = [tokens(length) for length in (1, 2, 2, 3)] + [[7, 8], [8, 7], [7, 7, 8], [8, 8]]
    return made
