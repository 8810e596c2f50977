"""A continuous-batching loop over a toy KDA model: prompts prefilled in pieces, prefix caching, drafted tokens verified and rejected.

    python examples/serve.py                     # a GPU if there is one, else the CPU
    python examples/serve.py --requests 16 --layers 4 --heads 8 --head-dim 128

The model has random weights, so its text means nothing; what counts is that every request, however it was cut into pieces, served from
the prefix cache or drafted, ends with the logits of one prefill over its whole text. The loop checks that and prints tokens per second.

Every layer owns two pools, states [slots, H, D, D] in fp32 and convolution windows [slots, 3 * H * D, 3]. A request owns a table of
1 + DRAFT + 1 slots: the first holds its state, the others take the state after each token of a drafted step.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from openkda import Checkpoints, kda_fused_decode, kda_prefill

VOCABULARY, TAPS, DRAFT, BLOCK = 256, 4, 3, 64  # BLOCK: the prefix cache keeps states at multiples of it


@dataclass
class Layer:
    """Weights and pools of one layer; the projections of q, k, v, gate, output gate and beta are one matrix."""

    project: torch.Tensor  # [hidden, 5 * H * D + H]
    conv: torch.Tensor  # [3 * H * D, TAPS]
    A_log: torch.Tensor  # [H]
    dt_bias: torch.Tensor  # [H, D]
    norm: torch.Tensor  # [D]
    back: torch.Tensor  # [H * D, hidden]
    states: torch.Tensor  # [slots, H, D, D] fp32
    windows: torch.Tensor  # [slots, 3 * H * D, TAPS - 1]

    def split(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x [.., hidden] -> q, k, v, gate, output gate [.., H, D] and beta [.., H], slices of one product."""
        H, D = self.dt_bias.shape
        *wide, beta = (F.rms_norm(x, x.shape[-1:]) @ self.project).split([H * D] * 5 + [H], -1)
        return [t.unflatten(-1, (H, D)) for t in wide] + [beta]

    def gate(self) -> dict[str, object]:
        return dict(A_log=self.A_log, dt_bias=self.dt_bias, lower_bound=-5.0)

    def prefill(self, x: torch.Tensor, slots: list[int], starts: list[int], lengths: list[int], keep: dict[int, tuple[int, dict]]):
        """x [1, T, hidden]: the next tokens of several requests. keep: {sequence: (tokens after which its state is kept, cache entry)}."""
        q, k, v, gate, z, beta = self.split(x)
        packed = torch.cat([t.flatten(2) for t in (q, k, v)], -1)[0]  # [T, C]
        outs, row = [], 0
        for n, (slot, start, length) in enumerate(zip(slots, starts, lengths)):
            old = self.windows[slot] if start else torch.zeros_like(self.windows[slot])
            taps = torch.cat([old, packed[row : row + length].mT], -1)
            outs.append(F.silu(F.conv1d(taps[None], self.conv[:, None], groups=taps.shape[0]))[0].mT)
            if n in keep:
                keep[n][1].setdefault("windows", []).append(taps[:, keep[n][0] : keep[n][0] + TAPS - 1].clone())
            self.windows[slot] = taps[:, length:]
            row += length
        q, k, v = (t.view_as(q) for t in torch.cat(outs)[None].chunk(3, -1))
        device = x.device
        saved = torch.empty(len(keep), *self.states.shape[1:], device=device)
        o = kda_prefill(
            q, k, v, gate, beta, **self.gate(), state_pool=self.states, state_indices=torch.tensor(slots, dtype=torch.int32, device=device),
            has_initial_state=torch.tensor([s > 0 for s in starts], device=device),
            cu_seqlens=torch.tensor([0, *lengths], device=device).cumsum(0), cu_seqlens_cpu=torch.tensor([0, *lengths]).cumsum(0),
            checkpoints=Checkpoints(saved, list(keep), [tokens for tokens, _ in keep.values()]) if keep else None,
        )  # fmt: skip
        for state, (_, entry) in zip(saved, keep.values()):
            entry.setdefault("states", []).append(state)
        o = F.rms_norm(o.float(), o.shape[-1:], eps=1e-5) * self.norm * torch.sigmoid(z.float())
        return x + o.to(x.dtype).flatten(2) @ self.back

    def verify(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """x [N, S, hidden], table [N, 1 + S]: S tokens from the state in column 0, the state after each in a column of its own."""
        q, k, v, gate, z, beta = self.split(x)
        o = kda_fused_decode(
            q, k, v, gate, beta, z, **self.gate(), conv_weight=self.conv, norm_weight=self.norm, state_pool=self.states,
            conv_pool=self.windows, state_indices=table, verify=True,
        )  # fmt: skip
        return x + o.flatten(2) @ self.back


class Model:
    def __init__(self, layers: int, heads: int, head_dim: int, slots: int, device: torch.device, dtype: torch.dtype):
        gen = torch.Generator().manual_seed(0)
        hidden = heads * head_dim
        draw = lambda *shape: (torch.randn(*shape, generator=gen) * shape[0] ** -0.5).to(device, dtype)
        self.embed = torch.randn(VOCABULARY, hidden, generator=gen).to(device, dtype)
        self.head = draw(hidden, VOCABULARY)
        self.layers = [
            Layer(
                project=draw(hidden, 5 * hidden + heads), conv=draw(TAPS, 3 * hidden).mT.contiguous(),
                A_log=torch.zeros(heads, device=device), dt_bias=torch.randn(heads, head_dim, generator=gen).to(device) - 2,
                norm=torch.ones(head_dim, device=device), back=draw(hidden, hidden),
                states=torch.full((slots, heads, head_dim, head_dim), float("nan"), device=device),
                windows=torch.full((slots, 3 * hidden, TAPS - 1), float("nan"), device=device, dtype=dtype),
            )
            for _ in range(layers)
        ]  # fmt: skip

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return (F.rms_norm(x, x.shape[-1:]) @ self.head).float()


@dataclass
class Request:
    prompt: list[int]
    budget: int  # tokens to generate
    table: list[int] = field(default_factory=list)  # its slots, the state in the first
    done: int = 0  # tokens of prompt + text that the state has seen
    text: list[int] = field(default_factory=list)
    from_cache: int = 0
    drafted: int = 0
    accepted: int = 0

    def tokens(self) -> list[int]:
        return self.prompt + self.text


class Engine:
    def __init__(self, model: Model, slots: int, piece: int):
        self.model, self.free, self.piece = model, list(range(slots)), piece
        self.cache: dict[tuple[int, ...], dict[str, list[torch.Tensor]]] = {}
        self.device = model.embed.device

    def admit(self, request: Request) -> None:
        """Give the request its slots, and the longest cached prefix of its prompt."""
        request.table = [self.free.pop() for _ in range(2 + DRAFT)]
        for end in range((len(request.prompt) - 1) // BLOCK * BLOCK, 0, -BLOCK):
            entry = self.cache.get(tuple(request.prompt[:end]))
            if entry is not None:
                for layer, state, window in zip(self.model.layers, entry["states"], entry["windows"]):
                    layer.states[request.table[0]], layer.windows[request.table[0]] = state, window
                request.done = request.from_cache = end
                return

    def prefill(self, requests: list[Request]) -> int:
        """One piece of every prompt that is not finished, one ragged call per layer."""
        starts = [r.done for r in requests]
        lengths = [min(self.piece, len(r.prompt) - r.done) for r in requests]
        keep = {}
        for n, (r, start, length) in enumerate(zip(requests, starts, lengths)):
            end = (start + length) // BLOCK * BLOCK
            if end > start and (end - start) % 16 == 0 and tuple(r.prompt[:end]) not in self.cache:
                keep[n] = (end - start, self.cache.setdefault(tuple(r.prompt[:end]), {}))
        ids = [t for r, a, length in zip(requests, starts, lengths) for t in r.prompt[a : a + length]]
        x = self.model.embed[torch.tensor(ids, device=self.device)][None]
        for layer in self.model.layers:
            x = layer.prefill(x, [r.table[0] for r in requests], starts, lengths, keep)
        last = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        best = self.model.logits(x[0, last]).argmax(-1).tolist()
        for r, length, token in zip(requests, lengths, best):
            r.done += length
            if r.done == len(r.prompt):
                r.text.append(token)
        return sum(lengths)

    def decode(self, requests: list[Request]) -> None:
        """The newest token of every request and DRAFT guesses after it, verified in one call per layer."""
        guesses = [guess(r.tokens(), DRAFT) for r in requests]
        ids = torch.tensor([[r.text[-1], *g] for r, g in zip(requests, guesses)], device=self.device)
        table = torch.tensor([r.table for r in requests], dtype=torch.int32, device=self.device)
        x = self.model.embed[ids]  # [N, 1 + DRAFT, hidden]
        for layer in self.model.layers:
            x = layer.verify(x, table)
        best = self.model.logits(x).argmax(-1).tolist()
        for r, g, b in zip(requests, guesses, best):
            right = next((i for i in range(DRAFT) if g[i] != b[i]), DRAFT)
            right = min(right, r.budget - len(r.text) - 1)
            r.text += b[: right + 1]
            r.done += right + 1
            r.drafted, r.accepted = r.drafted + DRAFT, r.accepted + right
            r.table[0], r.table[right + 1] = r.table[right + 1], r.table[0]  # the state after the last right token is the new base


def guess(tokens: list[int], count: int) -> list[int]:
    """What followed the last time the newest token was seen; the token itself where it is new."""
    history, newest = tokens[:-1], tokens[-1]
    at = next((i for i in range(len(history) - 1, -1, -1) if history[i] == newest), None)
    following = [] if at is None else tokens[at + 1 : at + 1 + count]
    return (following + [newest] * count)[:count]


def check(engine: Engine, request: Request) -> float:
    """How far the chosen tokens' logits lie below the best of one prefill over the whole text, in units of the logits' spread."""
    ids, slot = request.tokens(), engine.free.pop()
    x = engine.model.embed[torch.tensor(ids, device=engine.device)][None]
    for layer in engine.model.layers:
        x = layer.prefill(x, [slot], [0], [len(ids)], {})
    engine.free.append(slot)
    logits = engine.model.logits(x[0, len(request.prompt) - 1 : -1])
    chosen = logits.gather(1, torch.tensor(request.text, device=engine.device)[:, None]).squeeze(1)
    return float(((logits.max(1).values - chosen) / logits.std(1)).max())


def serve(engine: Engine, waiting: list[Request]) -> tuple[list[Request], int, int]:
    """Serve all requests, one newcomer per round, so that prompts arrive while others decode. (finished, prompt tokens, decode steps)."""
    waiting, running, finished, prefilled, steps = list(waiting), [], [], 0, 0
    while waiting or running:
        if waiting:
            engine.admit(waiting[0])
            running.append(waiting.pop(0))
        filling = [r for r in running if r.done < len(r.prompt)]
        writing = [r for r in running if r.done >= len(r.prompt)]
        if filling:
            prefilled += engine.prefill(filling)
        if writing:
            engine.decode(writing)
            steps += 1
        for r in [r for r in running if len(r.text) >= r.budget]:
            running.remove(r)
            finished.append(r)
            engine.free += r.table
    return finished, prefilled, steps


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("requests", 6), ("tokens", 24), ("prompt", 150), ("piece", 64), ("layers", 2), ("heads", 2), ("head-dim", 32)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    slots = options.requests * (2 + DRAFT) + 1
    model = Model(options.layers, options.heads, options.head_dim, slots, device, dtype)
    engine = Engine(model, slots, options.piece)
    gen = torch.Generator().manual_seed(1)
    text = lambda n: torch.randint(VOCABULARY, (n,), generator=gen).tolist()
    shared = text(options.prompt)
    waiting = [Request(shared[: options.prompt - 8 * (i % 2)] + text(1 + i), options.tokens) for i in range(options.requests)]
    serve(engine, [Request(text(BLOCK + 1), 2)])  # the first calls compile the kernels
    begin = time.perf_counter()
    finished, prefilled, steps = serve(engine, waiting)
    seconds = time.perf_counter() - begin
    generated = sum(len(r.text) for r in finished)
    hits = [r.from_cache for r in finished]
    drafted, accepted = sum(r.drafted for r in finished), sum(r.accepted for r in finished)
    print(f"{device}: {prefilled} prompt tokens and {generated} generated tokens in {seconds:.2f} s")
    rate = (prefilled + generated) / seconds
    print(f"  {rate:.0f} tokens/s, {steps} decode steps; eager Python around each layer's calls sets it, not the kernels")
    print(f"  prefix cache: {sum(h > 0 for h in hits)} hits, {sum(hits)} tokens not computed again")
    print(f"  drafts: {accepted} of {drafted} guessed tokens accepted, {drafted - accepted} rejected")
    gap = max(check(engine, r) for r in finished)
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-3
    print(f"  against one prefill of each text: largest logit gap {gap:.1e} (allowed {tolerance})")
    if gap > tolerance:
        raise SystemExit("the served text differs from one-shot prefill")


if __name__ == "__main__":
    main()
