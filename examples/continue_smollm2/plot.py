#!/usr/bin/env python3
"""Draw what evaluate.py wrote: loss by position in a document, a line for each file.

python examples/continue_smollm2/plot.py PLOT.png RESULT.json [RESULT.json ...]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only, also where there is no display

import matplotlib.pyplot as plt  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("plot", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    options = parser.parse_args()
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for path in options.results:
        result = json.loads(path.read_text(encoding="utf-8"))
        width = result["bucket_tokens"] / 1024
        middles = [(i + 0.5) * width for i in range(len(result["loss_by_bucket"]))]
        axes.plot(
            middles, result["loss_by_bucket"], marker="o", markersize=3, label=result["label"]
        )
    if axes.get_xlim()[1] > 8:
        axes.axvline(8, color="grey", linestyle="dotted", label="context of the original model")
    axes.set_xlabel("position in the document, K tokens")
    axes.set_ylabel("loss on held-out documents, nats")
    axes.set_xlim(left=0)
    axes.legend()
    options.plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.plot, dpi=150)
    print(options.plot)


if __name__ == "__main__":
    main()
