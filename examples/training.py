"""The training loop that the examples share: progress bar, seed, resume, learning-rate schedule, curve."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn


@dataclass
class History:
    """What a run reached, step by step; saved as JSON beside the weights."""

    step: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)  # training loss, nats
    seconds: list[float] = field(default_factory=list)  # of training, resumed runs included, compilation and evaluation left out
    eval_step: list[int] = field(default_factory=list)
    eval_value: list[float] = field(default_factory=list)


def add_training_arguments(parser: argparse.ArgumentParser, *, steps: int, batch: int, length: int, lr: float) -> None:
    """The options every training example has, with the example's own defaults."""
    parser.add_argument("--steps", type=int, default=steps, help=f"optimiser steps (default {steps})")
    parser.add_argument("--batch", type=int, default=batch, help=f"sequences a step (default {batch})")
    parser.add_argument("--length", type=int, default=length, help=f"tokens a sequence (default {length})")
    parser.add_argument("--lr", type=float, default=lr, help=f"peak learning rate (default {lr})")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="of the matrices (default 0.1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data (default 0)")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, curve and log")
    parser.add_argument("--resume", action="store_true", help="go on from the state saved in --out")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds of training after which it ends, its schedule included")
    parser.add_argument("--eval-every", type=int, default=100, help="steps between evaluations (default 100)")
    parser.add_argument("--save-every", type=int, default=None, help="steps between saved states (default: as --eval-every)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")


def adamw(model: nn.Module, lr: float, weight_decay: float = 0.1) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: not on norms, biases and the two decay parameters of KDA.

    The learning rate is a tensor on the model's device, which a recorded step reads at every replay.
    """
    device = next(model.parameters()).device
    decays = ([p for p in model.parameters() if p.dim() >= 2], weight_decay), ([p for p in model.parameters() if p.dim() < 2], 0.0)
    groups = [{"params": found, "weight_decay": decay, "lr": torch.tensor(lr, device=device)} for found, decay in decays]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=device.type == "cuda", capturable=device.type == "cuda")


class Step:
    """One optimiser step: loss, gradients, clipping, update. Call it with a batch (a tuple of tensors); it returns the loss.

    On a GPU the steps after the first `WARM_UP` of a batch shape are replays of a CUDA graph: models of this size cost more time to
    launch than to run. The returned loss is then overwritten by the next step.
    """

    WARM_UP = 3  # kernels compile and the optimiser makes its state

    def __init__(self, model: nn.Module, loss_of: Callable[..., Tensor], optimizer: torch.optim.Optimizer, precision: torch.autocast,
                 *, record: bool = True):  # fmt: skip
        """precision: for the loss, its device that of the model; record: replay a graph where the device has graphs."""
        self.model, self.loss_of, self.optimizer, self.precision = model, loss_of, optimizer, precision
        self.stream = torch.cuda.current_stream() if record and precision.device == "cuda" else None
        self.seen: dict[tuple[torch.Size, ...], int] = {}
        self.recorded: dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]] = {}

    def warming(self, batch: tuple[Tensor, ...]) -> bool:
        """Whether the step on this batch compiles or records, so that its time says nothing."""
        seen = self.seen.get(tuple(x.shape for x in batch), 0)
        return seen <= self.WARM_UP if self.stream else seen == 0

    def run(self, batch: tuple[Tensor, ...]) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with self.precision:
            loss = self.loss_of(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def __call__(self, batch: tuple[Tensor, ...]) -> Tensor:
        shape = tuple(x.shape for x in batch)
        self.seen[shape] = self.seen.get(shape, 0) + 1
        if self.stream is None or self.seen[shape] <= self.WARM_UP:
            return self.run(batch)
        if shape not in self.recorded:
            graph, inputs = torch.cuda.CUDAGraph(), tuple(x.clone() for x in batch)
            self.optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph, stream=self.stream):
                loss = self.run(inputs)
            self.recorded[shape] = graph, inputs, loss
        graph, inputs, loss = self.recorded[shape]
        for kept, x in zip(inputs, batch):
            kept.copy_(x)
        graph.replay()
        return loss


class Clock:
    """Seconds since it was made, plus those it starts with, less those skipped."""

    def __init__(self, spent: float):
        self.began = time.monotonic() - spent

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def skip(self, seconds: float) -> None:
        self.began += seconds


def own_stream(device: str) -> contextlib.AbstractContextManager:
    """On a GPU a stream beside the default one, which cannot be recorded; it starts after what the default stream holds."""
    if not device.startswith("cuda"):
        return contextlib.nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over the first twentieth, then a cosine down to a twentieth of the peak; progress in [0, 1]."""
    if progress < 0.05:
        return peak * (0.02 + 0.98 * progress / 0.05)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (progress - 0.05) / 0.95)))


