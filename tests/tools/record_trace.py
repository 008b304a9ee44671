"""Records the trace that `check` replays: `python tests/tools/record_trace.py MODEL PROMPTS OUT`.

A real engine with few blocks serves prompts (JSON lines with "text") at temperature 0, some of which arrive late; a
proposer that drafts by prompt lookup writes down what it is shown.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from vllm_specplugins.config import PromptLookupConfig
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext

MAX_NUM_DRAFT, MAX_MODEL_LEN, NUM_REQUESTS, OUTPUT_TOKENS, LONGEST_PROMPT = 4, 256, 16, 56, 190
OPTIONS: Sequence[dict[str, Any]] = ({}, {}, {"max_draft": 2}, {}, {"enabled": False}, {})


class Recorder:
    """Steps as plain lists: (requests, tokens new to each, requests that were forgotten before)."""

    steps: ClassVar[list[dict[str, Any]]] = []  # of this process; the program reads it

    def __init__(self, options: dict[str, Any], context: ProposerContext):
        # It brings numba, and vLLM 0.32's CPU build does not start in a process that has imported that.
        from vllm_specplugins.proposers.prompt_lookup import PromptLookup

        self._lookup = PromptLookup(PromptLookupConfig(), context)
        self._known: dict[str, int] = {}
        self._gone: list[str] = []

    def propose(self, batch: DraftBatch) -> Draft:
        new = []
        for request_id, tokens in zip(batch.request_ids, batch.token_ids, strict=True):
            new.append(tokens[self._known.get(request_id, 0) :].tolist())
            self._known[request_id] = len(tokens)
        self.steps.append({"requests": list(batch.request_ids), "new": new, "gone": self._gone})
        self._gone = []
        return self._lookup.propose(batch)

    def observe(self, feedback: Feedback) -> None:
        self._lookup.observe(feedback)

    def forget(self, request_ids: Sequence[str]) -> None:
        self._gone = [*self._gone, *request_ids]
        self._lookup.forget(request_ids)


def main(model: str, prompts: str, out: str) -> None:
    """Serves, and writes the trace."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=6,
        num_gpu_blocks_override=30,
        block_size=32,
        max_num_batched_tokens=128,
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config={
            "method": "custom",
            "proposer": f"{Recorder.__module__}:Recorder",
            "num_speculative_tokens": MAX_NUM_DRAFT,
        },
    )
    texts = [json.loads(line)["text"] for line in Path(prompts).read_text("utf-8").splitlines()]
    tokenizer = llm.get_tokenizer()
    lengths: dict[str, int] = {}
    for number in range(NUM_REQUESTS):
        tokens = tokenizer.encode(texts[number * len(texts) // NUM_REQUESTS])
        prompt = tokens[-(LONGEST_PROMPT - 11 * number) :]
        options = OPTIONS[number % len(OPTIONS)]
        params = SamplingParams(
            temperature=0, max_tokens=OUTPUT_TOKENS + 3 * number, extra_args={"specplugins": options}
        )
        lengths[str(number)] = len(prompt)
        llm.llm_engine.add_request(str(number), {"type": "token", "prompt_token_ids": prompt}, params)
        for _ in range(2 * (number % 3)):  # the next one arrives so many steps later
            llm.llm_engine.step()
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    write(Path(out), lengths, llm.model_config.get_vocab_size(), preemptions(llm))


def preemptions(llm: Any) -> int:
    """How many there were: a trace without one is not worth much."""
    gone = [request_id for step in Recorder.steps for request_id in step["gone"]]
    return len(gone) - len(set(gone))


def write(out: Path, prompt_lengths: dict[str, int], vocab_size: int, num_preempted: int) -> None:
    """One compressed file of arrays; see tools/check/trace.py."""
    names = list(dict.fromkeys(request_id for step in Recorder.steps for request_id in step["requests"]))
    index = {name: number for number, name in enumerate(names)}
    histories: dict[str, list[int]] = {name: [] for name in names}
    for step in Recorder.steps:
        for request_id, new in zip(step["requests"], step["new"], strict=True):
            histories[request_id] += new
    # vLLM's own request ids are the caller's with something behind a dash.
    numbers = [int(name.split("-")[0]) for name in names]
    np.savez_compressed(
        out,
        tokens=np.concatenate([np.array(histories[name], np.uint16) for name in names]),
        lengths=np.array([len(histories[name]) for name in names], np.int32),
        prompt_lengths=np.array([prompt_lengths[str(number)] for number in numbers], np.int32),
        batches=np.concatenate([np.array([index[r] for r in step["requests"]], np.int16) for step in Recorder.steps]),
        batch_sizes=np.array([len(step["requests"]) for step in Recorder.steps], np.int16),
        gone=np.array([index[r] for step in Recorder.steps for r in step["gone"] if r in index], np.int16),
        num_gone=np.array([sum(r in index for r in step["gone"]) for step in Recorder.steps], np.int16),
        options=np.array(json.dumps([OPTIONS[number % len(OPTIONS)] for number in numbers])),
        limits=np.array([vocab_size, MAX_MODEL_LEN, MAX_NUM_DRAFT, num_preempted], np.int32),
    )


if __name__ == "__main__":
    # Under its own name, which the engine imports it by.
    import record_trace

    record_trace.main(*sys.argv[1:])
