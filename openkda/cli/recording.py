"""Recorded inputs and results as safetensors files: checked before anything is computed, written whole or not at all.

A recording holds the tensors of one chunk_kda call under the names of its arguments, and the call's options as strings in the metadata:

    q, k [B, T, H, K]   v [B, T, HV, V]   g [B, T, HV, K]   beta [B, T, HV]
    optional: A_log [HV], dt_bias [HV * K], initial_state [N, HV, K, V], cu_seqlens [N + 1]
    metadata: the flags in FLAGS as "true" or "false" (default "false"), lower_bound and scale as numbers or "none"

Other metadata is provenance: shown, copied to the results, never interpreted. A file with hidden_states [B, T, hidden_size] alone becomes a
recording through a layer of a checkpoint (`through_layer`).
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from openkda.cli.errors import BadInput, refusals
from openkda.problem import REFERENCE_DTYPES, Inputs, Problem, describe

REQUIRED = ("q", "k", "v", "g", "beta")
OPTIONAL = ("A_log", "dt_bias", "initial_state", "cu_seqlens")
FLAGS = ("use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate", "state_v_first")
NUMBERS = ("lower_bound", "scale")
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32},
}
MAX_HEADER = 100_000_000  # the format's own limit on the header, in bytes


@dataclass(frozen=True)
class Recording:
    """Tensors and options of one chunk_kda call, as read from a file."""

    path: Path
    tensors: dict[str, torch.Tensor]
    options: dict[str, bool | float | None]
    provenance: dict[str, str]

    def call(self, device: torch.device) -> dict[str, object]:
        """Keyword arguments of chunk_kda, the tensors on `device`, the final state asked for."""
        tensors = {name: x.to(device) for name, x in self.tensors.items()}
        return {**tensors, **self.options, "output_final_state": True}

    def described(self, device: torch.device) -> tuple[Problem, Inputs]:
        """The call as backends see it. BadInput where a shape, a dtype or an option is refused."""
        absent = dict.fromkeys((*OPTIONAL, "cu_seqlens_cpu"))
        with refusals():
            return describe(**{**absent, **self.call(device)}, return_intermediate_states=False, chunk_size=64)


def read(path: Path) -> Recording:
    """The recording in `path`. BadInput, in one sentence naming the tensor, for a file or a value that cannot be used."""
    tensors, metadata = _load(path, REQUIRED, OPTIONAL)
    options = {name: _flag(path, name, metadata.get(name, "false")) for name in FLAGS}
    options |= {name: _number(path, name, metadata.get(name, "none")) for name in NUMBERS}
    provenance = {name: text for name, text in metadata.items() if name not in (*FLAGS, *NUMBERS)}
    recording = Recording(path, tensors, options, provenance)
    recording.described(torch.device("cpu"))
    for name, x in tensors.items():
        _check_values(path, name, x, log_decay=name == "g" and not options["use_gate_in_kernel"])
    return recording


def through_layer(path: Path, checkpoint: Path, layer: int) -> Recording:
    """What KDA layer `layer` of a checkpoint computes on for the hidden states in `path`. BadInput where either cannot be used."""
    from openkda.convert import load_kda_layer

    tensors, provenance = _load(path, ("hidden_states",), ())
    x = tensors["hidden_states"]  # [B, T, hidden_size]
    if not x.is_floating_point():
        raise BadInput(f"hidden_states's dtype in {path} is {x.dtype}; it must be one of {', '.join(map(str, REFERENCE_DTYPES))}")
    _check_values(path, "hidden_states", x, log_decay=False)
    with refusals():
        mixer = load_kda_layer(checkpoint, layer)
    if x.ndim != 3 or x.shape[-1] != mixer.hidden_size:
        raise BadInput(f"hidden_states's shape in {path} is {list(x.shape)}; it must be [B, T, {mixer.hidden_size}] for that checkpoint")
    with torch.no_grad():
        call = mixer.kernel_inputs(x.to(mixer.q_proj.weight.dtype))
    tensors = {name: t.detach() for name, t in call.items() if name in (*REQUIRED, *OPTIONAL) and t is not None}
    for name, t in tensors.items():
        _check_values(f"layer {layer} of {checkpoint}", name, t, log_decay=False)
    options = {name: call.get(name, False) for name in FLAGS} | {name: call.get(name) for name in NUMBERS}
    return Recording(path, tensors, options, {**provenance, "checkpoint": str(checkpoint), "layer": str(layer)})


def _load(path: Path, required: tuple[str, ...], optional: tuple[str, ...]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a whole, well-formed file with just these tensors."""
    metadata = _check_header(path, required, optional)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path} cannot be read as safetensors: {error}") from error


