"""torchtitan_lc: continue the pretraining of decoder language models at very long context."""

__version__ = "0.1.0"
