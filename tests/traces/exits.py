"""What the demo model says, and what an exit of it would have drafted at every place: recorded once, played often.

    python tests/traces/exits.py --out FILE [--layer 2] [--num-draft 5] [--texts 40] [--tokens 160]

edits: what it makes of edit tasks, at temperature 0; code: how it goes on with code, at temperature 0; sampled: the
same at temperature 1, where a draft is right if the token that was drawn is the exit's. Prompts are held out. The exit
drafts what is likeliest, fed its own tokens. T: tokens of a text, K: tokens of a draft.
"""

import argparse
import pickle
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "demo"))
from prompts import load_prompts

from vllm_specplugins.draft import Int32Array
from vllm_specplugins.tools.base_model import BaseModel, load_tokenizer

MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo" / "model"
KINDS = {"edits": ("edit", 0.0), "code": ("continue", 0.0), "sampled": ("continue", 1.0)}  # prompts, temperature
LONGEST_PROMPT = 300  # tokens
BATCH = 20


@dataclass(frozen=True, slots=True)
class Said:
    """One text.

    Args:
        token_ids: [T], prompt and output.
        num_prompt: how much of it is prompt.
        drafted: [T, K], what the exit drafts behind each token.
        chances: [T, K] float16, what it gives each of these.
    """

    token_ids: Int32Array
    num_prompt: int
    drafted: npt.NDArray[np.int16]
    chances: npt.NDArray[np.float16]


def record(kind: str, layer: int, num_draft: int, num_texts: int, num_tokens: int) -> Iterator[Said]:
    """Texts of a kind with outputs of so many tokens."""
    base, tokenizer = BaseModel.load(str(MODEL), "cpu"), load_tokenizer(str(MODEL))
    source, temperature = KINDS[kind]
    prompts = [tokenizer.encode(text)[:LONGEST_PROMPT] for text in load_prompts(source, 60 if source != "edit" else 30)]
    prompts = (prompts * -(-num_texts // len(prompts)))[:num_texts]
    for start in range(0, num_texts, BATCH):
        some = prompts[start : start + BATCH]
        for prompt, text in zip(some, _texts(base.model, some, num_tokens, temperature, seed=start), strict=True):
            yield Said(np.array(text, np.int32), len(prompt), *_drafted(base, text, layer, num_draft))


@torch.no_grad()
def _texts(model: Any, prompts: list[list[int]], num_tokens: int, temperature: float, seed: int) -> list[list[int]]:
    torch.manual_seed(seed)
    longest = max(map(len, prompts))
    rows = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    is_there = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    found = model.generate(
        rows, attention_mask=is_there, max_new_tokens=num_tokens, min_new_tokens=num_tokens, pad_token_id=0, **drawn
    )
    return [prompt + row[longest:].tolist() for prompt, row in zip(prompts, found, strict=True)]


@torch.no_grad()
def _drafted(
    base: BaseModel, text: list[int], layer: int, num_draft: int
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.float16]]:
    """[T, K] each. Pass k stands at place i for the k-th token behind the text up to i - k."""
    num_tokens = len(text) + num_draft  # behind the end stands anything: nothing sees it
    passes, embed = base.passes(0, num_tokens, end=layer), base.model.get_input_embeddings()
    fed = torch.tensor([*text, *[0] * num_draft])
    drafted, chances = np.zeros((len(text), num_draft), np.int16), np.zeros((len(text), num_draft), np.float16)
    for step in range(num_draft):
        probs = base.logits(passes(embed(fed), step)).softmax(dim=-1)
        best, said = probs.max(dim=-1)
        own = slice(step, step + len(text))
        drafted[:, step], chances[:, step] = said[own].numpy(), best[own].numpy()
        fed = torch.cat((said[:1], said[:-1]))
    return drafted, chances


def load(file: Path) -> dict[str, list[Said]]:
    """What `main` wrote: texts by kind."""
    return {kind: [Said(*said) for said in texts] for kind, texts in pickle.loads(file.read_bytes()).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layer", type=int, default=2, help="of 8")
    parser.add_argument("--num-draft", type=int, default=5)
    parser.add_argument("--texts", type=int, default=40, help="of each kind")
    parser.add_argument("--tokens", type=int, default=160, help="of an output")
    args = parser.parse_args()
    texts = {kind: list(record(kind, args.layer, args.num_draft, args.texts, args.tokens)) for kind in KINDS}
    for kind, said in texts.items():
        right = [(text.drafted[:-1, 0] == text.token_ids[1:])[text.num_prompt - 1 :].mean() for text in said]
        print(f"{kind}: {len(said)} texts, the exit is right about {np.mean(right):.0%} of next tokens")
    args.out.write_bytes(pickle.dumps({kind: [astuple(text) for text in said] for kind, said in texts.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
