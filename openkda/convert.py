"""Names of a KDA layer's weights in published checkpoints, and one layer lifted out of a checkpoint on disk.

    openkda        fla                      moonshot (Kimi-Linear-48B)   transformers 5 (kimi_linear)
    f_a_proj       f_proj.0                 f_a_proj                     forget_gate.f_a_proj
    f_b_proj       f_proj.1                 f_b_proj                     forget_gate.f_b_proj
    g_a_proj       g_proj.0                 g_a_proj                     g_a_proj
    g_b_proj       g_proj.1, with a bias    g_b_proj, no bias            g_b_proj, no bias
    {q,k,v}_conv1d {q,k,v}_conv1d           {q,k,v}_conv1d               conv1d: q, k, v stacked
    A_log [HV]     A_log [HV]               A_log [1, 1, H, 1]           forget_gate.A_log [1, 1, H, 1]
    dt_bias        dt_bias                  dt_bias                      forget_gate.dt_bias

{q,k,v,b,o}_proj and o_norm are the same everywhere. Sources: fla/layers/kda.py of flash-linear-attention 0.5, the
weight index of moonshotai/Kimi-Linear-48B-A3B-Instruct, transformers/models/kimi_linear.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from openkda.layer import KimiDeltaAttention

SCHEMES = ("openkda", "fla", "moonshot", "transformers")

RENAMES = {
    "openkda": {},
    "moonshot": {},
    "fla": {"f_a_proj": "f_proj.0", "f_b_proj": "f_proj.1", "g_a_proj": "g_proj.0", "g_b_proj": "g_proj.1"},
    "transformers": {name: f"forget_gate.{name}" for name in ("f_a_proj", "f_b_proj", "A_log", "dt_bias")},
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj", "o_proj")
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
REQUIRED = (*(f"{name}.weight" for name in (*PROJECTIONS, *CONVOLUTIONS, "o_norm")), "A_log", "dt_bias")
OPTIONAL = ("g_b_proj.bias", *(f"{name}.bias" for name in CONVOLUTIONS))
# What the parts of a checkpoint call the bound of the bounded gate in their configuration.
BOUND_NAMES = ("lower_bound", "gate_lower_bound", "safe_gate_lower_bound")


def _theirs(name: str, scheme: str) -> str:
    """Our parameter name in another scheme."""
    for ours, theirs in RENAMES[scheme].items():
        if name == ours or name.startswith(ours + "."):
            return theirs + name[len(ours) :]
    if scheme == "transformers" and name.partition(".")[0] in CONVOLUTIONS:
        return name.replace(name.partition(".")[0], "conv1d")
    return name


def _check_scheme(scheme: str) -> None:
    if scheme not in SCHEMES:
        raise ValueError(f"scheme is {scheme!r}; it must be one of {', '.join(SCHEMES)}")


def detect_scheme(names: Iterable[str]) -> str:
    """The scheme in which a KDA layer's parameters (their names, without prefix) are written; "moonshot" and "openkda" differ in the
    shape of A_log alone and read alike, so this returns "moonshot" for both.

    Raises:
        ValueError: names of no known scheme, listing what was found.
    """
    names = set(names)
    for mark, scheme in (("f_proj.0.weight", "fla"), ("forget_gate.f_a_proj.weight", "transformers"), ("f_a_proj.weight", "moonshot")):
        if mark in names:
            return scheme
    raise ValueError(
        f"these are no KDA layer's parameters in any known scheme ({', '.join(SCHEMES)}): {', '.join(sorted(names)) or 'none'}"
    )


def to_openkda(state: dict[str, Tensor], scheme: str | None = None) -> dict[str, Tensor]:
    """A layer's state dict in `KimiDeltaAttention`'s names and shapes.

    Args:
        state: name -> tensor, without prefix ("q_proj.weight", not "model.layers.0.self_attn.q_proj.weight").
        scheme: one of SCHEMES, or None to tell from the names.

    Raises:
        ValueError: unknown scheme, or keys that are missing or that the scheme does not have, listed.
    """
    scheme = detect_scheme(state) if scheme is None else scheme
    _check_scheme(scheme)
    allowed = {_theirs(name, scheme) for name in (*REQUIRED, *OPTIONAL)}
    missing = sorted({_theirs(name, scheme) for name in REQUIRED} - set(state))
    unknown = sorted(set(state) - allowed)
    if missing or unknown:
        parts = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has unknown {', '.join(unknown)}"] * bool(unknown)
        raise ValueError(f"the state dict of a KDA layer in {scheme} names {' and '.join(parts)}")
    ours = {name: state[_theirs(name, scheme)] for name in (*REQUIRED, *OPTIONAL) if _theirs(name, scheme) in state}
    if scheme == "transformers":
        rows = [state[f"{name}_proj.weight"].shape[0] for name in "qkv"]
        for kind in ("weight", "bias"):
            if (stacked := state.get(f"conv1d.{kind}")) is not None:
                if stacked.shape[0] != sum(rows):
                    raise ValueError(
                        f"conv1d.{kind} has {stacked.shape[0]} channels; q, k and v projections give {rows}, {sum(rows)} in all"
                    )
                ours |= {f"{name}_conv1d.{kind}": part for name, part in zip("qkv", stacked.split(rows))}
    return ours | {"A_log": ours["A_log"].reshape(-1), "dt_bias": ours["dt_bias"].reshape(-1)}


def from_openkda(state: dict[str, Tensor], scheme: str) -> dict[str, Tensor]:
    """The reverse of `to_openkda`: `KimiDeltaAttention.state_dict()` in another scheme's names and shapes.

    Raises:
        ValueError: unknown scheme, missing or unknown keys, or a bias that the scheme cannot hold.
    """
    _check_scheme(scheme)
    state = to_openkda(state, "openkda")
    if scheme in ("moonshot", "transformers") and "g_b_proj.bias" in state:
        raise ValueError(f"g_b_proj.bias has no place in {scheme} names: build the layer with output_gate_bias=False")
    theirs = {_theirs(name, scheme): x for name, x in state.items()}
    if scheme == "transformers":
        for kind in ("weight", "bias"):
            parts = [state[f"{name}.{kind}"] for name in CONVOLUTIONS if f"{name}.{kind}" in state]
            if parts:
                theirs[f"conv1d.{kind}"] = torch.cat(parts)
    if scheme in ("moonshot", "transformers"):
        name = _theirs("A_log", scheme)
        theirs[name] = theirs[name].view(1, 1, -1, 1)
    return theirs


def layer_from_state_dict(
    state: dict[str, Tensor],
    *,
    scheme: str | None = None,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    norm_eps: float = 1e-5,
    backend: str | None = None,
) -> KimiDeltaAttention:
    """A `KimiDeltaAttention` with these weights: every size is read from the shapes, the weights keep their dtype (the two
    decay parameters become fp32). What no shape can tell is given by the options, see `KimiDeltaAttention`.

    Raises:
        ValueError: wrong keys (listed), or shapes that do not fit together (listed).
    """
    state = to_openkda(state, scheme)
    for name, x in state.items():
        dims = 1 if name in ("A_log", "dt_bias", "o_norm.weight") or name.endswith(".bias") else 3 if name.startswith(CONVOLUTIONS) else 2
        if x.dim() != dims or not x.numel() or not x.is_floating_point():
            raise ValueError(
                f"{name} is {list(x.shape)} {x.dtype}; it must have {dims} dimensions, none of them 0, and floating-point values"
            )
    HV = state["A_log"].numel()
    if state["dt_bias"].numel() % HV:
        raise ValueError(f"dt_bias has {state['dt_bias'].numel()} entries, no multiple of A_log's {HV} heads")
    K = state["dt_bias"].numel() // HV
    layer = KimiDeltaAttention(
        state["q_proj.weight"].shape[1],
        max(state["q_proj.weight"].shape[0] // K, 1),
        K,
        num_v_heads=HV,
        head_v_dim=max(state["v_proj.weight"].shape[0] // HV, 1),
        conv_size=state["q_conv1d.weight"].shape[-1],
        conv_bias="q_conv1d.bias" in state,
        lower_bound=lower_bound,
        allow_neg_eigval=allow_neg_eigval,
        output_gate_bias="g_b_proj.bias" in state,
        norm_eps=norm_eps,
        backend=backend,
        device="meta",
    )
    wanted = {name: tuple(x.shape) for name, x in layer.state_dict().items()}
    wrong = [f"{n} {tuple(state[n].shape)} instead of {shape}" for n, shape in wanted.items() if n in state and state[n].shape != shape]
    if wrong or set(wanted) != set(state):
        parts = wrong + [f"{name} missing" for name in sorted(set(wanted) - set(state))]
        raise ValueError(f"the shapes of a KDA layer with H={layer.num_heads}, HV={HV}, K={K} do not fit: {'; '.join(parts)}")
    state |= {name: state[name].float() for name in ("A_log", "dt_bias")}
    layer.load_state_dict(state, assign=True)
    return layer


def _read_object(path: Path) -> dict[str, object]:
    """The JSON object in a file; one sentence where it is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a JSON {type(found).__name__}; it must be an object")
    return found


