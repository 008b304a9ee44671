"""What exits say behind every token of real texts: a trace for bench_policies.py.

    python tests/bench/record_stages.py [--out FILE]

The demo model answers held-out prompts in a real engine, and at each step two of its exits are asked for drafts, which
nobody verifies. They draw with the noise of verification, so that what is recorded is what they would draft at any
temperature, whatever is accepted.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "demo"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "traces"))
from prompts import load_prompts
from stages import FILE, LAYERS

from vllm_specplugins.config import EarlyExitConfig
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext
from vllm_specplugins.proposers.early_exit import EarlyExit

MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo" / "model"
K = 8
MAX_MODEL_LEN = 1024


class Listening:
    """Asks the exits, and drafts nothing."""

    def __init__(self) -> None:
        context = ProposerContext(0, MAX_MODEL_LEN, 64, K, lambda text: [])
        self._exits = [EarlyExit(EarlyExitConfig(exit_layer=n, draft_sample_method="coupled"), context) for n in LAYERS]
        self.said: dict[tuple[str, int], list[list[int]]] = {}  # by request and length of its history

    def propose(self, batch: DraftBatch) -> Draft:
        assert batch.target is not None
        lengths = batch.target.num_tokens.tolist()
        drafts = [stage.draft_from(batch.target, K)[0].tolist() for stage in self._exits]
        for row, (name, length) in enumerate(zip(batch.request_ids, lengths, strict=True)):
            self.said[name, length] = [tokens[row] for tokens in drafts]
        return Draft.empty(batch.num_reqs)

    def observe(self, feedback: Feedback) -> None:
        pass

    def forget(self, request_ids: Any) -> None:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--prompts", type=int, default=16, help="of each kind, at each temperature")
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    stages = [{"method": "early_exit", "exit_layer": layer} for layer in LAYERS]
    config = {"method": "cascade", "num_speculative_tokens": K, "stages": stages}
    llm = LLM(str(MODEL), dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=16,
              enforce_eager=True, speculative_config=config)  # fmt: skip
    listening = Listening()
    llm.llm_engine.model_executor.driver_worker.worker._barrier.guard.proposer = listening
    asked = [(kind, temperature, prompt) for temperature in (0.0, 1.0) for kind in ("edit", "continue")
             for prompt in load_prompts(kind, args.prompts)]  # fmt: skip
    params = [SamplingParams(temperature=temperature, seed=place, max_tokens=args.tokens, detokenize=False)
              for place, (_, temperature, _) in enumerate(asked)]  # fmt: skip
    outputs = llm.generate([prompt for *_, prompt in asked], params, use_tqdm=False)
    texts, said = [], []
    nothing = [[-1] * K for _ in LAYERS]
    for output in outputs:
        text = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        start = len(output.prompt_token_ids)
        names = {name for name, _ in listening.said if name.split("-")[0] == output.request_id}
        assert len(names) == 1, names
        [name] = names
        said.extend(listening.said.get((name, length), nothing) for length in range(start + 1, len(text) + 1))
        texts.append(text)
    np.savez_compressed(
        args.out,
        tokens=np.concatenate(texts).astype(np.int16),
        lengths=[len(text) for text in texts],
        prompt_lengths=[len(output.prompt_token_ids) for output in outputs],
        kinds=[kind for kind, *_ in asked],
        temperatures=[temperature for _, temperature, _ in asked],
        said=np.array(said, np.int16),
    )
    print(f"{len(texts)} requests, {len(said)} tokens, {sum(row == nothing for row in said)} without drafts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
