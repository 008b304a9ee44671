"""A log at a served shape: engines of dummy weights are forced to emit it, and `replay` plays it at their step times.

    python tests/gpu/forced_trace.py --shape llama-3.1-8b --folder FOLDER [--drafter] [--log LOG]

Nothing is downloaded: FOLDER gets the model's configuration, and a log that is made if none is given, in which half of
each output copies from its prompt. With --drafter a head of EAGLE-3's shape drafts, alone and in a cascade, and as many
of its tokens are accepted as the log says. LOG holds token ids, as for `bench --trace`, with "accepted": {"eagle": ...}
where a drafter is asked for. Prints what `bench` does, and each method's tokens a step beside those of `replay`.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from start import SHAPES, write_config

from vllm_specplugins.__main__ import main as command

NUM_DRAFT = 5  # of the head
PROMPT, OUTPUT = 512, 128  # tokens of a made request
HEAD: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}


def made_log(file: Path, vocab_size: int, count: int, num_tokens: int = OUTPUT) -> Path:
    """Outputs of copied pieces and of other tokens, with as many tokens of a draft right as a head usually has."""
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        prompt, output = [rng.randrange(2, vocab_size) for _ in range(PROMPT)], []
        while len(output) < num_tokens:
            start = rng.randrange(PROMPT - 32)
            output += prompt[start : start + rng.randrange(4, 32)]
            output += [rng.randrange(2, vocab_size) for _ in range(rng.randrange(4, 32))]
        accepted = rng.choices(range(NUM_DRAFT + 1), weights=(4, 3, 2, 1, 1, 1), k=num_tokens)
        rows.append({"prompt": prompt, "output": output[:num_tokens], "accepted": {"eagle": accepted}})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def methods_of(folder: Path, shape: str, has_drafter: bool) -> list[str]:
    """Names and configurations of what is served beside no speculation."""
    if not has_drafter:
        return ["ngram_gpu:5", "prompt_lookup"]
    config = {**SHAPES[shape], **HEAD, "draft_vocab_size": min(32000, SHAPES[shape]["vocab_size"])}
    head = folder / f"{shape}-eagle3"
    head.mkdir(exist_ok=True)
    (head / "config.json").write_text(json.dumps(config))
    drafter = {"method": "eagle3", "model": str(head), "num_speculative_tokens": NUM_DRAFT}
    return [json.dumps(drafter), json.dumps({"method": "cascade", "stages": [{"method": "prompt_lookup"}, drafter]})]


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--drafter", action="store_true")
    parser.add_argument("--methods", nargs="+", help="in place of ngram_gpu:5 and prompt_lookup, or of the drafter's")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--output-len", type=int, default=OUTPUT, help="of a request in the log that is made")
    parser.add_argument("--rate", default="0.5,0.9", help="'' for none")
    parser.add_argument("--rounds", default="2")
    parser.add_argument("--engine-args", default="{}")
    args = parser.parse_args()
    model, most = write_config(args.folder, args.shape), max(map(int, args.batch.split(",")))
    made = args.folder / f"{args.shape}.jsonl", SHAPES[args.shape]["vocab_size"], most, args.output_len
    log = args.log or made_log(*made)
    found, played = (args.folder / f"{args.shape}-{name}.json" for name in ("bench", "replay"))
    asked = ["bench", "--model", model, "--load-format", "dummy", "--trace", str(log), "--output-json", str(found)]
    methods = args.methods or methods_of(args.folder, args.shape, args.drafter)
    asked += ["--methods", *methods, "--engine-args", args.engine_args]
    asked += ["--max-concurrency", args.batch, "--rounds", args.rounds, "--num-prompts", str(most)]
    asked += ["--rate", args.rate] if args.rate else []
    if (status := command(asked + (["--drafter", "eagle"] if args.drafter else []))) or args.drafter:
        return status
    rows = {(row["method"], row["cell"]["batch"]): row for row in json.loads(found.read_text())["rows"]}
    given = [
        "replay",
        "--dataset-path",
        str(log),
        "--methods",
        "prompt_lookup",
        "--num-draft",
        "31",
        "--max-concurrency",
        args.batch,
    ]
    command([*given, "--requests", str(most), "--costs", str(found), "--output-json", str(played)])
    for row in json.loads(played.read_text())["rows"]:
        names = {"ngram_gpu": "ngram_gpu:5"} if row["num_draft"] == NUM_DRAFT else {}
        names |= {"prompt_lookup": "prompt_lookup"} if row["policy"] == "gated" else {}
        if own := rows.get((names.get(row["method"], ""), row["batch"])):
            its, predicted = own["tokens_per_step"], row["tokens_per_step"]
            print(f"* {own['method']}, {row['batch']} at a time: {its:.3f} tokens a step; replay {predicted:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
