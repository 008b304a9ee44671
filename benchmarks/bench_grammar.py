"""What method `grammar` brings where a JSON schema has long keys, and costs where nothing is forced.

    python benchmarks/bench_grammar.py --backend xgrammar

Two engines stay up and take turns: without speculation and with it. One request at a time, decoding alone (from the
first token to the last), at temperatures 0 and 0.8, and other prompts in each round; a round's ratio is of the seconds
a token, by wall clock and, prompts included, by CPU time. Outputs are compared, which at 0.8 differ: without
speculation vLLM's own noise decides. The bars: at least 1.3 for the schema, 0.98 for an expression with a choice at
each token.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm_specplugins.engine.harness.process import EngineProcess, build_llm, totals

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


def serve(pipe: Any, arguments: dict[str, Any], config: dict[str, Any] | None) -> None:
    """In a process of its own: for each grammar and temperature, seconds a decoded token, and the outputs."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = build_llm(arguments, config)
    pipe.send(["ready"])
    while (asked := pipe.recv()) is not None:
        name, temperature, seed = asked
        structured = StructuredOutputsParams(**GRAMMARS[name])
        params = SamplingParams(temperature=temperature, max_tokens=160, seed=seed, structured_outputs=structured)
        seconds, outputs, before, cpu_began = 0.0, [], totals(llm), time.process_time()
        for prompt in PROMPTS:
            [done] = llm.generate([f"{prompt}# {seed}\n"], params, use_tqdm=False)  # other outputs in each round
            seconds += done.metrics.last_token_ts - done.metrics.first_token_ts
            outputs.append(list(done.outputs[0].token_ids))
        num_tokens = sum(len(output) - 1 for output in outputs)
        _, drafted, accepted = (now - then for now, then in zip(totals(llm), before, strict=True))
        costs = seconds / num_tokens, (time.process_time() - cpu_began) / num_tokens
        pipe.send((costs, outputs, num_tokens / (num_tokens - accepted), accepted / max(1, drafted)))


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
    with ExitStack() as stack:
        engines = []
        for name, config in (("none", None), ("method", args.method)):
            log = Path(tempfile.gettempdir()) / f"bench_grammar_{name}.log"
            engines.append(stack.enter_context(EngineProcess(log, name, serve, arguments, config)))
            engines[-1].receive()
        for name in args.grammars:
            for temperature in (0.0, 0.8):
                turns = [
                    [engine.ask((name, temperature, seed)) for engine in engines] for seed in range(1 + args.rounds)
                ]
                timed = turns[1:]  # the first round warms up
                wall, cpu = ([plain[0][clock] / own[0][clock] for plain, own in timed] for clock in (0, 1))
                same = sum(plain[1] == own[1] for plain, own in turns)
                rate, accepted = (statistics.mean(own[place] for _, own in turns) for place in (2, 3))
                print(
                    f"{args.backend}, {name}, temperature {temperature}: {statistics.median(wall):.2f} "
                    f"({min(wall):.2f}-{max(wall):.2f}), CPU {statistics.median(cpu):.2f}; "
                    f"rounds with equal outputs: {same} of {len(turns)}; "
                    f"{rate:.2f} tokens a step, {accepted:.0%} accepted",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
