"""`ModelSpec`: the shape of a transformer, enough to build, price and move it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from suika.core.errors import SpecError, require

Family = Literal["gpt", "llama"]
Part = Literal["q", "k", "v", "o", "gate", "up", "down"]
LARGEST = 10_000_000  # of any whole number in a model: products of a few of them stay below 2^63


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (arXiv 2106.09685): `alpha / rank` x B A is added to the matrices of `targets`, outside of
    routed experts; A has `rank` rows and B as many columns."""

    __pydantic_config__ = {"extra": "forbid"}

    rank: int
    targets: tuple[Part, ...] = ("q", "v")
    alpha: float = 0.0  # 0: twice the rank

    def __post_init__(self) -> None:
        whole = isinstance(self.rank, int) and not isinstance(self.rank, bool)
        require(whole and 1 <= self.rank <= LARGEST, "model.lora.rank", self.rank, "must be a whole number >= 1")
        object.__setattr__(self, "targets", tuple(self.targets))
        known = get_args(Part)
        for part in self.targets:
            require(part in known, "model.lora.targets", part, "is no matrix of a layer", f"known: {', '.join(known)}")
        require(bool(self.targets), "model.lora.targets", [], "is empty", "name at least one matrix, e.g. q")
        require(0 <= self.alpha < 1e9, "model.lora.alpha", self.alpha, "must be >= 0")
        if not self.alpha:
            object.__setattr__(self, "alpha", 2.0 * self.rank)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer.

    `gpt`: LayerNorm with bias, learned positions, GELU MLP, biases everywhere.
    `llama`: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases (`qkv_bias` for Qwen2).
    `experts` > 0 replaces each layer's MLP by a mixture with `experts_per_token` routed and `shared_experts` always
    active experts of `expert_ffn` columns each, from layer `first_dense_layers` on. `balance` weighs the loss that
    keeps the experts equally busy (0: none).
    `dropout`: share of the elements dropped after the embedding and at the end of each residual branch.
    `frozen`: patterns (`layers.[0-3].*`, `embedding.weight`) of the names of tensors that are not trained: they have no
    masters and no moments. `lora` adds adapters, which are always trained; without `frozen` nothing else is.
    """

    name: str
    family: Family
    layers: int
    hidden: int
    ffn: int
    heads: int
    vocab: int
    kv_heads: int = 0  # 0 = heads (multi-head attention)
    head_dim: int = 0  # 0 = hidden / heads
    max_positions: int = 0  # gpt: rows of the position table; 0 = the job's sequence length
    tied: bool = False
    qkv_bias: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    expert_ffn: int = 0
    first_dense_layers: int = 0
    balance: float = 0.01
    dropout: float = 0.0
    frozen: tuple[str, ...] = ()
    lora: Lora | None = None

    def __post_init__(self) -> None:
        if self.family not in ("gpt", "llama"):
            raise SpecError("model.family", self.family, "unknown family", "use gpt or llama")
        for field, value in vars(self).items():
            if field in (
                "name",
                "family",
                "tied",
                "qkv_bias",
                "rope_theta",
                "norm_eps",
                "balance",
                "dropout",
                "frozen",
                "lora",
            ):
                continue
            least = int(field in ("layers", "hidden", "ffn", "heads", "vocab"))
            whole = isinstance(value, int) and not isinstance(value, bool)
            require(whole and value >= least, f"model.{field}", value, f"must be a whole number >= {least}")
            require(value <= LARGEST, f"model.{field}", value, f"must be at most {LARGEST}")
        require(self.rope_theta > 0, "model.rope_theta", self.rope_theta, "must be > 0")
        require(self.norm_eps > 0, "model.norm_eps", self.norm_eps, "must be > 0")
        require(0 <= self.balance <= 1, "model.balance", self.balance, "must be between 0 and 1")
        require(0 <= self.dropout < 1, "model.dropout", self.dropout, "must be >= 0 and < 1")
        object.__setattr__(self, "frozen", tuple(self.frozen))
        if self.lora is not None and not self.frozen:
            object.__setattr__(self, "frozen", ("*",))
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if not self.head_dim:
            require(
                self.hidden % self.heads == 0,
                "model.heads",
                self.heads,
                f"hidden({self.hidden}) % heads({self.heads}) != 0",
                "choose heads that divide hidden, or give head_dim",
            )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        require(
            self.kv_heads > 0 and self.heads % self.kv_heads == 0,
            "model.kv_heads",
            self.kv_heads,
            f"heads({self.heads}) % kv_heads({self.kv_heads}) != 0",
            "query heads are shared out evenly over the key/value heads",
        )
        if self.family == "llama":
            require(self.head_dim % 2 == 0, "model.head_dim", self.head_dim, "rotary positions need an even head_dim")
        if self.experts:
            require(
                0 < self.experts_per_token <= self.experts,
                "model.experts_per_token",
                self.experts_per_token,
                f"must be between 1 and experts({self.experts})",
            )
            if not self.expert_ffn:
                object.__setattr__(self, "expert_ffn", self.ffn)
        else:
            object.__setattr__(self, "balance", 0.0)
        if self.frozen:
            from suika.core.tensors import check_trained

            check_trained(self)

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection (SwiGLU)."""
        return self.family == "llama"

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def is_moe_layer(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.first_dense_layers
