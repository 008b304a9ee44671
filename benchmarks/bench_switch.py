"""What drafting costs where it is switched off: tokens per CPU second on Model Runner V1, relative to no speculation.

    python benchmarks/bench_switch.py [--rounds 12 --requests 8 --tokens 128]

The demo model; the engine without speculation and that with `prompt_lookup`, which is switched off, or on, take turns.
What a step of V2 costs its host while drafting is off: `bench_host_step.py --arms none "prompt_lookup, off"`.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
MODEL = Path(__file__).parents[1] / "examples" / "demo" / "model"
ARMS = ("none", "off", "on")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in (("rounds", 12), ("requests", 8), ("tokens", 128)):
        parser.add_argument(f"--{name}", type=int, default=number)
    given = parser.parse_args()
    from vllm import LLM, SamplingParams

    common: dict[str, Any] = {"model": str(MODEL), "dtype": "float32", "max_model_len": 512, "enforce_eager": True}
    common |= {"max_num_seqs": given.requests, "enable_prefix_caching": False}
    plain, ours = LLM(**common), LLM(**common, speculative_config={"method": "prompt_lookup", "gate": "off"})
    params = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True, detokenize=False)
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in range(given.rounds + 1):
        prompts = [{"prompt_token_ids": [5 + number % 9, 40 + i, 7, 9, 300 + i] * 4} for i in range(given.requests)]
        answers: list[Any] = []
        for arm in ARMS if number % 2 else reversed(ARMS):
            if arm != "none":
                ours.collective_rpc("specplugins_gate", args=("none" if arm == "off" else "auto",))
            began = time.process_time()
            done = (plain if arm == "none" else ours).generate(prompts, params, use_tqdm=False)
            rates[arm].append(given.requests * given.tokens / (time.process_time() - began))
            answers.append([one.outputs[0].token_ids for one in done])
        assert answers[0] == answers[1] == answers[2]
    for arm in ARMS[1:]:
        ratios = [mine / none for mine, none in zip(rates[arm][1:], rates["none"][1:], strict=True)]
        median, least, most = statistics.median(ratios), min(ratios), max(ratios)
        print(f"{arm}: {median:.3f} ({least:.3f}-{most:.3f}) of {statistics.median(rates['none']):.0f} tokens a second")


if __name__ == "__main__":
    main()
