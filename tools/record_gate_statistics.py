"""Statistics of a recorded layer's gate, written to the package data of the `trained` regime (openkda/recorded.py).

python tools/record_gate_statistics.py examples/data/kda_layer.safetensors
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from safetensors import safe_open

TARGET = Path(__file__).parents[1] / "openkda" / "data" / "trained_gate.json"


def statistics(recording: Path) -> dict[str, object]:
    """A_log [HV], mean [HV, K] of the gate logits with their bias, spread [HV, K] over tokens, and where they come from."""
    with safe_open(recording, "pt") as file:
        g = file.get_tensor("g").double().flatten(0, 1)  # [B * T, HV, K]
        A_log, dt_bias = file.get_tensor("A_log").double(), file.get_tensor("dt_bias").double().view(g.shape[1:])
        metadata = file.metadata() or {}
    rounded = lambda x: [[round(value, 3) for value in row] for row in x.tolist()]
    source = {name: metadata[name] for name in ("command", "date", "layer", "lower_bound", "seed") if name in metadata}
    return {
        "source": source,
        "A_log": [round(value, 4) for value in A_log.tolist()],
        "mean": rounded(g.mean(0) + dt_bias),
        "spread": rounded(g.std(0)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path, help="safetensors file with g, A_log and dt_bias")
    TARGET.write_text(json.dumps(statistics(parser.parse_args().recording)) + "\n")


if __name__ == "__main__":
    main()
