"""Well-known models by name. Shapes are from the models' papers and published `config.json` files."""

from __future__ import annotations

import difflib

from suika.core.errors import SpecError
from suika.core.model import ModelSpec


def _gpt3(name: str, layers: int, hidden: int, heads: int) -> ModelSpec:
    """Brown et al. 2020, table 2.1; vocabulary padded to a multiple of 128."""
    return ModelSpec(name, "gpt", layers, hidden, 4 * hidden, heads, 50304, max_positions=2048, tied=True)


def _llama(
    name: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, **more: object
) -> ModelSpec:
    return ModelSpec(name, "llama", layers, hidden, ffn, heads, vocab, kv_heads=kv_heads, **more)  # type: ignore[arg-type]


_LLAMA_3 = {"rope_theta": 500_000.0}
_QWEN_2 = {"rope_theta": 1_000_000.0, "qkv_bias": True, "norm_eps": 1e-6}
_QWEN_3 = {"rope_theta": 1_000_000.0, "norm_eps": 1e-6, "head_dim": 128}

_MODELS = (
    _gpt3("gpt3-125m", 12, 768, 12),
    _gpt3("gpt3-350m", 24, 1024, 16),
    _gpt3("gpt3-760m", 24, 1536, 16),
    _gpt3("gpt3-1.3b", 24, 2048, 16),
    _gpt3("gpt3-2.7b", 32, 2560, 32),
    _gpt3("gpt3-6.7b", 32, 4096, 32),
    _gpt3("gpt3-13b", 40, 5120, 40),
    _gpt3("gpt3-175b", 96, 12288, 96),
    _llama("llama2-7b", 32, 4096, 11008, 32, 32, 32000),
    _llama("llama2-13b", 40, 5120, 13824, 40, 40, 32000),
    _llama("llama2-70b", 80, 8192, 28672, 64, 8, 32000),
    _llama("llama3-8b", 32, 4096, 14336, 32, 8, 128256, **_LLAMA_3),
    _llama("llama3-70b", 80, 8192, 28672, 64, 8, 128256, **_LLAMA_3),
    _llama("llama3-405b", 126, 16384, 53248, 128, 8, 128256, **_LLAMA_3),
    _llama("qwen2-0.5b", 24, 896, 4864, 14, 2, 151936, tied=True, **_QWEN_2),
    _llama("qwen2-1.5b", 28, 1536, 8960, 12, 2, 151936, tied=True, **_QWEN_2),
    _llama("qwen2-7b", 28, 3584, 18944, 28, 4, 152064, **_QWEN_2),
    _llama("qwen2-72b", 80, 8192, 29568, 64, 8, 152064, **_QWEN_2),
    _llama("qwen3-0.6b", 28, 1024, 3072, 16, 8, 151936, tied=True, **_QWEN_3),
    _llama("qwen3-1.7b", 28, 2048, 6144, 16, 8, 151936, tied=True, **_QWEN_3),
    _llama("qwen3-4b", 36, 2560, 9728, 32, 8, 151936, tied=True, **_QWEN_3),
    _llama("qwen3-8b", 36, 4096, 12288, 32, 8, 151936, **_QWEN_3),
    _llama("qwen3-14b", 40, 5120, 17408, 40, 8, 151936, **_QWEN_3),
    _llama("qwen3-32b", 64, 5120, 25600, 64, 8, 151936, **_QWEN_3),
    _llama("qwen3-30b-a3b", 48, 2048, 6144, 32, 4, 151936, experts=128, experts_per_token=8, expert_ffn=768, **_QWEN_3),
    _llama(
        "qwen3-235b-a22b", 94, 4096, 12288, 64, 4, 151936, experts=128, experts_per_token=8, expert_ffn=1536, **_QWEN_3
    ),
    _llama("mistral-7b", 32, 4096, 14336, 32, 8, 32000, rope_theta=1_000_000.0),
    _llama("mixtral-8x7b", 32, 4096, 14336, 32, 8, 32000, rope_theta=1_000_000.0, experts=8, experts_per_token=2),
)
PRESETS = {model.name: model for model in _MODELS}


def preset(name: str) -> ModelSpec:
    """The model called `name` (case and punctuation do not matter). Raises `SpecError` with the nearest names."""
    plain = {_plain(known): known for known in PRESETS}
    found = plain.get(_plain(name))
    if found is None:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise SpecError("model", name, "no preset of this name", f"{hint}known: {', '.join(PRESETS)}")
    return PRESETS[found]


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum() or c == ".")  # 1.3b is not 13b
