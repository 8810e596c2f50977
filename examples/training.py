"""The training loop that the examples share: progress bar, seed, resume, learning-rate schedule, curve."""

from __future__ import annotations

import argparse
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
    seconds: list[float] = field(default_factory=list)  # since the first step, resumed runs included
    eval_step: list[int] = field(default_factory=list)
    eval_value: list[float] = field(default_factory=list)


def add_training_arguments(parser: argparse.ArgumentParser, *, steps: int, batch: int, length: int, lr: float) -> None:
    """The options every training example has, with the example's own defaults."""
    parser.add_argument("--steps", type=int, default=steps, help=f"optimiser steps (default {steps})")
    parser.add_argument("--batch", type=int, default=batch, help=f"sequences a step (default {batch})")
    parser.add_argument("--length", type=int, default=length, help=f"tokens a sequence (default {length})")
    parser.add_argument("--lr", type=float, default=lr, help=f"peak learning rate (default {lr})")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data (default 0)")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, curve and log")
    parser.add_argument("--resume", action="store_true", help="go on from the state saved in --out")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which training ends, its schedule included")
    parser.add_argument("--eval-every", type=int, default=100, help="steps between evaluations (default 100)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")


def adamw(model: nn.Module, lr: float, weight_decay: float = 0.1) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: not on norms, biases and the two decay parameters of KDA."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over the first twentieth, then a cosine down to a twentieth of the peak; progress in [0, 1]."""
    if progress < 0.05:
        return peak * (0.02 + 0.98 * progress / 0.05)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (progress - 0.05) / 0.95)))


def fit(
    model: nn.Module,
    loss_at: Callable[[int], Tensor],
    *,
    options: argparse.Namespace,
    evaluate: Callable[[], float],
    eval_name: str,
    stop_at: float | None = None,
) -> History:
    """Train `model` in place.

    Args:
        loss_at: step -> loss. It must draw its data from the seed and the step alone, so that a resumed run sees the
            data that an uninterrupted one would have seen.
        options: the namespace of `add_training_arguments`.
        evaluate: () -> the figure of merit, called in eval mode without gradients every `eval_every` steps and at the end.
        eval_name: its name, for the bar and the curve.
        stop_at: end early once the figure of merit reaches this value.
    """
    state_path = options.out / "state.pt"
    if options.resume and not state_path.exists():
        raise FileNotFoundError(f"--resume: there is no {state_path} to go on from")
    options.out.mkdir(parents=True, exist_ok=True)
    optimizer = adamw(model, options.lr)
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
        model.eval()
        with torch.no_grad(), precision:
            value = evaluate()
        model.train()
        history.eval_step.append(step)
        history.eval_value.append(value)
        return value

    precision = torch.autocast(torch.device(options.device).type, torch.bfloat16, enabled=torch.device(options.device).type == "cuda")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    spent = history.seconds[-1] if history.seconds else 0.0
    began = time.monotonic() - spent
    model.train()
    value = history.eval_value[-1] if history.eval_value else math.nan
    step = first
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=options.steps, completed=first)
        while step < options.steps:
            fraction = max(step / options.steps, (time.monotonic() - began) / options.time_limit)
            if fraction >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(fraction, options.lr)
            with precision:
                loss = loss_at(step)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 10 == 0 or step == options.steps:  # reading the loss waits for the device
                history.step.append(step)
                history.loss.append(loss.item())
                history.seconds.append(time.monotonic() - began)
                progress.update(task, description=f"loss {history.loss[-1]:.3f}  {eval_name} {value:.3f}")
            progress.advance(task)
            if step % options.eval_every == 0 and step < options.steps:
                value = measure(step)
                save(step)
                if stop_at is not None and value >= stop_at:
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
