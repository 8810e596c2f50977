"""What a token costs as the context grows: KDA, softmax attention (rotary) and a hybrid of both, equal parameters, random weights.

    python examples/context_cost.py --out out/context                                    a toy, on a CPU
    python examples/context_cost.py --out out/context --hidden 512 --layers 6 --heads 4 --head-dim 128 --batch 16 \\
        --contexts 1024 4096 16384 65536 --train-tokens 65536                           on a GPU

For each context length: fill the cache with that many tokens of every sequence, then decode one token at a time; and train on
sequences of that length. Prints each row as it is measured and writes cost.json and cost.png: tokens per second of decoding and of
training, bytes of cache per sequence. On a GPU decoding is timed twice: step by step as a program calls it, and as replays of one
CUDA graph, which leaves the host's time out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import torch
from lm import build, loss_of
from rich.console import Console
from rich.table import Table
from training import Step, adamw, own_stream

import openkda
from openkda.model import CACHE_NAME, KDAForCausalLM
from openkda.model_cache import KDAModelCache

PIECE = 8192  # tokens a prefill call, all sequences together, so that a long context needs no more memory than its cache
TRAINING_STEPS = 4  # timed ones of each length, after the warm-up of `training.Step`


def cache_bytes(cache: KDAModelCache) -> int:
    """Bytes of everything a cache holds: keys and values, states and convolution windows."""
    held = []
    for layer in cache.layers:
        names = ("keys", "values") if hasattr(layer, "keys") else ("conv_states", "recurrent_states")
        held += [x for name in names for x in (getattr(layer, name).values() if name.endswith("states") else [getattr(layer, name)])]
    return sum(x.numel() * x.element_size() for x in held)


def waiter(device: str) -> Callable[[], None]:
    """What waits for the device."""
    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None


def replayed(step: Callable[[], object], times: int) -> float:
    """Seconds a replay of `step`, recorded as a CUDA graph: the device's own time. What it writes, every replay writes again."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


