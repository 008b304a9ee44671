"""What trees might bring, played without an engine: lookups' other continuations, free nodes filled by what the target
said before (RACER), merged trees and rejection in rounds (SpecInfer), lookahead decoding. Made docs/figures.md once.

    python tests/bench/play_trees.py medusa FOLDER SECONDS
    python tests/bench/play_trees.py lookups NODES ROWS AGENTS CODE EDITS.jsonl ...
    python tests/bench/play_trees.py merged continue|edit PROMPTS JUMP MEDUSA
    python tests/bench/play_trees.py rounds PROMPTS JUMP
    python tests/bench/play_trees.py lookahead PROMPTS TOKENS

Outputs of the demo model that do not repeat themselves, as in bench_trees.py. A lookup's texts are played one after the
other, each step's draft beside what follows.
"""
# ruff: noqa
# mypy: ignore-errors

import heapq
import json
import random
import sys
import time
from collections import OrderedDict, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "traces"), str(HERE.parents[1] / "examples" / "demo")]
from bench_trees import *  # its players
from vllm_specplugins.kernels.rejection.drafts import race_logprobs

from vllm_specplugins.draft import DraftBatch
from vllm_specplugins.methods import build_proposer
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.proposers.heads.medusa_heads import MedusaHeads

V, N, TOP = 3072, 15, 8


def demo(kind, count):
    from prompts import load_prompts

    base, tokenizer = BaseModel.load(str(DEMO / "model"), "cpu"), load_tokenizer(str(DEMO / "model"))
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in load_prompts(kind, NUM_TEXTS)]
    if kind == "edit":
        return base, [text for text in texts if len(text) < 400][:count]
    ends = [(back, text[: len(text) - back]) for text in texts for back in range(0, len(text) - PROMPT, STRIDE)]
    return base, [text[-PROMPT:] for _, text in sorted(ends, key=lambda pair: pair[0])][:count]


def context():
    return ProposerContext(V, 4096, 1, 15, lambda text: [])


def kept_outputs(base, kind, prompts, T):
    if kind == "continue":
        outputs = outputs_of(base, prompts, T)
    else:
        outputs = []
        for prompt in prompts:
            own = Sampling(torch.full((1,), T), torch.zeros(1, dtype=torch.int64))
            choose = lambda logits, place: coupled_sample(logits, torch.full((1,), place), own)
            outputs.append(base.go_on(torch.tensor([prompt]), len(prompt) + OUTPUT, choose)[0][len(prompt) :])
    return [(p, o) for p, o in zip(prompts, outputs) if len(o) == OUTPUT and not repeats(o)]


# --- Medusa heads: a layer and a head each, trained on what the target says


def train_medusa(folder, seconds, M=8):
    from safetensors.torch import save_file

    from vllm_specplugins.tools.bench.library import is_held_out, library_files

    torch.manual_seed(0)
    rng, base, tokenizer = (
        random.Random(0),
        BaseModel.load(str(DEMO / "model"), "cpu"),
        load_tokenizer(str(DEMO / "model")),
    )
    files = [text for source, text in library_files() if not is_held_out(source)]
    rng.shuffle(files)
    rows = []
    for text in files[:300]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        rows += [ids[at : at + 256] for at in range(0, len(ids) - 256, 256)]
    rng.shuffle(rows)
    H, W = base.hidden_size, base.head_weight.clone().float()
    linear, bias = torch.zeros(M, H, H, requires_grad=True), torch.zeros(M, 1, H, requires_grad=True)
    head = W.repeat(M, 1, 1).clone().requires_grad_(True)
    optimiser = torch.optim.AdamW(
        [{"params": [linear, bias], "lr": 2e-3}, {"params": [head], "lr": 1e-3}], weight_decay=0.0
    )
    start, step = time.time(), 0
    while (share := (time.time() - start) / seconds) < 1:
        for group, rate in zip(optimiser.param_groups, (2e-3, 1e-3)):
            group["lr"] = rate * max(0.05, 1 - share) * min(1, (step + 1) / 20)
        states = torch.stack(
            [own[-1] for own in base.hidden_states([rows[(step * 4 + i) % len(rows)] for i in range(4)])]
        )
        said = (states @ W.T).log_softmax(-1)
        places = torch.randperm(states.shape[1] - M - 1)[:96]
        x = states[:, places].flatten(0, 1).expand(M, -1, -1)
        x = x + F.silu(torch.baddbmm(bias, x, linear.transpose(1, 2)))
        out = torch.bmm(x, head.transpose(1, 2)).log_softmax(-1)
        wanted = torch.stack([said[:, places + k + 1].flatten(0, 1) for k in range(M)])
        loss = (-(wanted.exp() * out).sum(-1).mean(1) * 0.8 ** torch.arange(M)).sum()
        loss.backward(), optimiser.step(), optimiser.zero_grad()
        step += 1
    Path(folder).mkdir(parents=True, exist_ok=True)
    named = {f"{k}.0.linear.weight": linear[k] for k in range(M)} | {f"{k}.0.linear.bias": bias[k, 0] for k in range(M)}
    named |= {f"{k}.1.weight": head[k] for k in range(M)}
    save_file({name: own.detach().clone() for name, own in named.items()}, Path(folder) / "model.safetensors")


