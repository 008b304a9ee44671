"""The OpenAI-compatible server with a cascade, asked by the OpenAI client: options of requests, and hostile ones."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
from bad_options import known, predictions, variants
from cases import mixed_prompts
from conftest import ALL, DEMO_MODEL, RUNNER
from hostile_requests import lists, sampling
from openai_server import served
from prometheus_client.parser import text_string_to_metric_families

from vllm_specplugins.engine.metrics.names import PREFIX, TABLE

SAME = "SPECPLUGINS_TESTS=all: the front end is the same on both runners"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(RUNNER == "v2" and not ALL, reason=SAME)]
STAGES = [{"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": 1}]
CASCADE = {"method": "cascade", "num_speculative_tokens": 4, "gate": "off", "stages": STAGES}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    arguments = ["--speculative-config", json.dumps(CASCADE), "--per-request-spec-decode-metrics", "summary"]
    with served(DEMO_MODEL, *arguments) as client:
        yield client


def complete(client: openai.OpenAI, prompt: list[int], options: Any = None) -> str:
    extra = {} if options is None else {"vllm_xargs": {"specplugins": options}}
    done = client.completions.create(model="demo", prompt=prompt, max_tokens=24, temperature=0, extra_body=extra)
    return done.choices[0].text


def refused(client: openai.OpenAI, prompt: list[int], options: Any) -> str:
    """Returns the sentence of the 400."""
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, prompt, options)
    message: str = caught.value.body["message"]  # type: ignore[index, call-overload]
    return message


def counter(client: openai.OpenAI, name: str) -> float:
    """A counter of /metrics."""
    with urllib.request.urlopen(str(client.base_url.join("../metrics"))) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}_total"))


def test_options_of_requests(client: openai.OpenAI) -> None:
    """Requests with good options, with bad ones and with none at once: 400 for the bad ones, in one sentence, and the
    tokens of no other request change."""
    prompts = mixed_prompts(str(DEMO_MODEL), 8)
    plain = [complete(client, prompt) for prompt in prompts]
    good = ['{"enabled":false}', '{"max_draft":2}', '{"stages":["prompt_lookup"]}', '{"max_context":64}', None]
    bad = {
        '{"enabled":"no"}': "specplugins: enabled must be true or false, not 'no'.",
        '{"max_draft":-1}': "specplugins: max_draft must be an integer from 0 to 64, not -1.",
        '{"stages":["eagle"]}': "specplugins: stages must be up to 2 of 'prompt_lookup', 'early_exit', not 'eagle'.",
        '{"draft":1}': "specplugins: 'draft' is not an option; the options are enabled, max_draft, max_context, "
        "stages, reference, learn; did you mean 'max_draft'?",
        "{": "specplugins must be a dictionary or its JSON text, not '{'.",
    }

    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(complete, client, prompts[i], good[i % len(good)]) for i in range(len(prompts))]
        refusals = {options: pool.submit(refused, client, prompts[0], options) for options in bad}
        assert [answer.result() for answer in answers] == plain
        assert {options: message.result() for options, message in refusals.items()} == bad
    assert complete(client, prompts[0]) == plain[0]


def test_flat_options(client: openai.OpenAI) -> None:
    """Kills: flat keys that do not arrive, or a bad one that does not answer 400."""
    prompt = mixed_prompts(str(DEMO_MODEL), 1)[0]

    def ask(**options: Any) -> Any:
        extra = {"vllm_xargs": {f"specplugins.{name}": value for name, value in options.items()}}
        return client.completions.create(model="demo", prompt=prompt, max_tokens=24, temperature=0, extra_body=extra)

    off, plain = ask(enabled=0, max_draft=2), ask()
    assert off.choices[0].text == plain.choices[0].text
    drafted = [answer.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"] for answer in (off, plain)]
    assert drafted[0] == 0 < drafted[1]
    with pytest.raises(openai.BadRequestError, match="max_draft must be an integer from 0 to 64, not 65"):
        ask(max_draft=65)


def test_hostile_options(client: openai.OpenAI) -> None:
    """While one client sends the worst, the tokens of others stay what they were and their drafts go on. Kills: a text
    that is tokenised in the engine (three faults, and nobody is drafted for any more), a missing bound, a
    RecursionError, which would be a 500.
    """
    prompts = mixed_prompts(str(DEMO_MODEL), 8)
    plain = [complete(client, prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        refusals = [pool.submit(refused, client, prompts[0], bad.options) for bad in known() * 2 if bad.refused]
        answers = [pool.submit(complete, client, prompt) for prompt in prompts]
        assert [answer.result() for answer in answers] == plain
        assert all(refusal.result().startswith("specplugins") for refusal in refusals)
    before = counter(client, "spec_decode_num_drafts")
    assert [complete(client, prompt) for prompt in prompts] == plain
    assert counter(client, "spec_decode_num_drafts") > before


def status(client: openai.OpenAI, path: str, body: dict[str, Any]) -> int:
    """What a request is answered; its JSON goes as Python writes it, surrogates and NaN included."""
    request = urllib.request.Request(str(client.base_url.join(path)), json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_hostile_variants(client: openai.OpenAI) -> None:
    """150 bad options and 40 bad predictions, of a seeded generator, biases and `min_p` of all types: 400, or served;
    the server lives, nothing has failed in it, and others have the tokens that they had. Fails if a list is checked up
    to some place, and travels behind it to where it is pickled, or if a depth, a long number or half of a character is
    no 400.
    """
    prompts = mixed_prompts(str(DEMO_MODEL), 4)
    plain = [complete(client, prompt) for prompt in prompts]
    common = {"model": "demo", "max_tokens": 2, "temperature": 0}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": prompts[0], "vllm_xargs": {"specplugins": hostile.options}, **common})
        for hostile in [*known(), *variants(seed=24, number=150)]
    ]
    messages = [{"role": "user", "content": "x"}]
    bodies += [
        ("chat/completions", {"messages": messages, "prediction": prediction, **common})
        for prediction in predictions(seed=24, number=40)
    ]
    # What vLLM refuses under speculation, and we let through.
    ours = [fields for fields in (*sampling(), *lists()) if "logit_bias" in fields or "min_p" in fields]
    bodies += [("completions", {"prompt": prompts[0], **common, **fields}) for fields in ours]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda asked: status(client, *asked), bodies))
    assert set(answers) == {200, 400}, [
        (found, body) for found, body in zip(answers, bodies, strict=True) if found > 400
    ]
    assert answers[0] == 400 and answers.count(400) > 75 and answers.count(200) > 20
    assert [complete(client, prompt) for prompt in prompts] == plain
    assert counter(client, "specplugins_faults") == 0


def test_ids_of_clients(client: openai.OpenAI) -> None:
    """/v1/responses gives a client's id to the engine as it is. Kills: an id as in vLLM's warm-up that ends drafting
    for others, or changes their tokens."""
    prompts = mixed_prompts(str(DEMO_MODEL), 6)
    plain = [complete(client, prompt) for prompt in prompts]
    body = {"model": "demo", "input": "x", "max_output_tokens": 100, "temperature": 0}
    ids = ["_v2_x", "_warmup_x", "_warmup_0_", "0 prompt_lookup", "specplugins", "\x00"]
    before = counter(client, "spec_decode_num_accepted_tokens")
    with ThreadPoolExecutor(12) as pool:
        statuses = [pool.submit(status, client, "responses", {**body, "request_id": name}) for name in ids]
        assert list(pool.map(lambda prompt: complete(client, prompt), prompts)) == plain
        assert {own.result() for own in statuses} == {200}
    assert counter(client, "spec_decode_num_accepted_tokens") > before


def test_prediction(client: openai.OpenAI) -> None:
    """OpenAI's `prediction` is drafted from, as a text and as parts, as a `reference` is, and changes no token;
    `vllm_xargs` come before it. Kills: a prediction that the protocol drops, a reference that gets lost."""

    def chat(question: str, prediction: Any = None, **options: Any) -> tuple[str, float]:
        before = counter(client, "spec_decode_num_accepted_tokens")
        given = json.dumps({"stages": ["0 prompt_lookup"], **options})
        done = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": question}],
            max_tokens=48,
            temperature=0,
            extra_body={"vllm_xargs": {"specplugins": given}, "ignore_eos": True},
            prediction=None if prediction is None else {"type": "content", "content": prediction},
        )
        return done.choices[0].message.content or "", counter(client, "spec_decode_num_accepted_tokens") - before

    accepted = np.zeros(5)
    for question in ("def f(x):", "import os", "class Tree:", "while True:"):
        text, without = chat(question)
        parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
        answers = [chat(question, text), chat(question, parts), chat(question, reference=text)]
        answers += [chat(question, text, reference=[1, 2])]
        assert [again for again, _ in answers] == [text] * 4
        accepted += [without, *(number for _, number in answers)]
    assert min(accepted[1:4]) > 1.2 * max(accepted[0], accepted[4])
    with pytest.raises(openai.BadRequestError, match="prediction must be"):
        chat("x", 5)
    for kind in ({"type": "x"}, {}, {"type": None}):
        with pytest.raises(openai.BadRequestError, match="prediction must be"):
            client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": "x"}],
                extra_body={"prediction": {**kind, "content": "x"}},
            )


UNDRAFTED = {"vllm_xargs": {"specplugins": '{"enabled":false}'}}
WEATHER = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "fahrenheit"]}, "city": {"enum": ["Paris", "Oslo"]}},
    "required": ["unit", "city"],
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


@pytest.mark.parametrize("choice", ["required", "auto", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_tool_calls(client: openai.OpenAI, choice: Any) -> None:
    """A streamed tool call has the same name, arguments, text and finish reason with drafts and without. Fails if a
    step of several tokens loses a part of a call, or if a draft leaves the grammar of the call's arguments."""
    texts, drafts = [], []
    for extra in ({}, UNDRAFTED):
        before, text = counter(client, "spec_decode_num_drafts"), ""
        stream = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "def weather(unit, city):\n    return weather(unit,"}],
            tools=[TOOL], tool_choice=choice, max_tokens=40, temperature=0, stream=True, extra_body=extra,
        )  # type: ignore[call-overload]  # fmt: skip
        for chunk in stream:
            [own] = chunk.choices
            text += (own.delta.content or "") + (f" ends: {own.finish_reason}" if own.finish_reason else "")
            for call in own.delta.tool_calls or ():
                text += f"{call.function.name or ''}{call.function.arguments or ''}"
        texts.append(text)
        drafts.append(counter(client, "spec_decode_num_drafts") - before)
    assert texts[0] == texts[1] and len(texts[0]) > 20 and drafts[0] > drafts[1] == 0
    assert choice == "auto" or "weather" in texts[0] or "city" in texts[0]


