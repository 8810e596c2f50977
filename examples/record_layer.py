"""Record what one KDA layer of a trained model computes on, as input for `openkda run`.

    python examples/record_layer.py out/lm --layer 1 --length 1024 --out kda_layer.safetensors

Writes q, k [1, T, H, K], v [1, T, HV, V] (after the convolution, before the L2 norm), g [1, T, HV, K] gate logits, beta
[1, T, HV] logits in bf16, A_log [HV] and dt_bias [HV*K] in fp32, of a held-out text, with the options and the provenance
in the header of the safetensors file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from lm import as_tensor, corpus
from safetensors.torch import save_file

from openkda.layer import KimiDeltaAttention
from openkda.model import KDAForCausalLM


@torch.no_grad()
def record(model: KDAForCausalLM, layer: int, tokens: torch.Tensor, precision: torch.autocast) -> dict[str, torch.Tensor]:
    """The kernel inputs of block `layer` while the model reads tokens [1, T]."""
    mixer = model.model.layers[layer].self_attn
    if not isinstance(mixer, KimiDeltaAttention):
        raise ValueError(f"layer={layer} is no KDA layer: layer_types is {model.config.layer_types}")
    seen = []
    hook = mixer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with precision:
        model(tokens, use_cache=False)
        hook.remove()
        inputs = mixer.kernel_inputs(seen[0])
    tensors = {name: inputs[name].to(torch.bfloat16).contiguous().cpu() for name in ("q", "k", "v", "g", "beta")}
    return tensors | {"A_log": mixer.A_log.float().cpu(), "dt_bias": mixer.dt_bias.float().cpu()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder written by lm.py")
    parser.add_argument("--layer", type=int, default=1, help="which block (default 1)")
    parser.add_argument("--length", type=int, default=1024, help="tokens (default 1024)")
    parser.add_argument("--offset", type=int, default=0, help="first byte of the held-out text (default 0)")
    parser.add_argument("--out", type=Path, required=True, help="the safetensors file to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")
    options = parser.parse_args(arguments)

    model = KDAForCausalLM.from_pretrained(options.model).to(options.device).eval()
    tokens = as_tensor(corpus(held_out=True), options.device)[None, options.offset : options.offset + options.length].long()
    precision = torch.autocast(torch.device(options.device).type, torch.bfloat16, enabled=options.device.startswith("cuda"))
    tensors = record(model, options.layer, tokens, precision)
    mixer = model.model.layers[options.layer].self_attn
    provenance = {key: str(value) for key, value in json.loads((options.model / "train.json").read_text()).items()}
    metadata = {
        "use_gate_in_kernel": "true",
        "use_qk_l2norm_in_kernel": "true",
        "use_beta_sigmoid_in_kernel": "true",
        "allow_neg_eigval": str(mixer.allow_neg_eigval).lower(),
        "lower_bound": "none" if mixer.lower_bound is None else str(mixer.lower_bound),
        "scale": str(mixer.head_dim**-0.5),
        "state_v_first": "false",
        "layer": str(options.layer),
        "layer_types": ",".join(model.config.layer_types),
        "text": f"held-out standard-library sources, bytes {options.offset} to {options.offset + options.length}",
        **provenance,
    }
    partial = options.out.with_suffix(".part")
    save_file(tensors, partial, metadata=metadata)
    partial.replace(options.out)
    print(f"{options.out}: {options.out.stat().st_size / 2**20:.2f} MiB, " + ", ".join(f"{n} {list(x.shape)}" for n, x in tensors.items()))


if __name__ == "__main__":
    main()
