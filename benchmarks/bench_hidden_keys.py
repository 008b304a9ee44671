"""Would a store of outputs draft better if states of the model were its keys?

    python benchmarks/bench_hidden_keys.py TRAJECTORIES.json    tau-bench's historical_trajectories/gpt-4o-airline.json

A suffix match misses what stands in the store in other words. Oilbird (2026) keys stored tokens by hidden states. This
play runs a chat model over recorded conversations, stores one state for each token of the agent's turns, and drafts
after the stored token with the nearest state that the newest token follows. Answers are the recording's, so a draft is
accepted as far as it agrees; steps cost what Llama-3.1-8B costs on an H100, drafting costs nothing.

`suffix_lookup` stands alone, and before the states as a cascade; the gate chooses lengths in both. "best of both" knows
the acceptance, and takes at each step the longer of the two drafts at their best lengths: no rule can exceed it.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from vllm_specplugins.draft import Draft, DraftBatch, ProposerContext
from vllm_specplugins.methods import behind_gate, build_proposer
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.tools.files import CHAT_MODEL
from vllm_specplugins.tools.progress import progress
from vllm_specplugins.tools.replay.costs import Load, costs_of
from vllm_specplugins.tools.replay.data import Traffic, number_of
from vllm_specplugins.tools.replay.simulate import simulate

K = 31
MAX_TOKENS = 6000  # of a conversation; later turns are left out
CHUNK = 512  # tokens of one pass of the model
BINS = 24  # of cosines, for the share of first tokens that were right
SUFFIX = {"method": "suffix_lookup", "num_speculative_tokens": K}
STATES = {"method": "custom", "proposer": f"{__name__}:StateLookup"}
Turns = list[tuple[int, int]]


def conversations(path: Path, limit: int, tokenizer: Any) -> Iterator[tuple[list[int], Turns]]:
    """Token ids of each conversation of the first trial, and begin and end of each of the agent's turns."""
    recorded = [row for row in json.loads(path.read_text()) if row["trial"] == 0]
    for row in recorded[:limit]:
        token_ids: list[int] = []
        turns: Turns = []
        for message in row["traj"]:
            token_ids += tokenizer.encode(f"<|im_start|>{message['role']}\n")
            text = tokenizer.encode(_text(message) + "<|im_end|>")
            if message["role"] == "assistant" and len(token_ids) + len(text) <= MAX_TOKENS:
                turns.append((len(token_ids), len(token_ids) + len(text)))
            token_ids += [*text, *tokenizer.encode("\n")]
        yield token_ids[: turns[-1][1]], turns