@torch.no_grad()
def decoding(model: KDAForCausalLM, contexts: list[int], batch: int, decoded: int, device: str) -> Iterator[dict[str, float]]:
    """Decode `decoded` tokens of `batch` sequences after each context of random tokens: median tokens per second, the same of a
    recorded step on a GPU, cache bytes per sequence. One cache grows through the contexts; the decoded tokens are a part of the next."""
    wait, cache, held = waiter(device), KDAModelCache(model.config), 0
    with own_stream(device):
        for context in contexts:
            tokens = torch.randint(256, (batch, context - held), generator=torch.Generator().manual_seed(context)).to(device)
            for piece in tokens.split(max(PIECE // batch, 1), 1):
                model(piece, **{CACHE_NAME: cache}, logits_to_keep=1)
            size, seconds, last = cache_bytes(cache) / batch, [], tokens[:, -1:]
            step = lambda last=last: model(last, **{CACHE_NAME: cache})
            wait()
            for _ in range(decoded):
                began = time.perf_counter()
                step()
                wait()
                seconds.append(time.perf_counter() - began)
            row = {"context": context, "tokens_per_second": batch / statistics.median(seconds), "cache_bytes": size}
            held = context + decoded
            if device.startswith("cuda"):
                row["recorded_tokens_per_second"] = batch / replayed(step, decoded)
                held += 1
            yield row


def training(model: KDAForCausalLM, context: int, tokens: int, device: str) -> float:
    """Tokens per second of training steps on sequences of `context` tokens, `tokens` a step; on a GPU recorded steps under autocast."""
    kind = torch.device(device).type
    precision, wait = torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"), waiter(device)
    text = torch.randint(256, (max(tokens // context, 1), context + 1), generator=torch.Generator().manual_seed(context)).to(device)
    with own_stream(device):
        step = Step(model, lambda ids: loss_of(model, ids), adamw(model, 1e-3), precision)
        for _ in range(Step.WARM_UP + 1):
            step((text,))
        wait()
        began = time.perf_counter()
        for _ in range(TRAINING_STEPS):
            step((text,))
        wait()
        return TRAINING_STEPS * (text.numel() - len(text)) / (time.perf_counter() - began)


def plot(results: dict[str, list[dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {
        "tokens_per_second": "decoded tokens per second",
        "recorded_tokens_per_second": "decoded tokens per second, CUDA graph",
        "cache_bytes": "cache of a sequence (bytes)",
        "training_tokens_per_second": "training tokens per second",
    }
    panels = {field: label for field, label in panels.items() if all(field in row for rows in results.values() for row in rows)}
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4))
    for axis, (field, label) in zip(axes, panels.items()):
        for name, rows in results.items():
            axis.plot([row["context"] for row in rows], [row[field] for row in rows], marker="o", label=name)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("context (tokens)")
        axis.set_ylabel(label)
        if field == "cache_bytes":
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


MODELS = {"KDA": "kda", "softmax": "softmax", "hybrid 3:1": "hybrid"}  # its name here, lm.py's name of its mixer


def sizes(mixer: str, options: argparse.Namespace) -> argparse.Namespace:
    """What lm.py's `build` reads, the MLPs as wide as makes the model's parameters those of the KDA model, to a multiple of 8."""
    fields = {"mixer": mixer, "hidden": options.hidden, "intermediate": options.hidden * 11 // 4 // 8 * 8, "layers": options.layers,
              "heads": options.heads, "head_dim": options.head_dim, "lower_bound": -5.0, "backend": None}  # fmt: skip
    with torch.device("meta"):
        count = lambda mixer: sum(p.numel() for p in build(argparse.Namespace(**fields | {"mixer": mixer})).parameters())
        missing = count("kda") - count(mixer)
    fields["intermediate"] += round(missing / (3 * options.hidden * options.layers) / 8) * 8
    return argparse.Namespace(**fields)


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for cost.json and cost.png")
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 256], help="context lengths (default 64 256)")
    parser.add_argument("--batch", type=int, default=1, help="sequences decoded side by side (default 1)")
    parser.add_argument("--train-tokens", type=int, default=0, help="tokens of a training step; 0, the default, measures decoding alone")
    parser.add_argument("--decoded", type=int, default=16, help="tokens decoded after each context (default 16)")
    parser.add_argument("--hidden", type=int, default=64, help="hidden size (default 64)")
    parser.add_argument("--layers", type=int, default=2, help="blocks (default 2)")
    parser.add_argument("--heads", type=int, default=2, help="heads (default 2)")
    parser.add_argument("--head-dim", type=int, default=32, help="key and value dim of a head (default 32)")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS), help="which models (default all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")
    options = parser.parse_args(arguments)

    dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    results: dict[str, list[dict[str, float]]] = {}
    report = {
        "results": results,
        "parameters": {},
        "command": "python examples/context_cost.py " + " ".join(sys.argv[1:] if arguments is None else arguments),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
        "versions": f"openkda {openkda.__version__}, torch {torch.__version__}",
    }
    options.out.mkdir(parents=True, exist_ok=True)
    console, began = Console(), time.monotonic()

    def keep(name: str, row: dict[str, float], found: dict[str, float]) -> None:
        """A run that is cut short keeps what it measured."""
        row.update(found)
        (options.out / "cost.json").write_text(json.dumps(report, indent=1))
        figures = "  ".join(f"{field} {value:.0f}" for field, value in found.items() if field != "context")
        console.print(f"{time.monotonic() - began:5.1f} s  {name} {row['context']}: {figures}")

    for name in options.models:
        torch.manual_seed(0)
        model = build(sizes(MODELS[name], options)).to(options.device)
        report["parameters"][name] = sum(p.numel() for p in model.parameters())
        results[name] = [{"context": n} for n in options.contexts]
        for row in results[name] if options.train_tokens else []:
            found = training(model, row["context"], options.train_tokens, options.device)
            keep(name, row, {"training_tokens_per_second": found})
        model.zero_grad(set_to_none=True)
        model.eval()
        for part, parameter in model.named_parameters():
            if not part.endswith(("A_log", "dt_bias")):
                parameter.data = parameter.data.to(dtype)
        list(decoding(model, options.contexts[:1], options.batch, 3, options.device))  # compiles the kernels
        steps = decoding(model, options.contexts, options.batch, options.decoded, options.device)
        for row, found in zip(results[name], steps, strict=True):
            keep(name, row, found)
        del model, steps  # and the last cache with it

    plot(results, options.out / "cost.png")
    table = Table("model", "context", "decoded tokens/s", "as a CUDA graph", "cache MiB", "training tokens/s")
    shown = lambda row, field: f"{row[field]:.0f}" if field in row else "not measured"
    for name, rows in results.items():
        for row in rows:
            table.add_row(name, str(row["context"]), shown(row, "tokens_per_second"), shown(row, "recorded_tokens_per_second"),
                          f"{row['cache_bytes'] / 2**20:.2f}", shown(row, "training_tokens_per_second"))  # fmt: skip
    console.print(table)
    return report


if __name__ == "__main__":
    main()