# --- Lookups


class Index:
    def __init__(self, text):
        self.t, self.one = [], defaultdict(list)
        self.push(text)

    def push(self, tokens):
        for token in tokens:
            self.t.append(token)
            self.one[token].append(len(self.t))

    def matches(self, cap=31, most=400):
        """(length, end), latest first."""
        t, n, out = self.t, len(self.t), []
        for end in reversed(self.one[t[-1]]):
            if end == n:
                continue
            length = 1
            while length < cap and length < end and t[end - 1 - length] == t[n - 1 - length]:
                length += 1
            out.append((length, end))
            if len(out) >= most:
                break
        return out


def common(one, other):
    return next((at for at, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))


def continuations(index, chain, how, count, K):
    """The chain, and the first others that differ from it and from each other."""
    t, matches = index.t, index.matches()
    if how == "latest":
        matches.sort(key=lambda m: (-m[0], -m[1]))
    elif how == "nearest":
        own = [end for _, end in matches if t[end : end + K][: len(chain)] == chain[: len(t) - end]]
        at = own[0] if own else len(t)
        matches.sort(key=lambda m: (-m[0], abs(m[1] - at)))
    else:
        votes = defaultdict(float)
        for length, end in matches:
            votes[t[end]] += 4.0 ** min(length, 8)
        matches.sort(key=lambda m: (-votes[t[m[1]]], -m[0], -m[1]))
    found = [chain] if chain else []
    for _, end in matches:
        own = t[end : end + K]
        if own and all(common(own, other) < min(len(own), len(other)) for other in found):
            found.append(own)
        if len(found) == count:
            break
    return found


def filled(many, sizes, most):
    nodes = {tuple(own[:at]) for own, size in zip(many, sizes) for at in range(1, min(size, len(own)) + 1)}
    for own in many:
        for at in range(1, len(own) + 1):
            if len(nodes) >= most:
                return nodes
            nodes.add(tuple(own[:at]))
    return nodes


def by_survival(index, chain, rates, most):
    """Best first: the chain by what matches of its length were worth, all others by votes, latest matches most."""
    t, matches, heap, nodes, count = index.t, index.matches(), [], set(), 0
    longest = max((length for length, _ in matches), default=0)

    def push(path, group, p, own):
        nonlocal count
        votes, below, depth = defaultdict(float), defaultdict(list), len(path)
        for rank, (length, end) in enumerate(group):
            if end + depth < len(t):
                votes[t[end + depth]] += 2.0 ** min(length + depth, 12) * 0.7**rank
                below[t[end + depth]].append((length, end))
        total, on = sum(votes.values()), own and depth < len(chain)
        if on:
            rate, rest = rates(longest + depth), total - votes.get(chain[depth], 0)
            votes.setdefault(chain[depth], 0)
        for token, vote in votes.items():
            is_own = on and token == chain[depth]
            q = (
                rate
                if is_own
                else (1 - rate) * 0.8 * vote / max(1e-30, rest)
                if on
                else vote / total * rates(min(longest, 2) + depth)
            )
            count += 1
            heapq.heappush(heap, (-p * q, count, (*path, token), below[token], is_own))

    push((), matches, 1.0, True)
    while heap and len(nodes) < most:
        p, _, path, group, own = heapq.heappop(heap)
        nodes.add(path)
        push(path, group, -p, own)
    return nodes