def _text(message: dict[str, Any]) -> str:
    calls = [
        {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
        for call in message.get("tool_calls") or ()
    ]
    return (message.get("content") or "") + "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)


@torch.inference_mode()
def states_of(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """[num_tokens, hidden_size]: the state after the last layer, from which the next token is chosen."""
    past = DynamicCache()
    chunks = torch.tensor([token_ids]).split(CHUNK, dim=1)
    return torch.cat([model(chunk, past_key_values=past, use_cache=True).last_hidden_state[0] for chunk in chunks])


class Recording:
    """Turns of the agent as requests, in order, and the reduced state of each token of a request."""

    def __init__(self, texts: Sequence[tuple[Sequence[int], Turns]], states: Sequence[torch.Tensor], dims: int):
        sample = torch.cat([state[::4] for state in states[:8]])
        center, axes = sample.mean(0), torch.pca_lowrank(sample, dims)[2] if dims else None
        self.traffic, self.states, self.conversations = Traffic(), list[np.ndarray](), list[int]()
        for number, ((token_ids, turns), state) in enumerate(zip(texts, states, strict=True)):
            reduced = state - center if axes is None else (state - center) @ axes
            unit = torch.nn.functional.normalize(reduced, dim=1).numpy()
            for begin, end in turns:
                self.traffic.add(token_ids[:begin], token_ids[begin:end])
                self.states.append(unit[:end])
                self.conversations.append(number)


class StateLookup:
    """Drafts what followed the stored token of the nearest state, among those that the newest token follows. Outputs
    enter when their request ends. The confidence is the share of right first tokens at this cosine so far."""

    recording: Recording

    def __init__(self, options: Any, context: ProposerContext):
        self._width = context.max_num_draft
        self._keys: dict[int, list[tuple[np.ndarray, int, int]]] = defaultdict(list)  # by the token after the state
        self._right, self._tried = np.full(BINS, 0.5), np.ones(BINS)
        self._open: dict[str, tuple[int, int, int]] = {}  # bin, length of the history, and first token of a draft

    def propose(self, batch: DraftBatch) -> Draft:
        token_ids, num_draft = np.zeros((batch.num_reqs, self._width), np.int32), np.zeros(batch.num_reqs, np.int32)
        confidence = np.zeros(batch.num_reqs, np.float32)
        for row, (name, history) in enumerate(zip(batch.request_ids, batch.token_ids, strict=True)):
            self._learn(name, history)
            tokens, cosine = self.nearest(number_of(name), len(history), int(history[-1]))
            count = min(len(tokens), int(batch.max_num_draft[row]))
            if count:
                bin = min(BINS - 1, int(BINS * max(0.0, cosine)))
                token_ids[row, :count], num_draft[row] = tokens[:count], count
                confidence[row] = min(0.999, self._right[bin] / self._tried[bin])
                self._open[name] = bin, len(history), int(tokens[0])
        return Draft(token_ids, num_draft, confidence)

    def _learn(self, name: str, history: Any) -> None:
        bin, length, token = self._open.pop(name, (0, 0, 0))
        if length and len(history) > length:
            self._tried[bin] += 1
            self._right[bin] += history[length] == token

    def nearest(self, number: int, length: int, newest: int) -> tuple[Any, float]:
        """Tokens that may follow a history of this length, and the cosine of the states before its newest token."""
        entries = self._keys.get(newest)
        if not entries:
            return (), 0.0
        cosines = np.stack([state for state, _, _ in entries]) @ self.recording.states[number][length - 2]
        best = int(cosines.argmax())
        _, request, place = entries[best]
        history = self.recording.traffic.histories[request]
        return history[place + 2 : place + 2 + self._width], float(cosines[best])

    def observe(self, feedback: Any) -> None:
        pass

    def forget(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            number = number_of(name)
            self._open.pop(name, None)
            history, begin = self.recording.traffic.histories[number], self.recording.traffic.prompt_lengths[number]
            for place in range(begin, len(history) - 2):
                self._keys[int(history[place + 1])].append((self.recording.states[number][place], number, place))


class Best:
    """Drafts exactly the tokens that will be accepted: of the suffix lookup, or of the better of it and the states."""

    def __init__(self, with_states: bool, context: ProposerContext):
        self._suffix = build_proposer(parse_config({**SUFFIX, "gate": "off"}), context)
        self._states = StateLookup({}, context) if with_states else None
        self._histories = StateLookup.recording.traffic.histories

    def propose(self, batch: DraftBatch) -> Draft:
        draft, longest = self._suffix.propose(batch), np.zeros(batch.num_reqs, np.int32)
        token_ids = np.zeros((batch.num_reqs, K), np.int32)
        for row, (name, history) in enumerate(zip(batch.request_ids, batch.token_ids, strict=True)):
            truth = self._histories[number_of(name)][len(history) : len(history) + K]
            drafts = [draft.token_ids[row, : draft.num_draft[row]]]
            if self._states is not None:
                drafts.append(self._states.nearest(number_of(name), len(history), int(history[-1]))[0])
            longest[row] = min(max(_num_right(tokens, truth) for tokens in drafts), batch.max_num_draft[row])
            token_ids[row, : len(truth)] = truth
        return Draft(token_ids, longest)

    def observe(self, feedback: Any) -> None:
        self._suffix.observe(feedback)

    def forget(self, request_ids: Sequence[str]) -> None:
        self._suffix.forget(request_ids)
        if self._states is not None:
            self._states.forget(request_ids)


def _num_right(tokens: Any, truth: Any) -> int:
    count = min(len(tokens), len(truth))
    return int(np.equal(tokens[:count], truth[:count]).cumprod().sum())


def arms() -> dict[str, Any]:
    def ours(config: dict[str, Any]) -> Any:
        return partial(build_proposer, behind_gate(parse_config(config)))

    cascade = {"method": "cascade", "stages": [{"method": "suffix_lookup"}, STATES], "num_speculative_tokens": K}
    return {
        "none": None,
        "suffix_lookup": ours(SUFFIX),
        "states": ours({**STATES, "num_speculative_tokens": K}),
        "suffix_lookup, then states": ours(cascade),
        "best length of suffix_lookup": partial(Best, False),
        "best of both": partial(Best, True),
    }


def report(recording: Recording, title: str) -> None:
    StateLookup.recording = recording
    load = Load(costs_of("llama-3.1-8b"), draft_us=0.0)
    print(f"{title}; {recording.traffic.num_output_tokens} tokens in {len(recording.traffic.histories)} turns")
    base = 0.0
    for name, build in arms().items():
        totals = simulate(recording.traffic, build, K, load)
        base = base or totals.tokens_per_ms
        per_step = totals.emitted / totals.steps
        print(f"{name:30} {per_step:5.2f} tokens a step  {totals.tokens_per_ms / base:5.3f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trajectories", type=Path)
    parser.add_argument("--num-conversations", type=int, default=50)
    parser.add_argument("--dims", type=int, nargs="+", default=[0, 64], help="of a reduced state; 0: all")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(CHAT_MODEL)
    model = AutoModelForCausalLM.from_pretrained(CHAT_MODEL, dtype=torch.float32).eval().model
    texts = list(conversations(args.trajectories, args.num_conversations, tokenizer))
    states = list[torch.Tensor]()
    with progress() as bars:
        task = bars.add_task("Conversations read by the model", total=len(texts))
        for token_ids, _ in texts:
            states.append(states_of(model, token_ids))
            bars.advance(task)
    for dims in args.dims:
        report(Recording(texts, states, dims), f"{dims or states[0].shape[1]} dimensions")


if __name__ == "__main__":
    main()