def test_logprobs_of_given_tokens(client: openai.OpenAI) -> None:
    """`logprob_token_ids` are answered at each place, also at those of accepted drafts, as without drafts. Fails if the
    places of drafts have none, or those of another place."""
    found = []
    prompt = mixed_prompts(str(DEMO_MODEL), 8)[1]
    for extra in ({}, UNDRAFTED):
        done = client.completions.create(
            model="demo", prompt=prompt, max_tokens=24, temperature=0, logprobs=1,
            extra_body={**extra, "logprob_token_ids": [20, 21, 500]},
        )  # fmt: skip
        logprobs = done.choices[0].logprobs
        assert logprobs is not None and logprobs.top_logprobs is not None
        found.append([dict(sorted(place.items())) for place in logprobs.top_logprobs])
    assert [list(place) for place in found[0]] == [list(place) for place in found[1]]
    assert len(found[0]) == 24 and min(map(len, found[0])) >= 3
    values = [np.array([value for place in run for value in place.values()]) for run in found]
    np.testing.assert_allclose(*values, atol=2e-3)


def settled_metrics(client: openai.OpenAI) -> dict[str, dict[tuple[str, ...], float]]:
    """All samples of /metrics by name and label values, when nothing runs any more."""
    last: dict[str, dict[tuple[str, ...], float]] = {}
    for _ in range(400):
        with urllib.request.urlopen(str(client.base_url.join("../metrics"))) as answer:
            text = answer.read().decode()
        found: dict[str, dict[tuple[str, ...], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
        ours = {name: found[name] for name in found if name.startswith("vllm:")}
        if sum(found["vllm:num_requests_running"].values()) == 0 and ours == last:
            return found
        last = ours
        time.sleep(0.3)
    raise AssertionError("the server does not settle")


def test_metrics(client: openai.OpenAI) -> None:
    """Every name of the table, and the sums over stages of what a server does between two looks: vLLM's own totals.
    Requests run at a time and one after the other, and the last steps before the server falls idle count, too. Kills: a
    report that is sent only with the next step; the histograms' times in ms; a stage left out; a request's rate lost.
    """
    prompts = mixed_prompts(str(DEMO_MODEL), 6)
    before = settled_metrics(client)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda prompt: complete(client, prompt), prompts))
    for prompt in prompts[:3]:
        complete(client, prompt)
    after = settled_metrics(client)

    def added(name: str) -> float:
        return sum(after[name].values()) - sum(before.get(name, {}).values())

    # No gate here, no fault, no store, no other server, nothing that learns.
    absent = {"gate_lengths", "faults", "stored_outputs", "stored_tokens", "exchanges", "learned", "learned_length"}
    absent |= {"step_cost_seconds", "undrafted_steps"}  # Model Runner V2; each step has a draft
    for metric in TABLE:
        shown = PREFIX + metric.name + {"counter": "_total", "gauge": "", "histogram": "_count"}[metric.kind]
        assert shown in after or metric.name in absent, metric.name
    names = [f"{PREFIX}{what}_tokens_total" for what in ("num_accepted", "num_draft", "kept", "drafted")]
    accepted, verified, kept, drafted = map(added, names)
    assert 0 < accepted <= verified <= kept <= drafted
    assert accepted == added("vllm:spec_decode_num_accepted_tokens_total")
    assert verified == added("vllm:spec_decode_num_draft_tokens_total")
    assert added(f"{PREFIX}num_accepted_tokens_per_pos_total") == accepted
    assert added(f"{PREFIX}request_acceptance_rate_count") == len(prompts) + 3
    for times in ("step_draft_time_seconds", "draft_time_seconds"):
        assert 0 < added(f"{PREFIX}{times}_sum") < 60
    labels = next(iter(after[f"{PREFIX}drafted_tokens_total"]))
    assert labels[-1] in ("0 prompt_lookup", "1 early_exit") and set(labels) >= {"cascade", "demo", "0"}


def test_summary_of_a_request(client: openai.OpenAI) -> None:
    """vLLM's summary in the response is right for the plugin's methods, whose drafts have their actual lengths."""
    [prompt] = mixed_prompts(str(DEMO_MODEL), 1)
    done = client.completions.create(model="demo", prompt=prompt, max_tokens=24, temperature=0)
    summary = done.model_extra["metrics"]["speculative_decoding"]
    assert 0 < summary["num_accepted_draft_tokens"] <= summary["num_draft_tokens"]
    assert summary["num_spec_tokens"] == 4
