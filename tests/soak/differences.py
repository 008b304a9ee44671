"""How many answers differ with drafts: requests of mixed kinds and options over HTTP, with speculation and without.

    python tests/soak/differences.py [--requests 200] [--seed 1] [--model FOLDER] [--dtype float32 bfloat16]

Greedy answers are compared with those of a server without speculation, seeded ones with those of the same server to
requests that switch drafts off (vLLM's own noise is another, and seeded requests end its engine on a CPU). In float32
none may differ (exit status 1); in bfloat16 verification rounds otherwise than decoding, whoever drafts: what vLLM's
n-gram changes, and another batch without speculation, stands beside it.
"""

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import openai
from asking import Answer, ask, client_of
from catalogue import Case, catalogue, reference
from server import MODEL, Server

LOG = Path(__file__).parents[2] / ".cache" / "differences.log"
PLAIN, NGRAM, OURS = "no speculation", "vLLM's ngram", "cascade"
STAGES = [{"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": 1}]
CONFIGS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    NGRAM: {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 8, "prompt_lookup_min": 2},
    OURS: {"method": "cascade", "num_speculative_tokens": 5, "gate": "off", "stages": STAGES},
}
NO_DRAFTS = '{"enabled": false}'
Answers = list[Answer | None]  # None: refused


def options_of(case: Case, rng: random.Random) -> str | None:
    """What a request asks of its drafts."""
    given = [None, None, '{"max_draft": 2}', '{"stages": ["0 prompt_lookup"]}', '{"stages": ["early_exit"]}']
    return rng.choice([*given, '{"max_context": 150}', json.dumps({"reference": reference(case, rng)})])


async def answers(server: Server, cases: list[Case], options: list[Any], at_a_time: int = 8) -> Answers:
    """In the order of the cases."""
    client, places = client_of(server.url), asyncio.Semaphore(at_a_time)

    async def one(index: int) -> Answer | None:
        async with places:
            try:
                return await ask(client, cases[index], options[index], stream=index % 3 == 0)
            except openai.APIConnectionError:
                raise
            except openai.APIError:  # of a stream, too, which was answered 200 before
                return None

    return await asyncio.gather(*map(one, range(len(cases))))


def difference(right: Answers, found: Answers) -> str:
    """How many differ of those that both servers answered."""
    pairs = [(a, b) for a, b in zip(right, found, strict=True) if a is not None and b is not None]
    number = sum(a != b for a, b in pairs)
    return f"{number} of {len(pairs)} ({number / max(1, len(pairs)):.1%})"


async def compare(model: str, dtype: str, cases: list[Case], rng: random.Random) -> bool:
    """Prints a row for each server of one dtype; returns whether ours never differs."""
    greedy = [case for case in cases if not case.sampled]
    right: Answers = []
    equal = True
    for name, config in CONFIGS.items():
        if name == NGRAM and dtype == "float32":
            continue
        server = Server(config, LOG)
        server.command += ["--dtype", dtype, "--num-gpu-blocks-override", "200", "--model", model]
        await server.start()
        try:
            if name == PLAIN:
                right = await answers(server, greedy, [None] * len(greedy))
                again = await answers(server, greedy, [None] * len(greedy), at_a_time=3)
                print(f"{dtype} | {name}, other batches | {difference(right, again)} | -", flush=True)
                continue
            asked = cases if name == OURS else greedy
            options = [options_of(case, rng) if name == OURS else None for case in asked]
            found = await answers(server, asked, options)
            await server.poll()
            accepted = server.totals["spec_decode_num_accepted_tokens"]
            mine = difference(right, [answer for case, answer in zip(asked, found, strict=True) if not case.sampled])
            seeded = [case for case in asked if case.sampled]
            drawn = [answer for case, answer in zip(asked, found, strict=True) if case.sampled]
            of_seeds = difference(await answers(server, seeded, [NO_DRAFTS] * len(seeded)), drawn) if seeded else "-"
            print(f"{dtype} | {name}, {accepted} accepted | {mine} | {of_seeds}", flush=True)
            equal &= name != OURS or (mine.startswith("0 of") and of_seeds.startswith("0 of") and accepted > 0)
        finally:
            server.stop()
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    LOG.parent.mkdir(exist_ok=True)
    cases = catalogue(args.seed, args.requests)
    print(f"{len(cases)} requests, {sum(case.sampled for case in cases)} of them seeded; answers that differ:")
    print("dtype | server | greedy | seeded", flush=True)
    results = {dtype: asyncio.run(compare(args.model, dtype, cases, random.Random(args.seed))) for dtype in args.dtype}
    return 0 if results.get("float32", True) else 1


if __name__ == "__main__":
    sys.exit(main())
