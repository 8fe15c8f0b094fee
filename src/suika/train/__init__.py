"""The built-in 3D trainer: GPT and Llama families, hand-written tensor parallelism, 1F1B pipelines, ZeRO-1."""