def depth_of(nodes, rest):
    depth = 0
    while depth < len(rest) and tuple(rest[: depth + 1]) in nodes:
        depth += 1
    return depth


def lookups(K, rows, num_agents, num_code, *files):
    import make
    import mistral_common
    import sentencepiece

    encode = sentencepiece.SentencePieceProcessor(
        model_file=str(Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1")
    ).encode
    edits = [json.loads(line) for file in files for line in Path(file).read_text().splitlines()[:rows]]
    data = {"edits of people": [(encode(own["prompt"]), encode(own["output"])[:1500]) for own in edits]}
    for kind, count in (("agents", num_agents), ("code", num_code)):
        data[kind] = [pair for pair in make.trace(kind, count, max_output=1500) if pair[1]]
    forms = {
        f"{how} {sizes}": lambda ix, c, r, how=how, sizes=sizes: filled(
            continuations(ix, c, how, len(sizes), K), sizes, K
        )
        for how in ("latest", "nearest", "voted")
        for sizes in ((K - 3, 3), (K - 5, 3, 2), (K - K // 2, K // 2), (K // 3,) * 3)
    }
    forms["best first"] = lambda ix, c, r: by_survival(ix, c, r, K)
    forms["all of the latest three (more nodes)"] = lambda ix, c, r: filled(
        continuations(ix, c, "latest", 3, K), (K,) * 3, 0
    )

    def new():
        config = {"method": "prompt_lookup", "num_speculative_tokens": K, "gate": "off"}
        return build_proposer(parse_config(config), ProposerContext(40000, 1 << 16, 1, K, lambda text: []))

    def draft(proposer, history):
        own = proposer.propose(DraftBatch(["r"], (np.array(history, np.int32),), np.array([K], np.int32), [{}]))
        return own.token_ids[0][: own.num_draft[0]].tolist()

    for name, texts in data.items():
        total, steps = sum(len(output) for _, output in texts), {}
        for length in sorted({4, 8, 15, K}):
            for prompt, output in texts:
                proposer, at = new(), 0
                while at < len(output):
                    at += common(draft(proposer, prompt + output[:at])[:length], output[at:]) + 1
                    steps[f"chain {length}"] = steps.get(f"chain {length}", 0) + 1
        best = min(steps.values())
        for form, grow in forms.items():
            hits = np.ones((40, 2)) * [0.7, 1.0] * 4
            rates = lambda length: hits[min(length, 39), 0] / hits[min(length, 39), 1]
            for prompt, output in texts:
                proposer, at, index = new(), 0, Index(prompt)
                while at < len(output):
                    chain, rest = draft(proposer, prompt + output[:at]), output[at : at + K]
                    accepted = depth_of(grow(index, chain, rates), rest)
                    longest, own = max((length for length, _ in index.matches()), default=0), common(chain, rest)
                    for step in range(min(own + 1, len(chain))):
                        hits[min(longest + step, 39)] = hits[min(longest + step, 39)] * 0.99 + [step < own, 1]
                    index.push(output[at : at + accepted + 1])
                    at += accepted + 1
                    steps[form] = steps.get(form, 0) + 1
        print(f"{name}: {len(texts)} texts, {total} tokens")
        for form, count in steps.items():
            print(f"   {form:40s} {total / count:.2f} {best / count:.3f}", flush=True)


# --- Merged trees, and RACER's free nodes


def race(logits, positions, T):
    own = Sampling(torch.full((len(logits),), T), torch.zeros(len(logits), dtype=torch.int64))
    return race_logprobs(logits, positions, own)


def said_by(proposer, target, T, depth):
    """By place and step: the chain's tokens, the likeliest ones and their probabilities, the chain's own."""
    seen = []
    steps = proposer.draft_steps(target, depth, sees=lambda step, logits: seen.append(logits))
    positions, logits = target.num_tokens[:, None] + torch.arange(depth), torch.stack(seen, 1)
    probs = race(logits.flatten(0, 1), positions.flatten(), T).view_as(logits).exp()
    top, chain = probs.topk(TOP, dim=2), steps.token_ids.long()
    return chain, top.indices, top.values, probs.gather(2, chain[..., None])[..., 0]


def with_siblings(said, depth):
    """Survival by path."""
    chain, ids, probs, own = said
    nodes, p, path = {}, 1.0, ()
    for at in range(depth):
        for token, q in zip(ids[at].tolist(), probs[at].tolist()):
            if token != int(chain[at]):
                nodes[*path, token] = p * q
        p, path = p * float(own[at]), (*path, int(chain[at]))
        nodes[path] = p
    return nodes


def best_of(nodes, most=N):
    return set(sorted(nodes, key=lambda path: (-nodes[path], len(path)))[:most])


def merged(*many):
    found = {}
    for nodes in many:
        for path, p in nodes.items():
            found[path] = max(found.get(path, 0), p)
    return found


class Recycler:
    """What the target said after a token when it verified that last, with the noise of another place."""

    def __init__(self, text, logits, T):
        self.text, self.logits, self.T, self.known = text, logits, T, {}

    def top(self, end, token, position):
        at = next((at for at in range(end - 1, -1, -1) if self.text[at] == token), None)
        if at is None:
            return ()
        if (at, position) not in self.known:
            own = race(self.logits[at][None], torch.tensor([position]), self.T)[0].topk(4).indices.tolist()
            self.known[at, position] = own
        return self.known[at, position]


def recycled(nodes, recycler, place, rates, most=N):
    """The best nodes, where those that are free are filled."""
    heap, found, known = [], set(), defaultdict(dict)
    for path, p in nodes.items():
        known[path[:-1]][path[-1]] = p

    def push(path, p):
        below = dict(known.get(path, {}))
        left, token = max(0.0, p - sum(below.values())), path[-1] if path else recycler.text[place - 1]
        for rank, child in enumerate(recycler.top(place - 1, token, place + len(path))):
            below[child] = max(below.get(child, 0), left * rates[rank])
        for child, q in below.items():
            if q > 1e-6:
                heapq.heappush(heap, (-q, (*path, child)))

    push((), 1.0)
    while heap and len(found) < most:
        q, path = heapq.heappop(heap)
        found.add(path)
        push(path, -q)
    return found


def lookup_chain(history):
    n, best = len(history), (0, 0)
    for end in range(n - 1, 0, -1):
        length = 0
        while length < 31 and length < end and history[end - 1 - length] == history[n - 1 - length]:
            length += 1
        best = max(best, (length, end), key=lambda own: own[0])
    chain, text = [], list(history)
    for step in range(15 if best[0] else 0):
        chain.append(text[best[1] + step])
        text.append(chain[-1])
    return chain, best[0]


def merge(kind, count, jump, medusa):
    base, prompts = demo(kind, count)
    heads = MedusaHeads.load(medusa, 8, V, "cpu", torch.float32)
    models = {f"exit {layer}": EarlyExit(EarlyExitConfig(exit_layer=layer), context()) for layer in (1, 2)}
    models["jump"] = Jump(JumpConfig(head=jump), context())
    for T in TEMPERATURES:
        kept, steps, recyclers = kept_outputs(base, kind, prompts, T), defaultdict(int), []
        hits, counts, total = [np.ones(2) * [0.5, 1.0] for _ in range(40)], np.zeros(4), 0
        for prompt, output in kept:  # how often a recycled token is right, by rank, which is then known
            text = [*prompt, *output]
            recyclers.append(recycler := Recycler(text, base.logits(next(base.hidden_states([text]))[-1]), T))
            for place in range(len(prompt), len(text), 2):
                counts += [
                    token == text[place] for token in (*recycler.top(place - 1, text[place - 1], place), *[-1] * 4)[:4]
                ]
                total += 1
        for (prompt, output), recycler in zip(kept, recyclers):
            accepted = defaultdict(list)
            said = {name: said_by(own, target_of(base, prompt, output, T), T, 15) for name, own in models.items()}
            target = target_of(base, prompt, output, T)
            logits = heads.logits(target.last_hidden_states, 8, base.logits).transpose(0, 1)
            positions = target.num_tokens[:, None] + torch.arange(8)
            top = race(logits.flatten(0, 1), positions.flatten(), T).view_as(logits).exp().topk(TOP, dim=2)
            said["medusa"] = top.indices[..., 0], top.indices, top.values, top.values[..., 0]
            for i in range(OUTPUT):
                rest, place, trees = output[i:], len(prompt) + i, {}
                for name, parts in said.items():
                    own = [part[i] for part in parts]
                    right = leading(own[0].tolist(), rest)
                    for length in CHAINS:
                        accepted[f"{name}, chain {length}"].append(min(right, length, len(own[0])))
                    trees[name] = with_siblings(own, 6)
                    accepted[f"{name}, tree"].append(depth_of(best_of(trees[name]), rest))
                    accepted[f"{name}, tree, recycled"].append(
                        depth_of(recycled(trees[name], recycler, place, counts / total), rest)
                    )
                chain, length = lookup_chain(prompt + output[:i])
                right, p, trees["lookup"] = common(chain, rest), 1.0, {}
                for size in CHAINS:
                    accepted[f"lookup, chain {size}"].append(min(right, size))
                for step in range(len(chain)):
                    hit = hits[min(length + step, 39)]
                    p *= hit[0] / hit[1]
                    trees["lookup"][tuple(chain[: step + 1])] = p
                for step in range(min(right + 1, len(chain))):
                    hits[min(length + step, 39)] += [step < right, 1]
                accepted["lookup, recycled"].append(
                    depth_of(recycled(trees["lookup"], recycler, place, counts / total), rest)
                )
                accepted["recycled alone"].append(depth_of(recycled({}, recycler, place, counts / total), rest))
                for names in (
                    ("lookup", "exit 1"),
                    ("lookup", "exit 2"),
                    ("lookup", "jump"),
                    ("exit 1", "jump"),
                    ("exit 2", "jump"),
                ):
                    both = merged(*(trees[name] for name in names))
                    accepted["merged: " + ", ".join(names)].append(depth_of(best_of(both), rest))
                for name in ("exit 1", "exit 2", "jump"):
                    grown, copied = best_of(trees[name]), sum(trees["lookup"].values())
                    takes = set(trees["lookup"]) if copied > sum(trees[name][path] for path in grown) else grown
                    accepted[f"either: lookup's chain, {name}'s tree"].append(depth_of(takes, rest))
            for name, own in accepted.items():
                steps[name] += num_steps(own)
        print(f"T {T}, {kind}: {len(kept)} outputs; recycled tokens are right by rank: {(counts / total).round(3)}")
        for name, count in steps.items():
            print(f"   {name:40s} {len(kept) * OUTPUT / count:.3f}", flush=True)


# --- SpecInfer: rejection in rounds, of tokens that are drawn from q without replacement


def rejected(p, q, token):
    """What is emitted, and drawn next, where this token was rejected."""
    rest = (p - q).clamp(min=0)
    total = rest.sum(-1, keepdim=True)
    p = torch.where(total > 1e-12, rest / total.clamp(min=1e-30), p)
    q = q.scatter(-1, token[..., None], 0.0)
    return p, q / q.sum(-1, keepdim=True).clamp(min=1e-30)


def law(p, q, num_rounds):
    """What is emitted, by enumeration of all draws."""
    if num_rounds == 0 or q.sum() == 0:
        return p
    emitted = torch.zeros_like(p)
    for token in q.nonzero()[:, 0]:
        accept = (p[token] / q[token]).clamp(max=1)
        emitted[token] += q[token] * accept
        if accept < 1:
            emitted += q[token] * (1 - accept) * law(*rejected(p, q, token), num_rounds - 1)
    return emitted


def check_law():
    rng = torch.Generator().manual_seed(0)
    for _ in range(50):
        p, q = torch.rand(2, 4, generator=rng, dtype=torch.float64).pow(3).unbind()
        p, q = p / p.sum(), q / q.sum()
        for num_rounds in (1, 2, 3):
            assert torch.allclose(law(p, q, num_rounds), p)


def rounds(count, jump):
    check_law()
    base, prompts = demo("continue", count)
    shapes = [
        [5, 4, 3, 2, 1],
        [3, 3, 3, 2, 2, 2],
        [4, 3, 3, 3, 2],
        [6, 4, 3, 2],
        [8, 4, 2, 1],
        [2] * 7 + [1],
        [1] * 4,
        [1] * 8,
        [1] * 15,
    ]

    def build(how):
        found = {
            f"exit {layer}": EarlyExit(EarlyExitConfig(exit_layer=layer, draft_sample_method=how), context())
            for layer in (1, 2)
        }
        return found | {"jump": Jump(JumpConfig(head=jump, draft_sample_method=how), context())}

    drawn, coupled, few = build("probabilistic"), build("coupled"), OUTPUT - 16
    for T in TEMPERATURES[1:]:
        kept, found, rng = (
            kept_outputs(base, "continue", prompts, T),
            defaultdict(float),
            torch.Generator().manual_seed(0),
        )
        for prompt, output in kept:
            for name in drawn:
                parts = chains(coupled[name], target_of(base, prompt, output, T), output)
                parts |= tree(coupled[name], target_of(base, prompt, output, T), output, N)
                for kind, accepted in parts.items():
                    found[name, "coupled " + kind] += sum(accepted[:few])
                target = target_of(base, prompt, output, T)
                seeds = target.sampling.seeds + 1000 + torch.arange(OUTPUT) * 7919
                target = replace(target, sampling=Drawn(target.sampling.temperature, seeds, None))
                steps, probs = drawn[name].draft_steps(target, 15), []
                q, chain = (steps.logits[:few].float() / T).softmax(-1), steps.token_ids.long()[:few]
                played = Played(base, [*prompt, *output], torch.arange(OUTPUT) + len(prompt) - 1)
                last, positions = target.last_token_ids, target.num_tokens - 1
                for step in range(15):
                    states = played.hidden_states(base.num_layers, last, positions)
                    probs.append((base.logits(states)[:few] / T).softmax(-1))
                    last, positions = steps.token_ids[:, step], positions + 1
                for shape in shapes:
                    alive = torch.ones(few, dtype=torch.bool)
                    for step, num_rounds in enumerate(shape):
                        p, own, left, goes_on = probs[step], q[:, step], alive, alive
                        for at in range(num_rounds):
                            token = (
                                torch.multinomial(own.clamp(min=1e-30), 1, generator=rng)[:, 0]
                                if at
                                else chain[:, step]
                            )
                            ratio = p.gather(1, token[:, None])[:, 0] / own.gather(1, token[:, None])[:, 0].clamp(
                                min=1e-30
                            )
                            accepts = left & (torch.rand(few, generator=rng) < ratio)
                            found[name, f"rounds {shape}"] += int(accepts.sum())
                            goes_on, left = goes_on if at else accepts, left & ~accepts
                            p, own = rejected(p, own, token)
                        alive = goes_on
        print(f"T {T}: {len(kept)} outputs, tokens a step, the mean over their first {few} places")
        for (name, kind), count in found.items():
            print(f"   {name:8s} {kind:36s} {1 + count / few / len(kept):.3f}", flush=True)


# --- Lookahead decoding, temperature 0: a window of 5 columns, n-grams of 4, 5 of them verified


def lookahead(count, num_tokens, W=5, size=4, G=5):
    base, prompts = demo("continue", 60)
    model, steps, total = base.model.base_model, defaultdict(int), 0

    def decode(prompt, output, of_prompt, has_window):
        rng, pool = torch.Generator().manual_seed(0), defaultdict(OrderedDict)
        some = lambda: prompt[int(torch.randint(len(prompt), (1,), generator=rng))]

        def put(gram):
            own = pool[gram[0]]
            own.pop(tuple(gram[1:]), None)
            own[tuple(gram[1:])] = 1
            while len(own) > G:
                own.popitem(last=False)

        for at in range(len(prompt) - size + 1 if of_prompt else 0):
            put(prompt[at : at + size])
        text, cache, levels = list(prompt), DynamicCache(), [[some() for _ in range(W)]]
        model(torch.tensor([text[:-1]]), past_key_values=cache, use_cache=True)
        num_steps = done = 0
        while done < len(output):
            end = len(text) - 1
            tokens, places, sees, window, verified = [text[-1]], [end], [{0}], {}, []
            for level, row in enumerate(levels if has_window else ()):
                for column, token in enumerate(row):
                    window[level, column] = own = len(tokens)
                    seen = (
                        {0, own}
                        | {window[0, other] for other in range(column + 1)}
                        | {window[other, column] for other in range(level)}
                    )
                    tokens.append(token), places.append(end + 1 + column + level), sees.append(seen)
            candidates = list(pool[text[-1]])[::-1][:G]
            for gram in candidates:
                own = []
                for depth, token in enumerate(gram):
                    sees.append({0, len(tokens), *own})
                    own.append(len(tokens))
                    tokens.append(token), places.append(end + 1 + depth)
                verified.append(own)
            mask = torch.full((len(tokens), end + len(tokens)), torch.finfo(torch.float32).min)
            mask[:, :end] = 0
            for row, seen in enumerate(sees):
                mask[row, [end + other for other in seen]] = 0
            arguments = {
                "attention_mask": mask[None, None],
                "position_ids": torch.tensor([places]),
                "past_key_values": cache,
            }
            said = (
                base.logits(model(torch.tensor([tokens]), use_cache=True, **arguments).last_hidden_state[0])
                .argmax(-1)
                .tolist()
            )
            emitted = [said[0]]
            for gram, own in zip(candidates, verified):
                line = [said[0]]
                for token, row in zip(gram, own):
                    if token != line[-1]:
                        break
                    line.append(said[row])
                emitted = max(emitted, line, key=len)
            if has_window:
                new = [said[window[len(levels) - 1, column]] for column in range(W)]
                if len(levels) == size - 1:
                    for column in range(W):
                        put([row[column] for row in levels] + [new[column]])
                    levels = levels[1:]
                levels = [*levels, new]
            cache.crop(end)
            emitted = emitted[: len(output) - done]
            assert emitted == output[done : done + len(emitted)]
            model(torch.tensor([[text[-1], *emitted[:-1]]]), past_key_values=cache, use_cache=True)
            text, done, num_steps, more = text + emitted, done + len(emitted), num_steps + 1, len(emitted) - 1
            levels = [(row[more:] + [some() for _ in range(more)])[:W] for row in levels]
        return num_steps

    for prompt in prompts[:count]:
        output = base.go_on(torch.tensor([prompt]), len(prompt) + num_tokens, lambda logits, _: logits.argmax(-1))[0][
            len(prompt) :
        ]
        grams = [tuple(output[at : at + NGRAM]) for at in range(len(output))]
        output = output[: next((at for at, gram in enumerate(grams) if gram in grams[:at]), len(output))]
        if len(output) < 16:
            continue
        total += len(output)
        for name, arms in {
            "window": (False, True),
            "window, prompt's n-grams": (True, True),
            "prompt's n-grams": (True, False),
        }.items():
            steps[name] += decode(prompt, output, *arms)
        for length in (3, 8, 15):
            at = 0
            while at < len(output):
                at += common(lookup_chain(prompt + output[:at])[0][:length], output[at:]) + 1
                steps[f"lookup, chain {length}"] += 1
    print(f"{total} tokens")
    for name, number in steps.items():
        print(f"   {name:30s} {total / number:.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, *rest = sys.argv[1:]
    rest = [int(own) if own.isdigit() else own for own in rest]
    if name == "medusa":
        train_medusa(*rest)
    else:
        with torch.no_grad():
            {"lookups": lookups, "merged": merge, "rounds": rounds, "lookahead": lookahead}[name](*rest)