def _check_header(path: Path, required: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, str]:
    """The metadata of a file whose header is whole, names what is needed in dtypes we know, and whose data lies inside the file."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise BadInput(f"{path} is not a file; it must be a safetensors file")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise BadInput(f"{path} is not a safetensors file, or is cut off inside its header ({size} bytes)")
            header = json.loads(file.read(length))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not a safetensors file: its header is not JSON") from error
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        raise BadInput(f"{path} is not a safetensors file: its header is no table of tensors")
    metadata = header.pop("__metadata__", {})
    for name in required:
        if name not in header:
            raise BadInput(f"{path} has no tensor {name}; it must have {', '.join(required)}")
    for name, entry in header.items():
        if name not in (*required, *optional):
            raise BadInput(f"{path} has a tensor {name}, which is none of {', '.join((*required, *optional))}")
        if str(entry.get("dtype")) not in DTYPES:
            raise BadInput(f"{name}'s dtype in {path} is {entry.get('dtype')}; it must be one of {', '.join(DTYPES)}")
        offsets = entry.get("data_offsets")
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(offset, int) for offset in offsets)):
            raise BadInput(f"{name}'s data_offsets in {path} are {offsets}; they must be two whole numbers")
        end = offsets[1]
        if 8 + length + end > size:
            missing = 8 + length + end - size
            raise BadInput(f"{path} is cut off: the data of {name} ends {missing} bytes after the end of the file")
    return {str(name): str(text) for name, text in metadata.items()}


def _flag(path: Path, name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise BadInput(f"metadata {name} of {path} is {text!r}; it must be 'true' or 'false'")
    return text.lower() == "true"


def _number(path: Path, name: str, text: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadInput(f"metadata {name} of {path} is {text!r}; it must be a finite number or 'none'")
    return number


def _check_values(path: Path | str, name: str, x: torch.Tensor, log_decay: bool) -> None:
    """Refuses NaN and infinity, and a growing state: a log decay above 0. path: where the tensor is from."""
    if not x.is_floating_point():
        return
    for bad, what in ((~x.isfinite(), "non-finite"), (x > 0 if log_decay else None, "positive (g is a log decay, at most 0)")):
        if bad is not None and bad.any():
            first = bad.nonzero()[0].tolist()
            raise BadInput(f"{name} in {path} holds {int(bad.sum())} values that are {what}, the first {x[tuple(first)]} at {first}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends well, and is removed when it does not.

    Entered before the work starts, so that an output that cannot be written is refused before anything is computed."""
    if os.path.exists(path) and not os.path.isfile(path):  # these, unlike Path's, take a name that is too long
        what = "a directory" if os.path.isdir(path) else "a device or a pipe, which a file would replace"
        raise BadInput(f"{path} cannot be written: it is {what}")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{path.suffix}")
    made = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    try:  # from here on, wherever an interrupt strikes, what was made is removed
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.touch(exist_ok=False)
        except OSError as error:
            raise BadInput(f"{path} cannot be written: {error.strerror}") from error
        mode = temporary.stat().st_mode  # that of a new file; a writer may put a private one in its place
        yield temporary
        temporary.chmod(mode)
        temporary.replace(path)
    finally:
        with suppress(OSError):  # moved away by now, or never made (a name too long)
            temporary.unlink()
        for folder in made:
            with suppress(OSError):  # holds the result, or somebody else's file
                folder.rmdir()


def distinct(paths: dict[str, Path]) -> None:
    """Refuse a call of which two files, named by their role, are one: the later would overwrite the earlier."""
    seen: dict[Path, str] = {}
    for role, path in paths.items():
        other = seen.setdefault(path.resolve(), role)
        if other != role:
            raise BadInput(f"{path} is both {other} and {role}; give them different names")


def write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write tensors and metadata to `path` (one that `replacing` gave)."""
    try:
        save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, path, metadata=metadata)
    except (SafetensorError, OSError) as error:
        raise BadInput(f"the results cannot be written: {error}") from error
