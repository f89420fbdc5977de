#!/usr/bin/env python3
"""Loss of a Hugging Face folder's model by position in long documents, on one GPU or the CPU.

    python examples/continue_smollm2/evaluate.py FOLDER TEXT [--seq_len 32K] [--theta 420000]
        [--window 8K] [--documents 32] [--out FILE.json]

Each document of the jsonl file or folder TEXT that is long enough is read from its start, seq_len tokens
of it. --window cuts these into windows that the model sees one by one, so that it never goes beyond what
it was made for: what it makes of the same tokens without the longer context.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Run as a file, from any folder.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from torchtitan_lc.attention.strategies import make_strategy  # noqa: E402
from torchtitan_lc.components.documents import JsonlDocuments  # noqa: E402
from torchtitan_lc.components.tokenizer import Tokenizer, build_tokenizer  # noqa: E402
from torchtitan_lc.config.job_config import JobConfig  # noqa: E402
from torchtitan_lc.config.token_count import parse_token_count  # noqa: E402
from torchtitan_lc.models.decoder.model import Decoder, Head  # noqa: E402
from torchtitan_lc.preflight import job_kernel, job_model  # noqa: E402

TILE = 4096  # tokens for which logits, or the MLP's inner values, exist at once
BUCKET = 2048  # tokens of a position bucket, of a short row a quarter of it


def load_model(
    folder: Path,
    *,
    seq_len: int,
    dtype: torch.dtype,
    device: torch.device,
    theta: float | None = None,
) -> Decoder:
    """The model of a Hugging Face folder of one safetensors file, for rows of one document.

    theta: in place of the folder's rope_theta. UserError for a folder that is no Llama's.
    """
    config = JobConfig()
    config.model.name, config.model.flavor = "llama3", "from_hf"
    config.model.hf_assets_path = str(folder)
    config.model.rope.theta = theta
    config.training.seq_len = seq_len
    config.training.isolate_documents = False
    config.training.mixed_precision_param = "float32" if dtype == torch.float32 else "bfloat16"
    found = job_model(config)
    assert found.spec.hf is not None
    with torch.device("meta"):
        model = Decoder(found.args)
    weights = load_file(folder / "model.safetensors")
    named = {name: weights[found.spec.hf.name(name)] for name, _ in model.named_parameters()}
    model.load_state_dict(named, assign=True)
    kernel = job_kernel(config, found.args, device.type).kernel
    model.execution.strategy = make_strategy("local", kernel, tile_tokens=TILE)
    model.execution.mlp_tokens = TILE
    return model.to(device, dtype).eval()


class LossByToken(nn.Module):
    """In place of a Decoder's head: the loss of every label, where that gives their sum."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(self, h: Tensor, labels: Tensor, tied_table: Tensor | None) -> Tensor:
        """h [B, T, M], labels [B, T] -> fp32 [B, T]. Logits exist for a tile of tokens at a time."""
        tiles = zip(h.split(TILE, dim=1), labels.split(TILE, dim=1), strict=True)
        losses = []
        for tile, wanted in tiles:
            logits = self.head(tile, None, tied_table).float()
            losses.append(F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none"))
        return torch.cat(losses, dim=1)


def read_rows(text: Path, tokenizer: Tokenizer, seq_len: int, count: int) -> Tensor:
    """The first seq_len + 1 tokens of up to ``count`` documents that have so many, int64."""
    source = JsonlDocuments(str(text))
    rows: list[Tensor] = []
    for i in range(len(source)):
        if len(rows) == count:
            break
        # So that not all of a long text is encoded: its tokens are about 3 characters each.
        ids = tokenizer.encode(source[i][: 8 * seq_len], add_bos=False, add_eos=False)
        if len(ids) > seq_len:
            rows.append(torch.from_numpy(ids[: seq_len + 1]))
    if not rows:
        raise SystemExit(f"no document of {text} has more than {seq_len} tokens")
    return torch.stack(rows)


@torch.no_grad()
def losses_by_position(model: Decoder, rows: Tensor, window: int) -> Tensor:
    """Mean loss over the rows [N, T + 1] at each position, on the CPU in float64 [T].

    window: tokens that are seen together, a divisor of T.
    """
    device = model.tok_embeddings.weight.device
    positions = torch.arange(window, device=device)[None]
    head = model.head
    model.head = LossByToken(head)  # type: ignore[assignment]
    total = torch.zeros(rows.shape[1] - 1, dtype=torch.float64)
    for row in rows.to(device):
        windows = zip(row[:-1].view(-1, 1, window), row[1:].view(-1, 1, window), strict=True)
        losses = [model(tokens, positions, labels) for tokens, labels in windows]
        total += torch.cat(losses, dim=1)[0].double().cpu()
    model.head = head
    return total / len(rows)


def summary(losses: Tensor) -> dict[str, Any]:
    """Means by bucket, of 2K to 8K (the first tokens of a text are hard for every model), beyond 8K."""
    bucket = min(BUCKET, max(len(losses) // 4, 1))
    means: dict[str, Any] = {
        "perplexity": math.exp(losses.mean().item()),
        "bucket_tokens": bucket,
        "loss_by_bucket": [part.mean().item() for part in losses.split(bucket)],
    }
    for name, part in (("2K_to_8K", losses[2048:8192]), ("beyond_8K", losses[8192:])):
        means[f"loss_{name}"] = part.mean().item() if len(part) else None
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--seq_len", type=parse_token_count, default=32768)
    parser.add_argument(
        "--window", type=parse_token_count, help="a divisor of seq_len; left out: all"
    )
    parser.add_argument("--theta", type=float, help="left out: the folder's")
    parser.add_argument("--documents", type=int, default=32, help="at most")
    parser.add_argument("--label", default="", help="how the plot calls it; left out: the folder")
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args()
    window = options.window or options.seq_len
    if options.seq_len % window:
        parser.error(f"--window {window} does not divide --seq_len {options.seq_len}")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokenizer = build_tokenizer("hf", str(options.folder))
    rows = read_rows(options.text, tokenizer, options.seq_len, options.documents)
    model = load_model(
        options.folder, seq_len=window, dtype=dtype, device=device, theta=options.theta
    )
    result = {
        "label": options.label or options.folder.name,
        "rope_theta": model.args.rope_theta,
        "seq_len": options.seq_len,
        "window": window,
        "documents": len(rows),
        "dtype": str(dtype).removeprefix("torch."),
        **summary(losses_by_position(model, rows, window)),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
