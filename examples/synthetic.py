"""The synthetic tasks of the Kimi Linear paper (arXiv 2510.26692, section 5.1) with a two-layer KDA model.

    python examples/synthetic.py mqar --out out/mqar                          a minute on a CPU, a toy
    python examples/synthetic.py stack --out out/stack --length 1024 --batch 64 --hidden 256 --head-dim 128 \\
        --steps 20000 --workers 4                                             the paper's size, on a GPU

palindrome   random symbols, a separator, the symbols in reverse; every reversed symbol is predicted.
mqar         key-value pairs, then keys in random order; the value is predicted at each key (associative recall).
stack        64 stacks; "push s x" and "pop s x"; the popped x is predicted at s, last in first out.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime, timezone
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from training import add_training_arguments, fit

import openkda
from openkda.model import KDAConfig, KDAForCausalLM

STACKS = 64
IGNORE = -100


def palindrome(random: np.random.Generator, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Symbols 1..32, separator 0. tokens and targets [batch, length]; target t is the token to predict after token t."""
    half = (length + 1) // 2
    word = random.integers(1, 33, (batch, half))
    text = np.concatenate([word, np.zeros((batch, 1), np.int64), word[:, ::-1]], 1)
    targets = text[:, 1:].copy()
    targets[:, :half] = IGNORE
    return text[:, :-1][:, :length], targets[:, :length]


