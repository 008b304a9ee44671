"""Logs the chat model's greedy answers to a task of `bench` as token ids, in a form that `replay` plays.

    python tests/traces/answers.py edit docs/figures/chat_answers.jsonl

A test plays them to compute a cell of the table of the chat model anew.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

TOKENS = 64  # as in the table


def main() -> None:
    from chat_model import chat_model
    from vllm import LLM, SamplingParams, TokensPrompt

    from vllm_specplugins.tools.base_model import load_tokenizer
    from vllm_specplugins.tools.bench.workloads import make_workload

    task, out, model = sys.argv[1], Path(sys.argv[2]), str(chat_model())
    prompts = make_workload(task, load_tokenizer(model), 8).prompts
    llm = LLM(model, max_num_seqs=1, enable_prefix_caching=False, max_model_len=2048)
    limits = SamplingParams(temperature=0.0, max_tokens=TOKENS, detokenize=False)
    answers = llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], limits)
    rows = [
        {"task": task, "prompt": prompt, "output": list(answer.outputs[0].token_ids)}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    out.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))


if __name__ == "__main__":
    main()
