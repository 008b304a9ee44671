"""`--self`: rows that the model wrote, sampled in the real engine, and kept in the folder of the part."""

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from vllm_specplugins.config import ConfigError
from vllm_specplugins.engine.harness.samples import Request, sampling_engine
from vllm_specplugins.tools.files import save_whole

AT_A_TIME = 64  # requests
PROMPT_SHARE = 4  # one token of so many is the prompt's


def own_rows(
    model: str, rows: Sequence[Sequence[int]], row_tokens: int, temperature: float, seed: int, out: Path,
    advance: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:  # fmt: skip
    """The beginning of each row, a quarter of `row_tokens` at most, and what the model writes after it.

    A second call with the same arguments reads what the first one wrote. `advance` is called with the number of rows
    that are done.

    Raises:
        ConfigError: `out` cannot be read or written; the engine failed.
    """
    prompts = [list(row[: max(1, row_tokens // PROMPT_SHARE)]) for row in rows]
    made_of = zlib.crc32(json.dumps([model, temperature, row_tokens, seed, prompts]).encode())
    path = out / f"own_text-{made_of:08x}.json"
    if path.exists():
        try:
            return [list(map(int, row)) for row in json.loads(path.read_text())]
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"--out must be a folder whose {path.name} is whole, not {out}.") from error
    if find_spec("vllm") is None:
        raise ConfigError("--self needs vllm, which is not installed (pip install 'vllm-specplugins[vllm]').")
    found = list(continued(model, prompts, row_tokens, temperature, seed, path.with_suffix(".log"), advance))
    save_whole(out, lambda folder: (folder / path.name).write_text(json.dumps(found)))
    return found


def continued(
    model: str, prompts: list[list[int]], num_tokens: int, temperature: float, seed: int, log: Path,
    advance: Callable[[int], None],
) -> Iterator[list[int]]:  # fmt: skip
    """Each prompt and what the model writes after it, up to its end or to `num_tokens` together."""
    settings = {"max_model_len": num_tokens + 1, "max_num_seqs": AT_A_TIME, "seed": seed}
    with sampling_engine("MODEL must be one that vLLM can serve", log, model, settings=settings) as draw:
        for start in range(0, len(prompts), AT_A_TIME):
            some = prompts[start : start + AT_A_TIME]
            params = [{"temperature": temperature, "max_tokens": num_tokens - len(prompt)} for prompt in some]
            drawn = draw([Request(*asked) for asked in zip(some, params, strict=True)])
            yield from (prompt + output for prompt, [output] in zip(some, drawn.token_ids, strict=True))
            advance(start + len(some))