def mqar(random: np.random.Generator, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """length/8 pairs of a key (0..511) and a value (512..1023), then keys seen before, each followed by its value."""
    pairs, queries = max(length // 8, 1), length // 2 - max(length // 8, 1)
    keys = random.random((batch, 512)).argsort(1)[:, :pairs]
    values = random.integers(512, 1024, (batch, pairs))
    asked = random.integers(0, pairs, (batch, queries))
    chosen = lambda table: np.concatenate([table, np.take_along_axis(table, asked, 1)], 1)
    tokens = np.stack([chosen(keys), chosen(values)], 2).reshape(batch, -1)
    targets = np.full_like(tokens, IGNORE)
    targets[:, 2 * pairs :: 2] = tokens[:, 2 * pairs + 1 :: 2]
    return tokens, targets


def stack(random: np.random.Generator, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Operations of three tokens: push (0) or pop (1), a stack (2..65), a symbol (66..129); half of them pops where possible."""
    rows, operations = np.arange(batch), length // 3
    content = np.zeros((batch, STACKS, operations), np.int16)
    depth = np.zeros((batch, STACKS), np.int16)
    tokens = np.zeros((batch, operations, 3), np.int64)
    targets = np.full_like(tokens, IGNORE)
    wish = random.random((operations, batch)) < 0.5
    order = random.random((operations, batch, STACKS), np.float32)
    fresh = random.integers(66, 130, (operations, batch))
    for i in range(operations):
        filled = depth > 0
        pop = wish[i] & filled.any(1)
        order[i] += pop[:, None] & filled  # a pop picks among the stacks that hold something
        which = order[i].argmax(1)
        top = depth[rows, which] - pop
        symbol = np.where(pop, content[rows, which, top], fresh[i])
        content[rows, which, top] = symbol
        depth[rows, which] = top + ~pop
        tokens[:, i, 0], tokens[:, i, 1], tokens[:, i, 2] = pop, which + 2, symbol
        targets[:, i, 1] = np.where(pop, symbol, IGNORE)
    return tokens.reshape(batch, -1), targets.reshape(batch, -1)


TASKS = {"palindrome": (palindrome, 33), "mqar": (mqar, 1024), "stack": (stack, 130)}  # generator, vocabulary


def length_at(step: int, *, length: int, start: int, stage: int) -> int:
    """Tokens a sequence at a step: `start`, doubled after every `stage` steps up to `length`."""
    return min(length, start * 2 ** min(step // stage, 30))


class Batches(Dataset):
    """Batch `step` of a task, drawn from the seed and the step alone; shorter sequences come in larger batches of as many tokens."""

    def __init__(self, task: str, batch: int, length: int, seed: int, *, start: int, stage: int):
        self.make, self.batch, self.length, self.seed, self.start, self.stage = TASKS[task][0], batch, length, seed, start, stage

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        length = length_at(step, length=self.length, start=self.start, stage=self.stage)
        tokens, targets = self.make(np.random.default_rng((self.seed, step)), self.batch * (self.length // length), length)
        return torch.from_numpy(np.ascontiguousarray(tokens)), torch.from_numpy(np.ascontiguousarray(targets))


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(TASKS))
    add_training_arguments(parser, steps=600, batch=32, length=32, lr=4e-3)
    parser.add_argument("--hidden", type=int, default=64, help="hidden size (default 64; the paper's size 256)")
    parser.add_argument("--layers", type=int, default=2, help="blocks (default 2)")
    parser.add_argument("--heads", type=int, default=2, help="heads (default 2)")
    parser.add_argument("--head-dim", type=int, default=32, help="key and value dim of a head (default 32; the paper's 128)")
    parser.add_argument("--lower-bound", type=float, default=None, help="bounded gate with this bound (default: softplus gate)")
    parser.add_argument("--backend", default=None, help="kernel backend of the KDA layers (default: the best that serves)")
    parser.add_argument("--stop-at", type=float, default=0.999, help="end once this accuracy is reached (default 0.999)")
    parser.add_argument("--start-length", type=int, default=None, help="tokens a sequence at first (default: --length throughout)")
    parser.add_argument("--stage", type=int, default=500, help="steps after which that length doubles, up to --length (default 500)")
    parser.add_argument("--workers", type=int, default=0, help="processes that make the data (default 0: this one)")
    options = parser.parse_args(arguments)

    torch.manual_seed(options.seed)
    config = KDAConfig(
        vocab_size=TASKS[options.task][1],
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 2,
        num_hidden_layers=options.layers,
        layer_types=["linear_attention"] * options.layers,
        num_heads=options.heads,
        head_dim=options.head_dim,
        lower_bound=options.lower_bound,
        initializer_range=options.hidden**-0.5,
        kda_backend=options.backend,
    )
    model = KDAForCausalLM(config).to(options.device)
    start = options.length if options.start_length is None else options.start_length
    data = partial(Batches, options.task, options.batch, options.length, stage=options.stage)
    batches, test = data(options.seed, start=start), data(options.seed + 2**31, start=options.length)
    on_device = lambda pair: tuple(x.to(options.device, non_blocking=True) for x in pair)
    held_out = [on_device(test[i]) for i in range(4)]
    stream = None

    def batch_at(step: int) -> tuple[torch.Tensor, ...]:
        nonlocal stream
        if stream is None:  # a resumed run starts at its own step
            loader = DataLoader(batches, batch_size=None, sampler=range(step, options.steps), num_workers=options.workers)
            stream = iter(loader)
        return on_device(next(stream))

    logits_of = lambda tokens: model(tokens, use_cache=False).logits  # [B, T, vocabulary]

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits_of(tokens).flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE)

    def accuracy() -> float:
        right = sum((logits_of(tokens).argmax(-1) == targets).sum() for tokens, targets in held_out)  # IGNORE is no symbol
        return right.item() / sum((targets != IGNORE).sum().item() for _, targets in held_out)

    history = fit(model, batch_at, loss_of, options=options, evaluate=accuracy, eval_name="accuracy", stop_at=options.stop_at,
                  record=options.backend != "torch")  # fmt: skip
    summary = {
        "task": options.task,
        "command": "python examples/synthetic.py " + " ".join(sys.argv[1:] if arguments is None else arguments),
        "length": options.length,
        "seed": options.seed,
        "steps": history.eval_step[-1],
        "accuracy": round(history.eval_value[-1], 5),
        "seconds": round(history.seconds[-1], 1) if history.seconds else None,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
        "versions": f"openkda {openkda.__version__}, torch {torch.__version__}, python {sys.version.split()[0]}",
    }
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary))
    return summary


if __name__ == "__main__":
    main()
