#!/usr/bin/env python3
"""Load a Hugging Face folder in transformers and let it go on with a text.

    python examples/continue_smollm2/generate.py [--prompt TEXT] [--tokens 64] FOLDER

Nothing of torchtitan_lc is used: what an export holds has to be enough for others.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=64, help="to generate, at most")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    config = model.config
    print(f"{config.max_position_embeddings} positions, rope {config.rope_parameters}")
    inputs = tokenizer(options.prompt, return_tensors="pt")
    # Greedy, so that two runs give the same.
    ids = model.generate(**inputs, max_new_tokens=options.tokens, do_sample=False)
    print(tokenizer.decode(ids[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
