"""A decoder of the Llama family: what Llama, Qwen and Mistral have in common. Each registers its own shapes."""
