"""Records which tokens of two JSON answers the grammar forced, for the picture `grammar` of docs/pictures.py.

    python benchmarks/record_grammar.py "$(python examples/chat_model.py)"     writes docs/figures/grammar_answer.json

The same chat model answers two orders with one schema, one after the other. A step's last token is the model's; those
before it were drafted by `grammar` and accepted.
"""

import argparse
import json
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "docs" / "figures" / "grammar_answer.json"
KINDS = {"string": {"type": "string", "maxLength": 12}, "integer": {"type": "integer", "maximum": 999}}
KEYS = {"customer_name": "string", "delivery_address": "string", "total_amount_payable": "integer"}
SCHEMA = {
    "type": "object",
    "properties": {key: KINDS[kind] for key, kind in KEYS.items()},
    "required": list(KEYS),
    "additionalProperties": False,
}
ORDERS = {
    "First request": "Ann Lee in 5 Oak Road orders three lamps for 120 dollars.",
    "Second request": "Bob Moss in 9 Elm Lane orders a desk for 340 dollars.",
}


def steps_of(llm: Any, number: str, prompt: str, params: Any) -> list[list[str]]:
    """The texts of the tokens that each step of a request emitted."""
    llm.llm_engine.add_request(number, prompt, params)
    steps, seen = [], 0
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            token_ids = list(output.outputs[0].token_ids)
            new, seen = token_ids[seen:], len(token_ids)
            if new:
                steps.append([llm.get_tokenizer().decode([token]) for token in new])
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    args = parser.parse_args()

    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = LLM(
        args.model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        speculative_config={"method": "grammar", "num_speculative_tokens": 31},
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    )
    structured = StructuredOutputsParams(json=SCHEMA)
    params = SamplingParams(temperature=0, max_tokens=120, structured_outputs=structured)
    answers = []
    for number, (name, order) in enumerate(ORDERS.items()):
        messages = [{"role": "user", "content": f"{order} Answer with JSON."}]
        tokenizer = llm.get_tokenizer()
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        answers.append({"name": name, "steps": steps_of(llm, str(number), prompt, params)})
    commit = subprocess.run(["git", "log", "-1", "--format=%h", "main"], capture_output=True, text=True, check=True)
    facts = {
        "command": 'python benchmarks/record_grammar.py "$(python examples/chat_model.py)"',
        "commit": commit.stdout.strip(),
        "versions": {"vllm": version("vllm")},
        "clock": "none: tokens",
        "interval": "none: one answer each",
        "conditions": "SmolLM2-135M-Instruct from Q4_1, xgrammar without white space, temperature 0, float32, a CPU",
        "answers": answers,
    }
    FILE.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
