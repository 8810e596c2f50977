"""What a token costs as the context grows: KDA against softmax attention, same widths, random weights.

    python examples/context_cost.py --out out/context                                    a toy, on a CPU
    python examples/context_cost.py --out out/context --hidden 512 --layers 6 --heads 4 --head-dim 128 \\
        --contexts 1024 4096 16384 65536                                                on a GPU

For each context length: fill the cache with that many tokens, then decode one token at a time. Writes cost.json and cost.png:
tokens per second of decoding, and bytes of cache per sequence.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import datetime, timezone
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import openkda
from openkda.model import CACHE_NAME, KDAConfig, KDAForCausalLM, KDAModelCache

PIECE = 8192  # tokens a prefill call, so that a long context needs no more memory than its cache


def cache_bytes(cache: KDAModelCache) -> int:
    """Bytes of everything a cache holds: keys and values, states and convolution windows."""
    held = []
    for layer in cache.layers:
        names = ("keys", "values") if hasattr(layer, "keys") else ("conv_states", "recurrent_states")
        held += [x for name in names for x in (getattr(layer, name).values() if name.endswith("states") else [getattr(layer, name)])]
    return sum(x.numel() * x.element_size() for x in held)


@torch.no_grad()
def measure(model: KDAForCausalLM, context: int, decoded: int, device: str) -> dict[str, float]:
    """Decode `decoded` tokens after a context of `context` random ones: median tokens per second, cache bytes, prefill seconds."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    tokens = torch.randint(256, (1, context), generator=torch.Generator().manual_seed(context)).to(device)
    cache = KDAModelCache(model.config)
    wait()
    began = time.perf_counter()
    for piece in tokens.split(PIECE, 1):
        model(piece, **{CACHE_NAME: cache}, logits_to_keep=1)
    wait()
    prefill = time.perf_counter() - began
    held, seconds = cache_bytes(cache), []
    for _ in range(decoded):
        began = time.perf_counter()
        model(tokens[:, -1:], **{CACHE_NAME: cache})
        wait()
        seconds.append(time.perf_counter() - began)
    return {"context": context, "tokens_per_second": 1 / statistics.median(seconds), "cache_bytes": held, "prefill_seconds": prefill}


def plot(results: dict[str, list[dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for name, rows in results.items():
        contexts = [row["context"] for row in rows]
        left.plot(contexts, [row["tokens_per_second"] for row in rows], marker="o", label=name)
        right.plot(contexts, [row["cache_bytes"] / 2**20 for row in rows], marker="o", label=name)
    for axis, label in ((left, "decoded tokens per second"), (right, "cache of a sequence (MiB)")):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("context (tokens)")
        axis.set_ylabel(label)
        axis.legend()
    right.set_yscale("log")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for cost.json and cost.png")
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 256], help="context lengths (default 64 256)")
    parser.add_argument("--decoded", type=int, default=16, help="tokens decoded after each context (default 16)")
    parser.add_argument("--hidden", type=int, default=64, help="hidden size (default 64)")
    parser.add_argument("--layers", type=int, default=2, help="blocks (default 2)")
    parser.add_argument("--heads", type=int, default=2, help="heads (default 2)")
    parser.add_argument("--head-dim", type=int, default=32, help="key and value dim of a head (default 32)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")
    options = parser.parse_args(arguments)

    dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    kinds = {"KDA": ["linear_attention"], "hybrid 3:1": None, "softmax": ["full_attention"]}
    results: dict[str, list[dict[str, float]]] = {}
    for name, kind in kinds.items():
        torch.manual_seed(0)
        config = KDAConfig(
            vocab_size=256, hidden_size=options.hidden, intermediate_size=options.hidden * 11 // 4, num_hidden_layers=options.layers,
            layer_types=None if kind is None else kind * options.layers, num_heads=options.heads, head_dim=options.head_dim,
            lower_bound=-5.0, num_attention_heads=options.heads, attention_head_dim=options.head_dim,
        )  # fmt: skip
        model = KDAForCausalLM(config).to(options.device).eval()
        for part, parameter in model.named_parameters():
            if not part.endswith(("A_log", "dt_bias")):
                parameter.data = parameter.data.to(dtype)
        measure(model, min(options.contexts), 3, options.device)  # compiles the kernels
        results[name] = [measure(model, n, options.decoded, options.device) for n in track(options.contexts, description=name)]

    options.out.mkdir(parents=True, exist_ok=True)
    report = {
        "results": results,
        "sizes": {"hidden": options.hidden, "layers": options.layers, "heads": options.heads, "head_dim": options.head_dim},
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
        "versions": f"openkda {openkda.__version__}, torch {torch.__version__}",
    }
    (options.out / "cost.json").write_text(json.dumps(report, indent=1))
    plot(results, options.out / "cost.png")
    table = Table("model", "context", "decode tokens/s", "cache MiB", "prefill s")
    for name, rows in results.items():
        for row in rows:
            cells = f"{row['tokens_per_second']:.0f}", f"{row['cache_bytes'] / 2**20:.2f}", f"{row['prefill_seconds']:.3f}"
            table.add_row(name, str(row["context"]), *cells)
    Console().print(table)
    return report


if __name__ == "__main__":
    main()
