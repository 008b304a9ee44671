"""Makes traffic of three kinds for `replay` from fixed text, without a model.

    python tests/traces/make.py --out FOLDER [--seed 0] [--requests 60] [--kinds code,agents,prose]

code: a file and a change that is asked for; the answer is the changed file. agents: sessions in which an assistant
lists folders, reads files, patches them and runs tests, four at a time; a request is a turn, its prompt all before it.
prose: a part of a page of documentation; the answer is how it goes on. texts.json.xz holds the text: source files and
pages of this project as they once were, which no later change of the project touches. The same seed gives the same
traffic on every machine, in ids of the demo model's tokenizer.
"""

import argparse
import json
import lzma
import random
import sys
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

from agents import sessions
from edits import edited
from tokenizers import Tokenizer

TEXTS = Path(__file__).parent / "texts.json.xz"
MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo" / "model"
PROSE_CHARACTERS = (600, 1_600)  # of a prompt, and of its answer at most
AT_A_TIME = 4  # sessions of agents
Pair = tuple[str, str]


def texts(suffix: str) -> list[tuple[str, str]]:
    """(path, text) of the fixed files with this suffix, by path."""
    return [
        (path, text) for path, text in json.loads(lzma.decompress(TEXTS.read_bytes())).items() if path.endswith(suffix)
    ]


def code(rng: random.Random) -> Iterator[Pair]:
    """(file and change, changed file), endlessly; a file comes back after all others, with another change."""
    files = [text for _, text in texts(".py")]
    while True:
        for text in rng.sample(files, len(files)):
            change, after = edited(text, rng)
            yield f"{change}\nAnswer with the whole file.\n\n```python\n{text}```\n", f"```python\n{after}```\n"


def agents(rng: random.Random, at_a_time: int = AT_A_TIME) -> Iterator[Pair]:
    """(session so far, what the assistant does next), of so many sessions in turns, which did not begin together."""
    made = sessions(texts(".py"), rng)
    running = [turns[rng.randrange(len(turns)) :] for turns in islice(made, at_a_time)]
    for place in cycle(range(at_a_time)):
        running[place] = running[place] or next(made)
        yield running[place].pop(0)


def prose(rng: random.Random) -> Iterator[Pair]:
    """(a beginning, how it goes on), endlessly; a page comes back after all others, from another place."""
    pages = [text for _, text in texts(".md")]
    while True:
        for text in rng.sample(pages, len(pages)):
            start = rng.randrange(len(text) - 2 * PROSE_CHARACTERS[0])
            middle = start + PROSE_CHARACTERS[0]
            yield text[start:middle], text[middle : middle + PROSE_CHARACTERS[1]]


KINDS: dict[str, Callable[[random.Random], Iterator[Pair]]] = {"code": code, "agents": agents, "prose": prose}


def trace(
    kind: str, num_requests: int, seed: int = 0, at_a_time: int = AT_A_TIME, max_output: int | None = None
) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, output) of each request, in token ids.

    Args:
        at_a_time: sessions of agents.
        max_output: tokens of an output at most.
    """
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    rng = random.Random(seed)
    pairs = agents(rng, at_a_time) if kind == "agents" else KINDS[kind](rng)
    for prompt, output in islice(pairs, num_requests):
        yield tokenizer.encode(prompt).ids, tokenizer.encode(output, add_special_tokens=False).ids[:max_output]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for KIND.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=60, help="of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for kind in args.kinds.split(","):
        with (args.out / f"{kind}.jsonl").open("w") as file:
            for prompt, output in trace(kind, args.requests, args.seed):
                file.write(json.dumps({"prompt": prompt, "output": output}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
