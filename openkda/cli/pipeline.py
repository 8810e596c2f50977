"""What a call does, stage by stage: the tensors each stage reads and writes, and how its programs map to tokens, heads and value columns.

Pure functions of a Problem and the name of the backend that serves it; used by `openkda explain`. No device is needed."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from openkda.problem import Problem

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.int32: "int32"}
HOPPER_WORK = "gate, scores, inverse, r, S and o, 32 tokens a step"
BLOCK = 16  # rows of a diagonal sub-block, in every backend


@dataclass(frozen=True)
class Item:
    """A tensor by name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return "\N{NO-BREAK SPACE}".join((*self.name.split(), "x".join(map(str, self.shape)), SHORT[self.dtype]))


@dataclass(frozen=True)
class Stage:
    """One step of the pipeline: a kernel, or a few lines of torch."""

    name: str
    work: str
    programs: str  # what runs in parallel
    reads: tuple[Item, ...]
    writes: tuple[Item, ...]


@dataclass(frozen=True)
class Mapping:
    """How programs map to the call, for the picture."""

    chunk: int  # tokens per step of the state pass
    scores: int  # rows of the score blocks: the chunk of the algebra
    form: str  # pairs inside a diagonal block of 16: "product" about one anchor, the same by "halves", or "levels"
    columns: int  # value columns of the state per program of the serial pass
    chunk_programs: str
    scan_programs: str
    segment_steps: int = 0  # steps of a segment where sequences are cut; 0: they are not


def inputs(p: Problem) -> dict[str, Item]:
    """The tensors given to the call."""
    tensors = {
        "q": Item("q", (p.B, p.T, p.H, p.K), p.dtype),
        "k": Item("k", (p.B, p.T, p.H, p.K), p.dtype),
        "v": Item("v", (p.B, p.T, p.HV, p.V), p.dtype),
        "g": Item("g", (p.B, p.T, p.HV, p.K), p.gate_dtype),
        "beta": Item("beta", (p.B, p.T, p.HV), p.beta_dtype),
    }
    if p.has_A_log:
        tensors["A_log"] = Item("A_log", (p.HV,), torch.float32)
    if p.has_dt_bias:
        tensors["dt_bias"] = Item("dt_bias", (p.HV, p.K), torch.float32)
    if p.has_initial_state:
        tensors["initial_state"] = Item("initial_state", p.state_shape, p.state_dtype)
    return tensors


def outputs(p: Problem) -> tuple[Item, ...]:
    """The tensors returned."""
    results = [Item("o", (p.B, p.T, p.HV, p.V), p.dtype)]
    if p.output_final_state:
        results.append(Item("final_state", p.state_shape, p.state_dtype))
    if p.return_intermediate_states:
        results.append(Item("h", (chunk_count(p, p.chunk_size), p.HV, *p.state_shape[-2:]), p.dtype))
    return tuple(results)


def chunk_count(p: Problem, chunk: int) -> int:
    """Chunks of the call; for a ragged batch the bound that the host knows."""
    return p.T // chunk + p.N if p.varlen else p.B * -(-p.T // chunk)


def stages(p: Problem, backend: str) -> list[Stage]:
    """The forward of `backend`, in the order it runs."""
    return {"torch": torch_stages, "portable": portable_stages, "hopper": hopper_stages}[backend](p)


