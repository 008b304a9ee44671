"""Traffic of three kinds for `replay`, made from files of this installation; no model has a part in it.

    python tests/traces/make.py --out FOLDER [--seed 0] [--requests 60] [--kinds code,agents,prose]

code: a file and a change that is asked for; the answer is the changed file. agents: sessions in which an assistant
lists folders, reads files, patches them and runs tests, four at a time; a request is a turn, its prompt all before it.
prose: a part of a README or a licence of an installed package; the answer is how it goes on. The same seed
gives the same traffic on the same installation, in ids of the demo model's tokenizer.
"""

import argparse
import json
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

from agents import sessions
from edits import edited
from library import library_files
from tokenizers import Tokenizer

MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo" / "model"
CODE_CHARACTERS = (1_500, 8_000)  # of a file that is edited
PROSE_CHARACTERS = (600, 1_600)  # of a prompt, and of its answer at most
AT_A_TIME = 4  # sessions of agents
Pair = tuple[str, str]


def code(rng: random.Random) -> Iterator[Pair]:
    """(file and change, changed file)."""
    texts = [text for _, text in library_files() if CODE_CHARACTERS[0] <= len(text) <= CODE_CHARACTERS[1]]
    rng.shuffle(texts)
    for text in texts:
        change, after = edited(text, rng)
        yield f"{change}\nAnswer with the whole file.\n\n```python\n{text}```\n", f"```python\n{after}```\n"


def agents(rng: random.Random, at_a_time: int = AT_A_TIME) -> Iterator[Pair]:
    """(session so far, what the assistant does next), of so many sessions in turns, which did not begin together."""
    files = [(source, text) for source, text in library_files() if len(text) <= CODE_CHARACTERS[1]]
    made = sessions(files, rng)
    running = [turns[rng.randrange(len(turns)) :] for turns in islice(made, at_a_time)]
    for place in cycle(range(at_a_time)):
        running[place] = running[place] or next(made)
        yield running[place].pop(0)


def prose(rng: random.Random) -> Iterator[Pair]:
    """(a beginning, how it goes on), no text twice."""
    folders = Path(sysconfig.get_path("purelib")).glob("*.dist-info")
    files = [path for folder in folders for path in (folder / "METADATA", *folder.rglob("LICENSE*")) if path.is_file()]
    texts = {_prose(path) for path in files}
    found = sorted(text for text in texts if len(text) > 2 * PROSE_CHARACTERS[0])
    rng.shuffle(found)
    for text in found:
        start = rng.randrange(len(text) - PROSE_CHARACTERS[0])
        middle = start + PROSE_CHARACTERS[0]
        if len(answer := text[middle : middle + PROSE_CHARACTERS[1]]) >= PROSE_CHARACTERS[0]:
            yield text[start:middle], answer


def _prose(file: Path) -> str:
    """A licence, or a README, which is what stands behind the header of metadata."""
    text = file.read_text(errors="ignore")
    return text.partition("\n\n")[2] if file.name == "METADATA" else text


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
