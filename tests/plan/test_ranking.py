"""`suika plan`: ranked, explained, and the same as its JSON; and `suika estimate` on a real file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from suika.cli.app import load
from suika.core.errors import SpecError
from suika.core.presets import preset
from suika.core.tensors import num_parameters
from suika.estimate.predict import setting
from suika.plan.layouts import BUILT_IN, MEGATRON
from suika.plan.ranking import flops_per_token, rank_layouts

PLAN = ["llama2-13b", "--cluster", "2x8:H100", "--global-batch", "128", "--sequence-length", "4096"]


def run(capsys: pytest.CaptureFixture[str], command: str, *arguments: str) -> Any:
    with pytest.raises(SystemExit) as ended:
        load(f"suika.cli.{command}:{command}")(args=list(arguments), prog_name=command)
    assert ended.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_flops_of_a_token() -> None:
    model = preset("llama2-7b")
    dense = 6 * (num_parameters(model) - 32000 * 4096) + 6 * 32 * 4096 * 4096
    assert flops_per_token(model, 4096) == pytest.approx(dense)
    active = flops_per_token(preset("qwen3-30b-a3b"), 4096) / 6e9
    assert 3 < active < 4.5  # "a3b": three billion active parameters


def test_plans_are_ranked_and_each_loser_has_its_reason() -> None:
    s = setting(preset("llama2-13b"), "H100", global_batch=128, sequence_length=4096)
    ranking = rank_layouts(s, 16, MEGATRON)
    times = [plan.estimate.step_s for plan in ranking.plans]
    assert times == sorted(times)
    assert ranking.plans[0].why == ""
    assert all("slower" in p.why or p.why == "as fast as the best" for p in ranking.plans[1:])
    assert all(0.1 < p.mfu < 0.75 for p in ranking.plans)
    assert rank_layouts(s, 7, BUILT_IN).num_layouts > 0  # pp 7 or dp 7


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    document = run(capsys, "plan", *PLAN, "--json")
    best = document["plans"][0]
    assert sum(best["parts_s"].values()) == pytest.approx(best["step_s"])
    assert best["step_p10_s"] < best["step_s"] < best["step_p90_s"]
    assert sum(best["memory_parts_bytes"].values()) <= best["peak_p90_bytes"]
    assert len(document["plans"]) == 10


def test_command_reads_config_json_and_megatron_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 8, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = tmp_path / "flags.sh"
    flags.write_text("--num-layers 4 --hidden-size 512 --num-attention-heads 8 --vocab-size 1000")
    for path in (tmp_path, tmp_path / "config.json", flags):
        document = run(capsys, "plan", str(path), *PLAN[1:], "--json", "--top", "2")
        assert len(document["plans"]) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        ["no-such-model", *PLAN[1:]],
        ["", *PLAN[1:]],
        ["x" * 5000, *PLAN[1:]],  # longer than a file's name may be
        [PLAN[0], "--cluster", "2x8:Z9", *PLAN[3:]],
        [*PLAN, "--devices", "99"],
        [*PLAN, "--precision", "int3"],
        [*PLAN, "--devices", "13", "--space", "built-in", "--global-batch", "2"],
    ],
)
def test_mistakes_are_named(wrong: list[str]) -> None:
    with pytest.raises(SpecError):
        load("suika.cli.plan:plan")(args=wrong, prog_name="plan", standalone_mode=False)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"num_hidden_layers":' + "9" * 5000 + "}", "", "{", "[1]", "NaN"])
def test_an_odd_config_json_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(SpecError):
        load("suika.cli.plan:plan")(args=[str(tmp_path), *PLAN[1:]], prog_name="plan", standalone_mode=False)


def test_estimate_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [
        "source,gpu_type,gpus,model,layers,hidden,heads,seq,tp,pp,dp,mbs,gbs,precision,iter_time_s",
        "lab,A100,8,gpt,24,2048,16,2048,2,2,2,2,32,bf16,1.5",
        "lab,A100,8,gpt,24,2048,16,2048,1,1,8,2,32,bf16,1.2",
        "lab,A100,8,gpt,24,2048,16,2048,1,1,8,2,32,,1.2",
    ]
    path = tmp_path / "cases.csv"
    path.write_text("\n".join(rows))
    document = run(capsys, "estimate", str(path), "--calibrate", "one", "--json")
    family = next(f for f in document["families"] if f["gpus_bucket"] == "all")
    assert (family["n"], family["coverage"], family["skipped"]) == (2, 1.0, {"missing: precision": 1})
    assert family["differs_n"] == 2
    with pytest.raises(SpecError):
        load("suika.cli.estimate:estimate")(
            args=[str(tmp_path / "no.csv")], prog_name="estimate", standalone_mode=False
        )
