"""Train a byte-level language model with KDA layers on the Python standard library's own source files.

    python examples/lm.py --out out/lm                                  a minute on a CPU, a toy
    python examples/lm.py --out out/lm --hidden 512 --layers 6 --heads 4 --head-dim 128 \\
        --length 1024 --batch 16 --steps 3000                           a real one, on a GPU

`--mixer softmax` trains the same model with full attention (rotary) in every layer, `--mixer hybrid` one full-attention
layer after every three KDA layers. The last twentieth of the files, by a hash of their names, is held out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import sysconfig
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from training import add_training_arguments, fit

import openkda
from openkda.model import KDAConfig, KDAForCausalLM


@lru_cache(maxsize=2)
def corpus(held_out: bool) -> bytes:
    """The standard library's modules, one after another; a twentieth of the files (by hash of the name) is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idle_test"}
    pieces = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if skipped & set(name.parts):
            continue
        bucket = int(hashlib.sha256(name.as_posix().encode()).hexdigest(), 16) % 20
        if (bucket == 0) == held_out:
            pieces.append(path.read_bytes())
    return b"\n".join(pieces)


def as_tensor(text: bytes, device: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def windows(data: torch.Tensor, *, batch: int, length: int, seed: int, step: int) -> torch.Tensor:
    """`batch` random windows of length+1 bytes, drawn from the seed and the step alone: [batch, length+1] int64."""
    generator = torch.Generator().manual_seed((seed << 32) + step)
    start = torch.randint(data.numel() - length - 1, (batch, 1), generator=generator).to(data.device)
    return data[start + torch.arange(length + 1, device=data.device)].long()


def build(options: argparse.Namespace) -> KDAForCausalLM:
    kinds = {
        "kda": ["linear_attention"] * options.layers,
        "softmax": ["full_attention"] * options.layers,
        "hybrid": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(options.layers)],
    }
    config = KDAConfig(
        vocab_size=256,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate or options.hidden * 11 // 4 // 8 * 8,
        num_hidden_layers=options.layers,
        layer_types=kinds[options.mixer],
        num_heads=options.heads,
        head_dim=options.head_dim,
        lower_bound=options.lower_bound,
        num_attention_heads=options.heads,
        attention_head_dim=options.head_dim,
        rope_theta=10000.0 if options.mixer == "softmax" else None,
        kda_backend=options.backend,
    )
    return KDAForCausalLM(config)


def loss_of(model: KDAForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, nats per byte, of tokens[:, 1:] given what precedes; tokens [B, T+1]."""
    logits = model(tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_training_arguments(parser, steps=150, batch=4, length=128, lr=3e-3)
    parser.add_argument("--mixer", choices=["kda", "hybrid", "softmax"], default="kda", help="what mixes tokens (default kda)")
    parser.add_argument("--hidden", type=int, default=64, help="hidden size (default 64)")
    parser.add_argument("--intermediate", type=int, default=None, help="width of the MLPs (default 11/4 of the hidden size)")
    parser.add_argument("--layers", type=int, default=2, help="blocks (default 2)")
    parser.add_argument("--heads", type=int, default=2, help="heads (default 2)")
    parser.add_argument("--head-dim", type=int, default=32, help="key and value dim of a head (default 32)")
    parser.add_argument("--lower-bound", type=float, default=None, help="bounded gate with this bound (default: softplus gate)")
    parser.add_argument("--backend", default=None, help="kernel backend of the KDA layers (default: the best that serves)")
    parser.add_argument("--sample", type=int, default=0, help="after training, continue a held-out text by so many bytes")
    options = parser.parse_args(arguments)

    torch.manual_seed(options.seed)
    model = build(options).to(options.device)
    train, held_out = (as_tensor(corpus(part), options.device) for part in (False, True))
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters, {train.numel() / 1e6:.1f} MB to learn from, {held_out.numel() / 1e6:.1f} MB held out")
    shape = {"batch": options.batch, "length": options.length}
    test_windows = [windows(held_out, **shape, seed=options.seed, step=-1 - i) for i in range(4)]
    history = fit(
        model,
        lambda step: (windows(train, **shape, seed=options.seed, step=step),),
        lambda tokens: loss_of(model, tokens),
        options=options,
        evaluate=lambda: sum(loss_of(model, w).item() for w in test_windows) / len(test_windows),
        eval_name="held-out nats/byte",
        record=options.backend != "torch",
    )
    tokens = history.eval_step[-1] * options.batch * options.length
    summary = {
        "command": "python examples/lm.py " + " ".join(sys.argv[1:] if arguments is None else arguments),
        "seed": options.seed,
        "steps": history.eval_step[-1],
        "held_out_nats_per_byte": round(history.eval_value[-1], 4),
        "training_loss": round(sum(history.loss[-5:]) / len(history.loss[-5:]), 4) if history.loss else None,
        "tokens_per_second": round(tokens / history.seconds[-1]) if history.seconds else None,
        "parameters": parameters,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
        "versions": f"openkda {openkda.__version__}, torch {torch.__version__}, python {sys.version.split()[0]}",
    }
    model.save_pretrained(options.out)
    (options.out / "train.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary, indent=1))
    if options.sample:
        prompt = held_out[None, : options.length].long()
        text = model.eval().generate(prompt, max_new_tokens=options.sample, do_sample=True, top_k=20, pad_token_id=0)
        print(bytes(text[0, options.length :].tolist()).decode(errors="replace"))
    return summary


if __name__ == "__main__":
    main()