def torch_stages(p: Problem) -> list[Stage]:
    """openkda/torch_forward.py: segments of whole chunks, so the intermediates below hold one segment at a time."""
    from openkda.torch_forward import segment_tokens
    from openkda.torch_scores import CHUNK

    step = min(-(-p.T // CHUNK) * CHUNK, segment_tokens(p, p.B, torch.device(p.device_type)))
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    given = inputs(p)
    segment = lambda name, width: Item(name, (p.B, step, p.HV, width), dtype)
    prepared = (segment("q", p.K), segment("k", p.K), segment("v", p.V), segment("g", p.K), segment("beta", 1))
    scores = (segment("qd", p.K), segment("kd", p.K), segment("kg", p.K), segment("Aqk", CHUNK), segment("L", CHUNK))
    solved = (segment("Aqk Linv", CHUNK), segment("Linv^T kg", p.K))
    state = (given["initial_state"],) if p.has_initial_state else ()
    first = tuple(given[name] for name in given if name != "initial_state")
    return [
        Stage("prepare", f"norms, gate, beta in {str(dtype)[6:]}", f"segments of {step} tokens, in turn", first, prepared),
        Stage("scores", f"G within chunks of {CHUNK}, decayed rows, Aqk and L", "chunk, head", (*prepared[:2], *prepared[3:]), scores),
        Stage("inverse", "Linv by substitution, its two products", "chunk, head", (prepared[4], *scores[2:]), solved),
        Stage(
            "state pass", "v - kd S and S, chunk after chunk, then o", "head", (prepared[2], *scores[:2], *solved, *state),
            outputs(p),
        ),
    ]  # fmt: skip


def portable_stages(p: Problem) -> list[Stage]:
    """openkda/portable/forward.py."""
    from openkda.portable.config import configure

    config = configure(p)
    given, NC = inputs(p), chunk_count(p, config.chunk)
    of = lambda name, width, dtype=p.dtype: Item(name, (p.B, p.T, p.HV, width), dtype)
    G, gate = of("G", p.K, torch.float32), tuple(given[name] for name in ("g", "A_log", "dt_bias") if name in given)
    written = (of("w", p.K), of("kg", p.K), of("u", p.V), G, of("qg", p.K), of("Aqk", config.chunk))
    state = (given["initial_state"],) if p.has_initial_state else ()
    steps = [
        Stage("gate_cumsum", "gate, summed within chunks", f"{NC} chunks x {p.HV} heads x {-(-p.K // config.gate_block_k)}", gate, (G,)),
        *chunk_stages(p, f"{NC} chunks x {p.HV} heads", config.chunk),
    ]  # fmt: skip
    scan = f"{p.N} sequences x {p.HV} heads x {-(-p.V // config.scan_block_v)}"
    return [*steps, Stage("scan_output", "r, S and o, chunk after chunk", scan, (*written, *state), outputs(p))]


def chunk_stages(p: Problem, cells: str, C: int, again: str = "", also: tuple[Item, ...] = ()) -> list[Stage]:
    """The three kernels of openkda/portable/wy.py's prepare, each one program per chunk and head; `also` is written for a backward."""
    given = inputs(p)
    of = lambda name, width, dtype=p.dtype: Item(name, (p.B, p.T, p.HV, width), dtype)
    G, L, Linv = (of(name, width, torch.float32) for name, width in (("G", p.K), ("L", C), ("Linv", C)))
    wy = (of("w", p.K), of("u", p.V), of("kg", p.K), of("qg", p.K), *also)
    return [
        Stage("intra", f"{again}scores", cells, (given["q"], given["k"], G, given["beta"]), (of("Aqk", C), L)),
        Stage("solve", f"{again}inverse, in place", cells, (L,), (Linv,)),
        Stage("wy", f"{again}WY form", cells, (given["q"], given["k"], given["v"], G, given["beta"], Linv), wy),
    ]


def portable_backward_stages(p: Problem) -> list[Stage]:
    """openkda/portable/backward.py: what the forward did is computed again (or kept, with disable_recompute), then the gradients."""
    from openkda.portable.backward_config import configure_backward
    from openkda.portable.backward_scores import group_tiles

    p = p.replace(dtype=torch.float32) if p.dtype == torch.float16 else p
    config = configure_backward(p)
    C, given = config.forward.chunk, inputs(p)
    NC = chunk_count(p, C)
    of = lambda name, width, dtype=p.dtype: Item(name, (p.B, p.T, p.HV, width), dtype)
    gate = tuple(given[name] for name in ("g", "A_log", "dt_bias") if name in given)
    G, Aqk, T, factors = of("G", p.K, torch.float32), of("Aqk", C), of("T", C), of("factors", 4, torch.float32)
    w, kg, qg = (of(name, p.K) for name in ("w", "kg", "qg"))
    u, r, o, do, dv, dr = (of(name, p.V) for name in ("u", "r", "o", "do", "dv", "dr"))
    h, dh = (Item(name, (NC, p.HV, p.K, p.V), p.dtype) for name in ("h", "dh"))
    groups = Item("groups", (NC, p.HV, group_tiles(config.forward.form, C), C, C), p.dtype)
    dq, dk, dg = of("dq", p.K), of("dk", p.K), of("dg", p.K, p.gate_dtype)
    dbeta, state = Item("dbeta", (p.B, p.T, p.HV), p.beta_dtype), (given["initial_state"],) if p.has_initial_state else ()
    dstate = tuple(Item("dS_0", item.shape, item.dtype) for item in state)
    parameters = tuple(Item(f"d{item.name}", item.shape, torch.float32) for item in gate[1:])
    cells = f"{NC} chunks x {p.HV} heads"
    rows = f"{p.N} sequences x {p.HV} heads"
    columns = -(-p.V // config.scan_block_v)
    return [
        Stage("gate_cumsum", "again: gate, summed within chunks", f"{cells} x {-(-p.K // config.forward.gate_block_k)}", gate, (G,)),
        *chunk_stages(p, cells, C, "again: ", (T, factors)),
        Stage("state_scan", "again: r and S", f"{rows} x {-(-p.V // config.forward.scan_block_v)}", (w, kg, u, G, *state), (h, r)),
        Stage("reverse_scan", "dS, last chunk first", f"{rows} x {columns}", (w, kg, qg, G, Aqk, do), (dh, dr, *dstate)),
        Stage(
            "score_gradients", "dv, dbeta, gradients of the scores", cells, (T, r, dr, given["v"], o, do, given["beta"], factors),
            (dv, dbeta, groups, factors),
        ),
        Stage(
            "input_gradients", "dq, dk, dg, gradients of the gate", f"{cells} x {-(-p.K // config.block_k)}",
            (given["q"], given["k"], *gate, G, factors, h, dh, r, do, dv, groups), (dq, dk, dg, *parameters),
        ),
    ]  # fmt: skip


def hopper_stages(p: Problem) -> list[Stage]:
    """openkda/hopper/launch.py: one kernel keeps every intermediate of a chunk in shared memory and registers. Where few heads meet long
    sequences, these are cut into segments, whose entry states come first."""
    from openkda.hopper.config import BLOCK, STEP, choose

    config, given = choose(p), inputs(p)
    state = (given["initial_state"],) if p.has_initial_state else ()
    gate = tuple(given[name] for name in ("g", "A_log", "dt_bias") if name in given)
    blocks = -(-p.V // config.forward.R)
    lanes = f" x {len(config.lanes)} lanes" * (len(config.lanes) > 1)
    if not config.steps:
        over = f"{p.N} sequences{lanes} x {p.HV} heads x {blocks}"
        return [Stage("forward", HOPPER_WORK, over, tuple(given.values()), outputs(p))]
    tokens = STEP * config.steps
    NS = p.N + p.T // tokens if p.varlen else p.B * -(-p.T // tokens)
    over = f"{NS} segments x {p.HV} heads"
    known = Item("known", (p.HV, NS), torch.int32)
    cut = min(NS, 2 * max(1, p.T // tokens)) if p.varlen else NS  # segments of sequences that are cut
    entry = Item("entry", (cut, p.HV, p.V, p.K), torch.float32)
    read = (given["k"], given["v"], *gate, given["beta"], *state)
    tail = f"{BLOCK * config.tail} tokens before a segment"
    unsplit = f"{p.N} sequences{lanes} x {p.HV} heads x {p.V // (config.whole or config.forward).R}"
    whole = Stage("whole", f"{HOPPER_WORK}, of heads whose tails do not suffice", unsplit, (*given.values(), known), outputs(p))
    if config.forward.split == "tails":
        what = f"{HOPPER_WORK}, of segments that find their entry state in the {tail}"
        return [Stage("forward", what, f"{over} x {blocks}", tuple(given.values()), (*outputs(p), known)), whole]
    steps = [Stage("tails", f"entry states from the {tail}, and whether these suffice", over, read, (entry, known))]
    if config.whole is None:
        summary = Item("summary", (NS, p.HV, 2, p.V, p.K), torch.float32)
        combine = f"{p.N} sequences x {p.HV} heads x {p.V // 16}"
        steps += [
            Stage("summary", "(M, b) of segments whose successor's entry is not known", over, (*read, known), (summary,)),
            Stage("combine", "entry states, segment after segment", combine, (summary, known), (entry,)),
        ]
    else:
        steps.append(whole)
    return [*steps, Stage("forward", HOPPER_WORK, f"{over} x {blocks}", (*given.values(), known, entry), outputs(p))]


def mapping(p: Problem, backend: str) -> Mapping:
    """The map of programs to tokens, heads and value columns."""
    if backend == "torch":
        return Mapping(32, 32, "product", p.V, "one batched product over chunks and heads", "one batched product over heads")
    if backend == "portable":
        from openkda.portable.config import configure

        config = configure(p)
        form = "product" if config.form == "matrix" else "levels"
        return Mapping(
            config.chunk, config.chunk, form, min(p.V, config.scan_block_v), "intra, solve, wy: one program per cell each",
            f"scan: one program per row, {config.scan_warps} warps, {config.scan_stages} stages",
        )  # fmt: skip
    from openkda.hopper.config import BLOCK as scores
    from openkda.hopper.config import STEP, choose

    config = choose(p)
    form = "product" if config.forward.form == "steps" else config.forward.form
    prepared = f"prepared in shared memory by {config.forward.preps} partitions of 4 warps"
    prepared += ", every second 64 tokens by the other block of a cluster" * config.forward.cluster
    scan = f"one block per row, {config.forward.scan_warps} warps"
    return Mapping(STEP, scores, form, config.forward.R, prepared, scan, config.steps)


def launch(p: Problem, backend: str) -> list[tuple[str, str]]:
    """The launch configuration as (field, value); empty for the torch backend, which launches nothing of its own."""
    if backend == "torch":
        return []
    if backend == "hopper":
        from openkda.hopper.config import choose as configure
    else:
        from openkda.portable.config import configure

    return flatten(configure(p))


def flatten(config: object) -> list[tuple[str, str]]:
    """Fields of a frozen dataclass, those of nested ones after their parent's name."""
    rows = []
    for f in fields(config):
        value = getattr(config, f.name)
        if hasattr(value, "__dataclass_fields__"):
            rows += [(f"{f.name}.{name}", text) for name, text in flatten(value)]
        else:
            rows.append((f.name, str(value)))
    return rows
