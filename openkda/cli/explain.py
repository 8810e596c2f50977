"""`openkda explain`: who serves a call and why the others do not, how it is launched, and what it moves. Computes nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from openkda import backends
from openkda.cli import pipeline
from openkda.cli.errors import BadInput, refusals
from openkda.cli.recording import replacing
from openkda.problem import GATES, Problem, describe, fail

LARGEST = 2**40  # tokens, heads and the like, far beyond any device
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


class Device(NamedTuple):
    """A kind of device: "cpu" or "cuda", and its compute capability (None on a CPU and on AMD)."""

    type: str
    capability: tuple[int, int] | None

    def __str__(self) -> str:
        if self.type == "cpu":
            return "a CPU"
        return "an AMD GPU" if self.capability is None else "a CUDA GPU of compute capability " + ".".join(map(str, self.capability))


def this_device() -> Device:
    """The best device of this machine."""
    if not torch.cuda.is_available():
        return Device("cpu", None)
    return Device("cuda", None if torch.version.hip else torch.cuda.get_device_capability())


def parse_device(text: str | None) -> Device:
    """cpu, cuda (this machine's), cuda:9.0 (any compute capability) or rocm. BadInput for anything else."""
    if text is None:
        return this_device()
    if text == "cpu":
        return Device("cpu", None)
    if text == "rocm":
        return Device("cuda", None)
    if text == "cuda" and torch.cuda.is_available():
        return this_device()
    match = re.fullmatch(r"cuda:(\d+)\.(\d)", text)
    if not match:
        raise BadInput(f"--device is {text!r}; it must be cpu, rocm, cuda:MAJOR.MINOR such as cuda:9.0, or cuda on a machine that has one")
    return Device("cuda", (int(match[1]), int(match[2])))


def describe_call(
    *,
    device: Device,
    B: int = 1,
    T: int = 1024,
    H: int = 4,
    HV: int | None = None,
    K: int = 128,
    V: int | None = None,
    lengths: tuple[int, ...] | None = None,
    dtype: str = "bf16",
    gate_dtype: str | None = None,
    beta_dtype: str | None = None,
    state_dtype: str = "fp32",
    gate: str = "bounded",
    lower_bound: float = -5.0,
    safe_gate: bool = False,
    l2norm: bool = True,
    sigmoid: bool = True,
    neg_eigval: bool = False,
    initial_state: bool = False,
    final_state: bool = True,
    states: bool = False,
    v_first: bool = False,
    chunk_size: int = 64,
    grad: bool = False,
) -> Problem:
    """The Problem of a call with these sizes and options, checked as a real call is; BadInput for what a real call refuses."""
    with refusals():
        if gate not in GATES:
            raise fail("gate", repr(gate), "one of " + ", ".join(GATES))
        for name, value in (("dtype", dtype), ("gate_dtype", gate_dtype), ("beta_dtype", beta_dtype), ("state_dtype", state_dtype)):
            if value is not None and value not in DTYPES:
                raise fail(name, repr(value), "one of " + ", ".join(DTYPES))
        for name, value in (("B", B), ("T", T), ("H", H), ("HV", HV), ("K", K), ("V", V)):
            if value is not None and not 0 <= value <= LARGEST:
                raise fail(name, value, f"at least 0 and at most {LARGEST}")
        if lengths is not None:
            if min(lengths) < 0 or sum(lengths) > LARGEST:
                raise fail("lengths", list(lengths), f"at least 0 each and at most {LARGEST} in all")
            B, T = 1, sum(lengths)
        HV, V, N = H if HV is None else HV, K if V is None else V, B if lengths is None else len(lengths)
        meta = lambda *shape, dtype=dtype: torch.empty(*shape, dtype=DTYPES[dtype], device="meta")
        in_kernel = gate != "none"
        problem, _ = describe(
            meta(B, T, H, K), meta(B, T, H, K), meta(B, T, HV, V), meta(B, T, HV, K, dtype=gate_dtype or dtype),
            meta(B, T, HV, dtype=beta_dtype or dtype), A_log=meta(HV, dtype="fp32") if in_kernel else None,
            dt_bias=meta(HV, K, dtype="fp32") if in_kernel else None,
            initial_state=meta(N, HV, *((V, K) if v_first else (K, V)), dtype=state_dtype) if initial_state else None,
            cu_seqlens=None if lengths is None else torch.empty(N + 1, dtype=torch.int32, device="meta"), cu_seqlens_cpu=None, scale=None,
            use_gate_in_kernel=in_kernel, lower_bound=lower_bound if gate == "bounded" or safe_gate else None, safe_gate=safe_gate,
            use_qk_l2norm_in_kernel=l2norm, use_beta_sigmoid_in_kernel=sigmoid, allow_neg_eigval=neg_eigval,
            output_final_state=final_state, return_intermediate_states=states, state_v_first=v_first, chunk_size=chunk_size,
            check_lengths=False,
        )  # fmt: skip
    return problem.replace(device_type=device.type, capability=device.capability, needs_grad=grad)


def explain(problem: Problem, *, device: Device, backend: str | None, lengths: tuple[int, ...] | None, draw: Path | None) -> None:
    """Print everything about the call, and draw the map of its programs to `draw` (a .png file) where given."""
    with refusals():
        chosen = backends.choose(problem, backend)
    if draw is not None and draw.suffix != ".png":
        raise BadInput(f"--draw is {draw}; it must be a .png file")
    console = Console()
    console.print(f"[bold]The call[/] on {device}: {sizes(problem)}\n", highlight=False)
    console.print(backend_table(problem))
    for sentence in choices(problem, chosen, lengths):
        console.print(sentence, highlight=False)
    rows = pipeline.launch(problem, chosen)
    if rows:
        console.print(f"\n[italic]Launch configuration, {chosen}[/]")
        table = Table()
        table.add_column("field")
        table.add_column("value", justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    steps = pipeline.stages(problem, chosen)
    console.print(stage_table(f"Forward pipeline, {chosen}", steps))
    console.print(traffic(problem, chosen, steps), highlight=False)
    if problem.needs_grad and backends.choose_backward(problem, chosen) == "portable":
        console.print(stage_table("Backward pipeline, portable", pipeline.portable_backward_stages(problem)))
    if draw is not None:
        from openkda.cli.draw import draw_mapping

        with replacing(draw) as partial:
            draw_mapping(problem, chosen, device, lengths, partial)
        console.print(f"wrote {draw}", highlight=False)


def sizes(p: Problem) -> str:
    """The sizes and options in one line."""
    batch = f"{p.N} sequences in T={p.T:,}" if p.varlen else f"B={p.B}, T={p.T:,}"
    flags = [
        name for name in ("qk_l2norm", "beta_sigmoid", "neg_eigval", "has_initial_state", "state_v_first", "needs_grad") if getattr(p, name)
    ]
    gate = f"gate {p.gate}" + (f" at {p.lower_bound:g}" if p.lower_bound is not None else "")
    return ", ".join([batch, f"H={p.H}, HV={p.HV}, K={p.K}, V={p.V}", str(p.dtype).removeprefix("torch."), gate, *flags])


def backend_table(p: Problem) -> Table:
    """What each backend says to each form of the call."""
    table = Table(title="Backends, in the order dispatch asks them", title_justify="left", show_lines=True)
    for column in ("backend", "by chunks", "gradients", "token by token"):
        table.add_column(column)
    for name in backends.NAMES:
        answers = (backends.why_not(name, p), backends.why_not_backward(name, p), backends.why_not_recurrent(name, p))
        table.add_row(name, *("[green]serves[/]" if reason is None else reason for reason in answers))
    return table


def choices(p: Problem, chosen: str, lengths: tuple[int, ...] | None = None) -> list[str]:
    """Sentences on what runs."""
    backward = backends.choose_backward(p, chosen)
    sentences = [f"chunk_kda runs on [bold]{chosen}[/]; fused_recurrent_kda on [bold]{backends.choose_recurrent(p)}[/]."]
    if chosen == "torch":
        sentences.append("Gradients: autograd differentiates the torch backend itself.")
    elif backward == "torch":
        sentences.append("Gradients: the forward is recomputed by the torch backend on the same device, and autograd differentiates that.")
    else:
        sentences.append(f"Gradients: the kernels of the {backward} backend.")
    if backward == "hopper":
        from openkda.hopper.backward_config import choose_scans, keeping

        sentences.append(f"Their scans over chunks: {choose_scans(p, lengths).reason}.")
        kept = keeping(p)
        sentences.append(f"With disable_recompute=True {'nothing is kept' if kept is None else kept.reason}.")
    return sentences


def stage_table(title: str, steps: list[pipeline.Stage]) -> Table:
    """The pipeline with shapes and bytes."""
    table = Table(title=f"\n{title}", title_justify="left", show_lines=True)
    table.add_column("stage")
    table.add_column("tensors")
    table.add_column("MiB", justify="right")
    for stage in steps:
        moved = sum(item.bytes for item in (*stage.reads, *stage.writes))
        reads, writes = (", ".join(map(str, items)) for items in (stage.reads, stage.writes))
        cells = f"[bold]{stage.name}[/]\n{stage.work}\nover: {stage.programs}", f"[bold]in[/]  {reads}\n[bold]out[/] {writes}"
        table.add_row(*cells, f"{moved / 2**20:,.2f}")
    return table


def traffic(p: Problem, chosen: str, steps: list[pipeline.Stage]) -> str:
    """Bytes moved by all stages beside the least that any implementation moves."""
    floor = sum(item.bytes for item in (*pipeline.inputs(p).values(), *steps[-1].writes))
    if chosen == "torch":
        return f"Inputs and outputs: {floor / 2**20:,.2f} MiB. The shapes between hold one segment, not the whole call."
    moved = sum(item.bytes for step in steps for item in (*step.reads, *step.writes))
    least = f"{moved / max(floor, 1):.2f} times the inputs and outputs ({floor / 2**20:,.2f} MiB)"
    return f"Moved in all, at most: {moved / 2**20:,.2f} MiB, {least}."