@contextmanager
def _opened(path: Path) -> Iterator:
    """A safetensors file; one sentence where it is none, is cut off, or lacks what is asked of it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error


def _layer_keys(folder: Path, layer: int) -> tuple[dict[str, Path], list[int]]:
    """Full tensor name -> file for everything in the mixer of block `layer`, and the numbers of all KDA blocks."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        where = _read_object(index).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
            raise ValueError(f"{index} has no weight_map from tensors' names to files' names")
        files = {name: folder / file for name, file in where.items()}
    elif (single := folder / "model.safetensors").exists():
        with _opened(single) as f:
            files = dict.fromkeys(f.keys(), single)
    else:
        raise ValueError(f"checkpoint={folder} holds neither model.safetensors.index.json nor model.safetensors")
    kda = sorted({int(m[1]) for name in files if (m := re.search(r"layers\.(\d+)\..*A_log$", name))})
    mixer = re.compile(rf"(^|\.)layers\.{layer}\.(self_attn|attn|mixer|attention)\.")
    return {name: file for name, file in files.items() if mixer.search(name)}, kda


def load_kda_layer(checkpoint: str | Path, layer: int, *, backend: str | None = None) -> KimiDeltaAttention:
    """One KDA layer of a safetensors checkpoint, sharded or not, reading nothing but that layer's tensors.

    Args:
        checkpoint: folder with `config.json` and `model.safetensors`, or shards and their `model.safetensors.index.json`;
            fla, Moonshot, transformers or openkda names.
        layer: block number from 0, as in the tensors' names.
        backend: as for `KimiDeltaAttention`.

    Returns:
        the layer on the CPU, weights in their stored dtype, gate kind and epsilon from `config.json`.

    Raises:
        ValueError: no such checkpoint, a file of it that cannot be read, no KDA layer of this number (the message lists those there
            are), wrong keys or shapes.
    """
    folder = Path(checkpoint)
    files, kda = _layer_keys(folder, layer)
    if layer not in kda:
        raise ValueError(f"layer={layer} is no KDA layer of {folder}; those are {', '.join(map(str, kda)) or 'none'}")
    state: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        if not file.exists():
            raise ValueError(f"{file} is missing, which holds tensors of layer {layer}")
        with _opened(file) as f:
            for name in (name for name, where in files.items() if where == file):
                state[re.sub(r"^(.*\.)?layers\.\d+\.[a-z_]+\.", "", name)] = f.get_tensor(name)
    config = _read_object(folder / "config.json") if (folder / "config.json").exists() else {}
    inner = config.get("linear_attn_config")
    config |= inner if isinstance(inner, dict) else {}
    bound = next((config[name] for name in BOUND_NAMES if config.get(name) is not None), None)
    return layer_from_state_dict(
        state,
        lower_bound=bound,
        allow_neg_eigval=bool(config.get("allow_neg_eigval", False)),
        norm_eps=config.get("rms_norm_eps", config.get("norm_eps", 1e-5)),
        backend=backend,
    )
