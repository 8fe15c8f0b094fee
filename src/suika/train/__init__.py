"""The built-in 3D trainer (GPT and Llama families) on the runtime."""
