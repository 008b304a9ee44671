"""Scores a checkpoint of the demo model on the held-out files: each exit layer, and greedy copying.

    python examples/demo/evaluate.py examples/demo/model
    python examples/demo/evaluate.py examples/demo/model --card

Every score is taken in bfloat16. `--card` writes the checkpoint's README.md from its training.json.
T: tokens, H: hidden size, V: vocabulary.
"""

import argparse
import copy
import difflib
import json
import random
import textwrap
from pathlib import Path

import prompts
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, from <bos> to <eos>."""
    return [[*row.ids, tokenizer.eos_token_id] for row in tokenizer.backend_tokenizer.encode_batch(texts)]


def edit_tasks(files: list[tuple[str, str]], count: int, min_lines: int, rng: random.Random) -> list[tuple[str, str]]:
    """(prompt, answer) of edit tasks on random functions and classes, of min_lines to 60 lines, of the files."""
    codes = [code for _, text in files for code in prompts.snippets(text, min_lines)]
    return [prompts.edit_task(rng.choice(codes), rng) for _ in range(count)]


@torch.inference_mode()
def exit_scores(model: LlamaForCausalLM, rows: list[Tensor], starts: list[int]) -> dict[str, list[float]]:
    """Loss and share of greedy choices equal to the full model's, per layer; a row counts from its start."""
    loss, agree, count = [0.0] * len(model.model.layers), [0] * len(model.model.layers), 0
    for row, start in zip(rows, starts, strict=True):
        hidden = model.model(row[None, :-1], output_hidden_states=True).hidden_states[1:]
        # The last one is normalised already. [1, T, H] each, then [T, V] each
        hidden = [*map(model.model.norm, hidden[:-1]), hidden[-1]]
        logits = [model.lm_head(h)[0, start:].float() for h in hidden]
        for index, layer_logits in enumerate(logits):
            loss[index] += F.cross_entropy(layer_logits, row[start + 1 :], reduction="sum").item()
            agree[index] += (layer_logits.argmax(-1) == logits[-1].argmax(-1)).sum().item()
        count += len(row) - 1 - start
    return {"loss": [round(x / count, 4) for x in loss], "agreement": [round(x / count, 4) for x in agree]}


@torch.inference_mode()
def copy_scores(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: list) -> dict[str, float]:
    """Greedy answers to edit tasks: share of answer tokens reproduced in order, share of exact answers."""
    shares, num_exact = [], 0
    for prompt, answer in tasks:
        prompt_ids = tokenizer(prompt, return_tensors="pt")
        want = tokenizer.encode(answer, add_special_tokens=False)
        # [1, prompt + answer]
        out = model.generate(**prompt_ids, max_new_tokens=len(want), do_sample=False)
        got = out[0, prompt_ids["input_ids"].shape[1] :].tolist()
        blocks = difflib.SequenceMatcher(None, want, got, autojunk=False).get_matching_blocks()
        shares.append(sum(block.size for block in blocks) / len(want))
        num_exact += got == want
    return {"copied": round(sum(shares) / len(tasks), 4), "exact": round(num_exact / len(tasks), 4)}


def scores(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, dict]:
    """Scores on code and on edit tasks of the held-out files, in the dtype that is saved."""
    model = copy.deepcopy(model).bfloat16().eval()
    files = [(source, text) for source, text in prompts.library_files() if prompts.is_held_out(source)]
    # Up to four stretches of 512 tokens from each file.
    encoded = encode(tokenizer, [text for _, text in files])
    parts = [torch.tensor(ids[i : i + 513]) for ids in encoded for i in range(0, 2048, 512) if len(ids) > i + 64]
    tasks = edit_tasks(files, 300, 10, random.Random(0))
    tasks = [task for task in tasks if 150 <= len(tokenizer.encode(task[0])) <= 500][:30]
    edits = [torch.tensor(tokenizer.encode(prompt + answer)) for prompt, answer in tasks]
    starts = [len(tokenizer.encode(prompt)) - 1 for prompt, _ in tasks]
    return {
        "code": exit_scores(model, parts, [0] * len(parts)),
        "edit": exit_scores(model, edits, starts) | copy_scores(model, tokenizer, tasks),
    }


CARD = """\
# Demo model

A Llama of {parameters:,} parameters (8 layers, hidden size 256, vocabulary 3072) that writes Python-like text
and was taught to copy code and rename identifiers in it. It exists so that speculative decoding can be measured
without a download: {exits}. It is not useful for anything else. \
`../widen.py` makes checkpoints of larger cost with the same logits.
Its chat template only joins the messages, so that chat requests can be served: it was not trained on conversations.

Made by `python examples/demo/train.py` with seed {seed} in {training_minutes} minutes of training on 2 CPU cores
({steps:,} steps, {tokens_seen:,} tokens; versions in `training.json`).
{notes}

## Held-out files
The files in `heldout_files.json` were not trained on. `agreement` is how often the greedy choice after a layer,
read through the final norm and head, is that of the whole model; `edit` counts the answers of edit tasks only.
All in bfloat16, given the correct text so far.

| layer | loss, code | agreement, code | loss, edit | agreement, edit |
| --- | --- | --- | --- | --- |
{table}

Left to generate greedily, it reproduces {copied:.1%} of the tokens of the correct answers to 30 edit tasks in order;
{exact:.0%} of the answers are exactly right.

## Licence
The weights are under Apache-2.0, like the project. The training text is the Python standard library (PSF
licence); `../heldout.jsonl` contains excerpts of it under the PSF licence.
"""


EXITS = """its early layers were trained to predict like the whole model (LayerSkip, Elhoushi et al.
2024)"""
PLAIN = "its early layers were never asked to predict, as most models'"


def model_card(facts: dict) -> str:
    """README.md of a checkpoint, from the contents of its training.json."""
    code, edit = facts["heldout"]["code"], facts["heldout"]["edit"]
    columns = zip(code["loss"], code["agreement"], edit["loss"], edit["agreement"], strict=True)
    table = [f"| {layer} | {a:.3f} | {b:.1%} | {c:.3f} | {d:.1%} |" for layer, (a, b, c, d) in enumerate(columns, 1)]
    fields = facts | {
        "exits": PLAIN if facts.get("plain") else EXITS,
        "notes": textwrap.fill(facts.get("notes", ""), 110),
    }
    return CARD.format(table="\n".join(table), copied=edit["copied"], exact=edit["exact"], **fields)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", type=Path, help="folder of the checkpoint")
    parser.add_argument("--card", action="store_true", help="write README.md; measure nothing")
    args = parser.parse_args()
    path, needed = args.model, "training.json" if args.card else "config.json"
    if not (path / needed).is_file():
        parser.error(f"MODEL is {path}; allowed: a folder with a {needed}")
    if args.card:
        (path / "README.md").write_text(model_card(json.loads((path / "training.json").read_text())))
        return
    result = scores(LlamaForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