def fit(
    model: nn.Module,
    batch_at: Callable[[int], tuple[Tensor, ...]],
    loss_of: Callable[..., Tensor],
    *,
    options: argparse.Namespace,
    evaluate: Callable[[], float],
    eval_name: str,
    stop_at: float | None = None,
    record: bool = True,
) -> History:
    """Train `model` in place.

    Args:
        batch_at: step -> the tensors of its batch, on the model's device. Drawn from the seed and the step alone, so that a resumed
            run sees the data that an uninterrupted one would have seen.
        loss_of: (*batch) -> loss. On a GPU it must not wait for the device.
        options: the namespace of `add_training_arguments`.
        evaluate: () -> the figure of merit, called in eval mode without gradients every `eval_every` steps and at the end.
        eval_name: its name, for the bar and the curve.
        stop_at: end early once the figure of merit reaches this value.
        record: on a GPU replay the step as a graph; False for a step that reads values on the host.
    """
    state_path = options.out / "state.pt"
    if options.resume and not state_path.exists():
        raise FileNotFoundError(f"--resume: there is no {state_path} to go on from")
    options.out.mkdir(parents=True, exist_ok=True)
    optimizer = adamw(model, options.lr, options.weight_decay)
    history, first = History(), 0
    if options.resume:
        state = torch.load(state_path, map_location=options.device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        history, first = History(**state["history"]), state["step"]

    def save(step: int) -> None:
        partial = state_path.with_suffix(".part")  # an interrupted save leaves the last good state in place
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "history": asdict(history), "step": step}
        torch.save(saved, partial)
        partial.replace(state_path)
        (options.out / "history.json").write_text(json.dumps(asdict(history)))

    def measure(step: int) -> float:
        paused = time.monotonic()
        model.eval()
        with torch.no_grad(), precision:
            value = evaluate()
        model.train()
        history.eval_step.append(step)
        history.eval_value.append(value)
        clock.skip(time.monotonic() - paused)
        return value

    device_type = torch.device(options.device).type
    precision = torch.autocast(device_type, torch.bfloat16, enabled=device_type == "cuda")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    clock = Clock(history.seconds[-1] if history.seconds else 0.0)
    model.train()
    value = history.eval_value[-1] if history.eval_value else math.nan
    step = first
    with Progress(*columns) as progress, own_stream(options.device):
        task = progress.add_task("training", total=options.steps, completed=first)
        update = Step(model, loss_of, optimizer, precision, record=record)
        while step < options.steps:
            fraction = max(step / options.steps, clock.seconds / options.time_limit)
            if fraction >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"].fill_(learning_rate(fraction, options.lr))
            batch = batch_at(step)
            warming, begin = update.warming(batch), time.monotonic()
            loss = update(batch)
            if warming:
                loss.item()  # waits for the device
                clock.skip(time.monotonic() - begin)
            step += 1
            if step % 10 == 0 or step == options.steps:  # reading the loss waits for the device
                history.step.append(step)
                history.loss.append(loss.item())
                history.seconds.append(clock.seconds)
                progress.update(task, description=f"loss {history.loss[-1]:.3f}  {eval_name} {value:.3f}")
            progress.advance(task)
            if step == options.steps:
                break  # measured and saved below
            due = step % options.eval_every == 0
            if due:
                value = measure(step)
            if step % (options.save_every or options.eval_every) == 0:
                save(step)
            if due and stop_at is not None and value >= stop_at:
                break
        if not history.eval_step or history.eval_step[-1] != step:
            measure(step)
        save(step)
    plot(history, eval_name, options.out / "curve.png")
    return history


def plot(history: History, eval_name: str, path: Path) -> None:
    """Training loss and figure of merit over the steps, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4))
    axis.plot(history.step, history.loss, color="tab:blue", linewidth=1, label="training loss (nats)")
    axis.set_xlabel("step")
    axis.set_ylabel("training loss (nats)")
    twin = axis.twinx()
    twin.plot(history.eval_step, history.eval_value, color="tab:orange", marker="o", label=eval_name)
    twin.set_ylabel(eval_name)
    figure.legend(loc="upper right", bbox_to_anchor=(0.88, 0.95))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
