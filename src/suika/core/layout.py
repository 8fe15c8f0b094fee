"""`Layout`: how one job is cut over its ranks. There is no second way to say a layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

from suika.core.errors import SpecError, require
from suika.core.model import ModelSpec

Recompute = Literal["none", "selective", "full"]
ZeroBuckets = Literal["layer", "stage"]
AXES = ("tp", "pp", "dp", "cp", "ep")
LARGEST = 1_000_000  # of any degree: what is refused later, with its arithmetic, must be small enough to be looked at


@dataclass(frozen=True)
class Layout:
    """Degrees of each axis and what a step does with them.

    `layers_per_stage` lists layers of each pipeline chunk in model order (pp x virtual_stages entries; chunk c runs on
    stage c % pp); empty means `even_split`. `micro_batch` counts sequences. `ep` splits experts over the dp axis and
    does not multiply the number of ranks. `zero_buckets`: what ZeRO slices are cut from, each layer or all layers of a
    pipeline chunk together (fewer, larger messages, and slices that survive a change of pp).
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    micro_batch: int = 1
    layers_per_stage: tuple[int, ...] = ()
    virtual_stages: int = 1
    zero: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    zero_buckets: ZeroBuckets = "layer"

    def __post_init__(self) -> None:
        for field in (*AXES, "micro_batch", "virtual_stages"):
            value = getattr(self, field)
            require(_is_whole(value) and value >= 1, f"layout.{field}", value, "must be a whole number >= 1")
            require(value <= LARGEST, f"layout.{field}", value, f"must be at most {LARGEST}")
        known = _is_whole(self.zero) and self.zero in (0, 1, 2, 3)
        require(known, "layout.zero", self.zero, "must be a ZeRO stage 0, 1, 2 or 3")
        given = self.sequence_parallel
        require(isinstance(given, bool), "layout.sequence_parallel", given, "must be true or false")
        if self.recompute not in ("none", "selective", "full"):
            raise SpecError("layout.recompute", self.recompute, "unknown kind", "use none, selective or full")
        if self.zero_buckets not in ("layer", "stage"):
            raise SpecError("layout.zero_buckets", self.zero_buckets, "unknown kind", "use layer or stage")
        split = self.layers_per_stage
        whole = isinstance(split, (list, tuple)) and all(map(_is_whole, split))
        require(whole, "layout.layers_per_stage", split, "must be a list of whole numbers")
        object.__setattr__(self, "layers_per_stage", tuple(split))
        if self.layers_per_stage:
            chunks = self.pp * self.virtual_stages
            require(
                len(self.layers_per_stage) == chunks and min(self.layers_per_stage) >= 1,
                "layout.layers_per_stage",
                list(self.layers_per_stage),
                f"needs {chunks} entries >= 1 (pp({self.pp}) x virtual_stages({self.virtual_stages}))",
            )

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def resolve(self, model: ModelSpec) -> Layout:
        """The same layout with `layers_per_stage` spelled out for `model`."""
        if self.layers_per_stage:
            return self
        return replace(self, layers_per_stage=even_split(model.layers, self.pp * self.virtual_stages))

    def chunk_bounds(self, model: ModelSpec) -> tuple[tuple[int, int], ...]:
        """Global layers [first, last) of each pipeline chunk, in model order."""
        bounds, first = [], 0
        for num in self.resolve(model).layers_per_stage:
            bounds.append((first, first + num))
            first += num
        return tuple(bounds)

    def stage_chunks(self, model: ModelSpec, stage: int) -> tuple[tuple[int, int], ...]:
        """The chunks that pipeline stage `stage` runs: every pp-th one from `stage` on."""
        return self.chunk_bounds(model)[stage :: self.pp]

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        data["layers_per_stage"] = list(self.layers_per_stage)
        return data

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Layout:
        unknown = sorted(map(str, set(data) - set(Layout.__dataclass_fields__)))
        if unknown:
            raise SpecError("layout", unknown, "unknown keys", f"known: {', '.join(Layout.__dataclass_fields__)}")
        return Layout(**data)

    @staticmethod
    def parse(text: str) -> Layout:
        """`tp=2,pp=2,dp=1[,layers_per_stage=3:2]` as written on a command line."""
        data: dict[str, Any] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            key, eq, value = part.partition("=")
            require(bool(eq), "layout", text, f"'{part}' is not key=value", "write tp=2,pp=2,dp=1")
            if key == "layers_per_stage":
                data[key] = tuple(_whole(key, v) for v in value.split(":"))
            elif key in ("recompute", "zero_buckets"):
                data[key] = value
            elif key == "sequence_parallel":
                require(value in ("true", "false"), "layout.sequence_parallel", value, "must be true or false")
                data[key] = value == "true"
            else:
                data[key] = _whole(key, value)
        return Layout.from_dict(data)

    def __str__(self) -> str:
        text = f"tp{self.tp} pp{self.pp} dp{self.dp}"
        text += "".join(f" {axis}{getattr(self, axis)}" for axis in ("cp", "ep") if getattr(self, axis) > 1)
        if self.virtual_stages > 1:
            text += f" v{self.virtual_stages}"
        if len(set(self.layers_per_stage)) > 1:
            text += f" layers[{','.join(map(str, self.layers_per_stage))}]"
        if self.micro_batch > 1:
            text += f" mb{self.micro_batch}"
        if self.zero == 3:
            text += " zero3"
        if self.recompute != "none":
            text += f" {self.recompute}-recompute"
        return text


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise SpecError(f"layout.{key}", value, "must be a whole number") from None


