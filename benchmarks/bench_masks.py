"""Costs of masks of structured output, at a vocabulary of 151,936 tokens.

    python benchmarks/bench_masks.py [--out FILE]     CPU time of filling a step's masks, their rows and megabytes
    python benchmarks/bench_masks.py --engines        tokens per second with JSON, beside no speculation, on V1

The first one runs with vLLM 0.32, and with 0.33 where PYTHONPATH has tests/vllm_033.sh's overlay: vLLM's masks with K
draft tokens, ours, and no speculation take turns. The second one serves 32 requests with a random Llama; drafts are all
right or all wrong, and their engines and that without speculation take turns.
"""

import argparse
import base64
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
import numpy as np

VOCAB_SIZE, STARTED = 151_936, 3  # tokens that a request has written
ROUNDS, LEAST_MS = 15, 30.0  # steps of each arm; many more where no speculation takes microseconds
STRING = {"type": "string"}
ITEM = {"type": "object", "properties": {"title": STRING, "count": {"type": "integer"}}, "required": ["title", "count"]}
SCHEMA = {
    "type": "object",
    "properties": {"name": STRING, "address": STRING, "items": {"type": "array", "items": ITEM}},
    "required": ["name", "address", "items"],
}
ITEMS = [{"title": title, "count": 3} for title in ("a lamp", "two chairs", "a table of oak")]
TEXT = json.dumps({"name": "Ann Lee from the sales office", "address": "12 Karl Johans gate, Oslo", "items": ITEMS})
MODEL = Path(__file__).parents[1] / "examples" / "demo" / "model"
ANSWERS: dict[tuple[int, ...], list[int]] = {}  # prompt -> what the target answers


def tekken() -> tuple[list[bytes], list[int]]:
    """A vocabulary of this size, and the tokens of TEXT."""
    import mistral_common

    data = json.loads((Path(mistral_common.__file__).parent / "data" / "tekken_240911.json").read_text())
    tokens = [base64.b64decode(token["token_bytes"]) for token in data["vocab"]][: VOCAB_SIZE - 1000]
    index, text, ids = {token: i + 1 for i, token in reversed([*enumerate(tokens)])}, TEXT.encode(), list[int]()
    while text:
        longest = next(n for n in range(24, 0, -1) if text[:n] in index)
        ids.append(index[text[:longest]])
        text = text[longest:]
    unused = [f"<unused{i}>".encode() for i in range(VOCAB_SIZE - len(tokens) - 1)]
    return [b"<eos>", *tokens, *unused], ids


def fill_times(num_reqs: int, arms: dict[str, tuple[int, int, bool]], tokens: list[bytes], ids: list[int]) -> Any:
    """CPU milliseconds, rows and megabytes of a step by arm: K, draft tokens a request, whether masks are ours."""
    import xgrammar
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    from vllm_specplugins.engine import masks

    info = xgrammar.TokenizerInfo(tokens, vocab_size=VOCAB_SIZE, stop_token_ids=[0])
    context = xgrammar.GrammarCompiler(info, max_threads=1).compile_json_schema(json.dumps(SCHEMA))
    original, steps = StructuredOutputManager.grammar_bitmask, dict[str, Callable[[], Any]]()
    for arm, (length, num_draft, is_ours) in arms.items():
        config = SimpleNamespace(
            num_speculative_tokens=length,
            speculative_config=SimpleNamespace(),
            scheduler_config=SimpleNamespace(max_num_seqs=num_reqs),
            model_config=SimpleNamespace(is_diffusion=False, skip_tokenizer_init=True),
            parallel_config=SimpleNamespace(distributed_executor_backend=None),
            structured_outputs_config=SimpleNamespace(enable_in_reasoning=True),
        )
        manager: Any = StructuredOutputManager(config)  # type: ignore[arg-type]
        manager.backend = SimpleNamespace(
            allocate_token_bitmask=lambda n: xgrammar.allocate_token_bitmask(n, VOCAB_SIZE)
        )
        requests, names = dict[str, Any](), [str(i) for i in range(num_reqs)]
        for name in names:
            grammar = XgrammarGrammar(vocab_size=VOCAB_SIZE, matcher=xgrammar.GrammarMatcher(context), ctx=context)
            assert grammar.accept_tokens(name, ids[:STARTED])
            requests[name] = SimpleNamespace(
                structured_output_request=SimpleNamespace(grammar=grammar), request_id=name
            )
        drafts = {name: ids[STARTED : STARTED + num_draft] for name in names if num_draft}
        assert all(len(draft) == num_draft for draft in drafts.values())
        fill = masks._fill if is_ours else (lambda original, *arguments: original(*arguments))
        steps[arm] = lambda fill=fill, arguments=(manager, requests, names, drafts): fill(original, *arguments)
    times: dict[str, list[float]] = {arm: [] for arm in steps}
    sizes = dict[str, tuple[int, float]]()
    in_turn = list(steps)
    while (num := len(times["none"])) < ROUNDS or sum(times["none"]) < LEAST_MS:
        for arm in in_turn[num % len(steps) :] + in_turn[: num % len(steps)]:
            began = time.process_time_ns()
            filled = steps[arm]()
            times[arm].append((time.process_time_ns() - began) / 1e6)
            sizes[arm] = len(filled), round(filled.nbytes / 1e6, 2)
    medians = {arm: round(statistics.median(times[arm]), 4) for arm in steps}
    return {arm: {"fill_ms": medians[arm], "rows": sizes[arm][0], "mb": sizes[arm][1]} for arm in steps}


