"""Models and layouts as other tools say them."""

from __future__ import annotations

import math

import pytest

from suika.core.dialects import from_huggingface, layout_from_megatron, megatron_flags, model_from_megatron
from suika.core.errors import SpecError
from suika.core.layout import Layout
from suika.core.presets import PRESETS, preset
from suika.core.tensors import num_parameters

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
}
BILLIONS = {
    "gpt3-175b": 175,
    "llama2-7b": 6.74,
    "llama2-70b": 69,
    "llama3-8b": 8.03,
    "llama3-405b": 405.9,
    "qwen2-7b": 7.62,
    "qwen3-8b": 8.19,
    "qwen3-30b-a3b": 30.5,
    "mistral-7b": 7.24,
    "mixtral-8x7b": 46.7,
}


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_presets_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert num_parameters(PRESETS[name]) / 1e9 == pytest.approx(billions, rel=0.005)


def test_preset_names() -> None:
    assert preset("Llama2 7B") is PRESETS["llama2-7b"]
    with pytest.raises(SpecError, match="llama2-7b"):
        preset("llama2-8b")


def test_huggingface_llama_is_the_preset() -> None:
    model = from_huggingface(LLAMA, "llama3-8b")
    assert model == PRESETS["llama3-8b"]


def test_huggingface_others() -> None:
    gpt2 = from_huggingface(
        {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    )
    assert (gpt2.family, gpt2.ffn, gpt2.tied, gpt2.max_positions) == ("gpt", 3072, True, 1024)
    qwen = from_huggingface({**LLAMA, "model_type": "qwen2"})
    assert qwen.qkv_bias
    moe = from_huggingface({**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2})
    assert (moe.experts, moe.experts_per_token, moe.expert_ffn) == (8, 2, 14336)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "4096"}, "whole number"),
        ({"num_key_value_heads": 7}, "kv_heads"),
    ],
)
def test_huggingface_mistakes_name_the_field(changes: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        from_huggingface({**LLAMA, **changes})
    with pytest.raises(SpecError, match="JSON object"):
        from_huggingface([1, 2])


FLAGS = """torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size=14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --swiglu --untie-embeddings-and-output-weights --vocab-size 128256
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4
--micro-batch-size 2 --use-distributed-optimizer --sequence-parallel --recompute-granularity full"""


def test_megatron_flags() -> None:
    model = model_from_megatron(FLAGS)
    assert (model.family, model.layers, model.kv_heads, model.ffn, model.tied) == ("llama", 32, 8, 14336, False)
    assert layout_from_megatron(FLAGS, 64, 32) == Layout(
        tp=2, pp=4, dp=8, micro_batch=2, virtual_stages=2, zero=1, recompute="full", sequence_parallel=True
    )
    assert megatron_flags("--a --b=1 --c 2 3") == {"a": "", "b": "1", "c": "2"}


def test_megatron_mistakes() -> None:
    with pytest.raises(SpecError, match="--hidden-size"):
        model_from_megatron("--num-layers 2 --num-attention-heads 2")
    with pytest.raises(SpecError, match="whole number"):
        model_from_megatron("--num-layers two --hidden-size 8 --num-attention-heads 2")
    with pytest.raises(SpecError, match="not a multiple"):
        layout_from_megatron(FLAGS, 12, 32)


@pytest.mark.parametrize("value", ["abc", [1], {"a": 1}, math.nan, math.inf, True, 10**400])
@pytest.mark.parametrize("name", ["rope_theta", "rms_norm_eps", "router_aux_loss_coef"])
def test_numbers_that_are_none_are_named(name: str, value: object) -> None:
    with pytest.raises(SpecError, match=name):
        from_huggingface({**LLAMA, name: value})


def test_switches_are_true_or_false() -> None:
    assert from_huggingface({**LLAMA, "tie_word_embeddings": True}).tied
    assert not from_huggingface({**LLAMA, "tie_word_embeddings": None}).tied
    with pytest.raises(SpecError, match="tie_word_embeddings"):
        from_huggingface({**LLAMA, "tie_word_embeddings": "no"})


@pytest.mark.parametrize("odd", ["--moe-aux-loss-coeff abc", '--x "unclosed', f"--seed 1 --num-layers {'9' * 5000}"])
def test_odd_flags_are_named(odd: str) -> None:
    with pytest.raises(SpecError):
        model_from_megatron(f"--num-layers 4 --hidden-size 256 --num-attention-heads 8 {odd}")