@cache
def even_split(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers per chunk, as even as can be; the remainder goes to the middle chunks, since the first also runs the
    embedding and the last the head. Every layer lands in exactly one chunk."""
    if layers < chunks:
        raise SpecError("layout.pp", chunks, f"layers({layers}) < pipeline chunks({chunks})", "use fewer stages")
    base, extra = divmod(layers, chunks)
    # Middle first: positions ordered by their distance from the centre.
    by_centre = sorted(range(chunks), key=lambda c: (abs(2 * c - (chunks - 1)), c))
    more = set(by_centre[:extra])
    return tuple(base + (c in more) for c in range(chunks))


def micro_batch_shares(global_batch: int, micro_batch: int, dp: int) -> tuple[int, ...]:
    """Micro-batches of each dp rank; their sum times `micro_batch` is exactly `global_batch`.

    Shares may differ by one: the loss is weighed by tokens, so an uneven share changes no gradient.
    """
    require(
        global_batch % micro_batch == 0,
        "layout.micro_batch",
        micro_batch,
        f"global_batch({global_batch}) % micro_batch({micro_batch}) != 0",
        "choose a micro-batch that divides the global batch",
    )
    base, extra = divmod(global_batch // micro_batch, dp)
    return tuple(base + (rank < extra) for rank in range(dp))


def check_layout(layout: Layout, model: ModelSpec, global_batch: int, sequence_length: int) -> None:
    """Raise `SpecError` with the arithmetic unless `layout` can run `model` at this batch and length."""
    tp, pp = layout.tp, layout.pp
    require(model.heads % tp == 0, "layout.tp", tp, f"heads({model.heads}) % tp({tp}) != 0", "tp must divide the heads")
    require(
        model.kv_heads % tp == 0 or tp % model.kv_heads == 0,
        "layout.tp",
        tp,
        f"kv_heads({model.kv_heads}) and tp({tp}) divide neither way",
        "key/value heads are split evenly or replicated evenly",
    )
    widths = {"ffn": model.ffn, **({"expert_ffn": model.expert_ffn} if model.experts else {})}
    for field, width in widths.items():
        require(width % tp == 0, "layout.tp", tp, f"{field}({width}) % tp({tp}) != 0", f"tp must divide {field}")
    require(model.vocab >= tp, "layout.tp", tp, f"vocab({model.vocab}) < tp({tp})")
    chunks = pp * layout.virtual_stages
    require(model.layers >= chunks, "layout.pp", pp, f"layers({model.layers}) < pipeline chunks({chunks})")
    split = layout.resolve(model).layers_per_stage
    require(
        sum(split) == model.layers,
        "layout.layers_per_stage",
        list(split),
        f"sum({sum(split)}) != layers({model.layers})",
        "each layer belongs to exactly one stage",
    )
    shares = micro_batch_shares(global_batch, layout.micro_batch, layout.dp)
    require(
        min(shares) >= pp,
        "layout",
        str(layout),
        f"the smallest dp rank has {min(shares)} micro-batches for pp({pp}) stages",
        "use fewer dp ranks, fewer stages or a smaller micro-batch",
    )
    if layout.virtual_stages > 1:
        even = all(share % pp == 0 for share in shares)
        require(even, "layout.virtual_stages", layout.virtual_stages, f"micro-batches {shares} % pp({pp}) != 0")
    if layout.sequence_parallel:
        cp, cut = layout.cp, f"sequence_length({sequence_length}) % tp({tp})"
        cut += f" x cp({cp})" if cp > 1 else ""
        require(sequence_length % (tp * cp) == 0, "layout.tp", tp, f"{cut} != 0")
    if layout.cp > 1:
        ok = sequence_length % (2 * layout.cp) == 0
        require(ok, "layout.cp", layout.cp, f"sequence_length({sequence_length}) % (2 x cp({layout.cp})) != 0")
    if layout.ep > 1:
        require(model.experts > 0, "layout.ep", layout.ep, "the model has no experts", "use ep=1")
        require(model.experts % layout.ep == 0, "layout.ep", layout.ep, f"experts({model.experts}) % ep != 0")
        require((layout.dp * layout.cp) % layout.ep == 0, "layout.ep", layout.ep, f"dp({layout.dp}) x cp % ep != 0")
        require(
            len(set(shares)) == 1,
            "layout.ep",
            layout.ep,
            f"dp ranks have different numbers of micro-batches, {shares}, and would wait for each other's tokens",
            "let dp x micro_batch divide the global batch",
        )