def fill_table() -> list[dict[str, Any]]:
    (tokens, ids), table = tekken(), []
    for num_reqs in (8, 64):
        for length in (31, 15, 5):
            for num_draft in sorted({0, 5, length}):
                arms = {"none": (0, 0, False), "vllm": (length, num_draft, False), "ours": (length, num_draft, True)}
                row = {"vllm": version("vllm").split("+")[0], "requests": num_reqs, "k": length, "drafted": num_draft}
                row |= {"arms": fill_times(num_reqs, arms, tokens, ids)}
                print(json.dumps(row), flush=True)
                table.append(row)
    return table


class Oracle:
    """Drafts what the target will answer, or, with the option `wrong`, other words."""

    def __init__(self, options: Any, context: Any):
        from transformers import AutoTokenizer

        self._length, self._wrong = context.max_num_draft, options.get("wrong")
        vocab = AutoTokenizer.from_pretrained(MODEL).get_vocab()
        self._words = sorted(token_id for token, token_id in vocab.items() if token.isascii() and token.isalpha())

    def observe(self, feedback: Any) -> None:
        pass

    def forget(self, request_ids: Any) -> None:
        pass

    def propose(self, batch: Any) -> Any:
        import bench_masks

        from vllm_specplugins.draft import Draft

        token_ids = np.zeros((len(batch.request_ids), self._length), np.int32)
        num_draft = np.zeros(len(token_ids), np.int32)
        for row, history in enumerate(batch.token_ids):
            written = tuple(history.tolist())
            for prompt, answer in bench_masks.ANSWERS.items():
                if written[: len(prompt)] == prompt:
                    rest = answer[len(written) - len(prompt) :][: int(batch.max_num_draft[row])]
                    if self._wrong:
                        rest = [next(word for word in self._words[token % 99 :] if word != token) for token in rest]
                    token_ids[row, : len(rest)], num_draft[row] = rest, len(rest)
        return Draft(token_ids, num_draft)


def engines(num_rounds: int, num_tokens: int) -> None:
    """Tokens per CPU second of each engine relative to that without speculation: the median and the range of rounds."""
    import bench_masks
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    import vllm_specplugins

    vllm_specplugins.register()
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((MODEL / "config.json").read_text())
        config |= {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "tie_word_embeddings": True}
        Path(folder, "config.json").write_text(json.dumps(config))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            Path(folder, name).write_text((MODEL / name).read_text())
        common: dict[str, Any] = {"model": folder, "load_format": "dummy", "dtype": "float32", "max_model_len": 512}
        common |= {"max_num_seqs": 32, "enforce_eager": True, "enable_prefix_caching": False, "seed": 0}
        custom = {"method": "custom", "proposer": "bench_masks:Oracle", "num_speculative_tokens": 31}
        arms: dict[str, Any] = {
            "none": LLM(**common),
            "right": LLM(**common, speculative_config=custom),
            "wrong": LLM(**common, speculative_config=custom | {"options": {"wrong": True}}),
        }
    schema = StructuredOutputsParams(json={"type": "object", "properties": {"a": STRING}, "required": ["a"]})
    params = SamplingParams(temperature=0, max_tokens=num_tokens, structured_outputs=schema, detokenize=False)
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(num_rounds + 1):
        prompts = [[3 + number, 40 + i, 7, 9, 300 + 2 * i] for i in range(32)]
        for arm in ("none", *sorted(arms.keys() - {"none"}, reverse=bool(number % 2))):
            began = time.process_time()
            done = arms[arm].generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            seconds = time.process_time() - began
            answers = [list(one.outputs[0].token_ids) for one in done]
            if arm == "none":
                bench_masks.ANSWERS = dict(zip(map(tuple, prompts), answers, strict=True))
            assert answers == list(bench_masks.ANSWERS.values()), arm
            rates[arm].append(sum(map(len, answers)) / seconds)
    for arm, each in rates.items():
        ratios = [mine / none for mine, none in zip(each[1:], rates["none"][1:], strict=True)]
        median, least, most = statistics.median(ratios), min(ratios), max(ratios)
        print(f"{arm}: {median:.3f} ({least:.3f}-{most:.3f}); {each[1]:.0f} tokens per second of CPU time", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="adds the rows to a file of figures")
    parser.add_argument("--engines", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    arguments = parser.parse_args()
    if arguments.engines:
        engines(arguments.rounds, arguments.tokens)
        return
    table = fill_table()
    if arguments.out:
        data = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"versions": {}, "rows": []}
        mine = table[0]["vllm"]
        facts = {
            "command": "python benchmarks/bench_masks.py --out docs/figures/masks.json, with vLLM 0.32 and 0.33",
            "commit": "the one that published the figures",
            "versions": {"vllm": ", ".join(sorted({row["vllm"] for row in (*data["rows"], *table)}))},
            "clock": f"CPU time, the median of at least {ROUNDS} steps that take turns",
            "interval": "none",
            "vocabulary": VOCAB_SIZE,
            "engines": data.get("engines"),
            "rows": [row for row in data["rows"] if row["vllm"] != mine] + table,
        }
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
