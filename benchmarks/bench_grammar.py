"""What method `grammar` brings where a JSON schema has long keys, and costs where nothing is forced.

    python benchmarks/bench_grammar.py --backend xgrammar

Two engines take turns: without speculation and with it. One request at a time, decoding alone, at temperatures 0 and
0.8, and other prompts in each round; a round's ratio is of the time of a token. Outputs at temperature 0 are compared.
The bars: at least 1.3 for the schema, 0.98 for an expression with a choice at each token.
"""

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm_specplugins.engine.harness.serving import serve_rounds, serving_engine
from vllm_specplugins.engine.harness.traffic import Traffic
from vllm_specplugins.tools.base_model import load_tokenizer
from vllm_specplugins.tools.bench.figures import Cell, rows_of

MODEL = Path(__file__).resolve().parents[1] / "examples" / "demo" / "model"
KEYS = ("customer_identification", "delivery_address_line", "expected_arrival", "total_amount_payable")
KINDS: tuple[dict[str, Any], ...] = ({"type": "string", "maxLength": 8}, {"type": "integer", "maximum": 999})
SCHEMA = {
    "type": "object",
    "properties": {key: KINDS[index % 2] for index, key in enumerate(KEYS)},
    "required": list(KEYS),
    "additionalProperties": False,
}
GRAMMARS = {"schema": {"json": SCHEMA}, "nothing forced": {"regex": "[a-z ]{60}"}}
PROMPTS = (
    "def area(x, y):\n    return x * y\n",
    "An order, as JSON:\n",
    "import json\n\n\nclass Order:\n",
    "{}\n",
    "x = 1\n",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--backend", choices=("xgrammar", "guidance"), default="xgrammar")
    parser.add_argument("--compact", action="store_true", help="no white space between a JSON text's parts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--grammars", nargs="+", choices=GRAMMARS, default=list(GRAMMARS))
    parser.add_argument("--method", type=json.loads, default={"method": "grammar"}, help="JSON: speculative_config")
    args = parser.parse_args()
    structured = {"backend": args.backend, "disable_any_whitespace": args.compact}
    arguments = {"model": args.model, "max_model_len": 512, "max_num_seqs": 4, "structured_outputs_config": structured}
    tokenizer = load_tokenizer(args.model)
    with ExitStack() as stack:
        engines = {}
        for name, config in (("none", None), ("method", args.method)):
            log = Path(tempfile.gettempdir()) / f"bench_grammar_{name}.log"
            engines[name] = stack.enter_context(serving_engine(name, arguments, config, log))
            engines[name].receive()
        for name in args.grammars:
            for temperature in (0.0, 0.8):
                rounds = [
                    Traffic(
                        prompts=[tokenizer(f"{prompt}# {seed}\n")["input_ids"] for prompt in PROMPTS],
                        temperature=temperature,
                        output_lengths=160,
                        at_a_time=1,
                        sampling={"structured_outputs": GRAMMARS[name]},
                    )
                    for seed in range(1 + args.rounds)
                ]
                turns = serve_rounds(engines, rounds, lambda: None)
                _, row = rows_of(Cell(name, 1, temperature), turns, has_cpu_clock=True)
                print(
                    f"{args.backend}, {name}, temperature {temperature}: {row.decoding}, by {row.clock} time; "
                    f"outputs that differ: {row.num_different} of {row.num_outputs}; "
                    f"{row.tokens_per_step:.2f} tokens a step, {row.accepted or 0:.0%} accepted",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
