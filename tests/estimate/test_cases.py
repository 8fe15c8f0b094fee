"""Measured cases: what is wrong is skipped with its reason; nothing crashes, nothing is silent."""

from __future__ import annotations

import csv
import gzip
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from suika.core.errors import SpecError
from suika.estimate.cases import groups, parse_cases
from suika.estimate.evaluate import evaluate
from suika.estimate.table import read_rows

GOOD = {
    "source": "lab",
    "gpu_type": "A100",
    "gpus": "8",
    "gpus_per_node": "8",
    "model": "gpt",
    "layers": "24",
    "hidden": "2048",
    "ffn": "8192",
    "heads": "16",
    "vocab": "50304",
    "seq": "2048",
    "tp": "2",
    "pp": "2",
    "dp": "2",
    "mbs": "2",
    "gbs": "32",
    "precision": "bf16",
    "recompute": "full",
    "attention_impl": "flash",
    "iter_time_s": "1.5",
    "notes": "",
}


def reason(**changes: str) -> str:
    cases, skipped = parse_cases([{**GOOD, **changes}])
    assert len(cases) + len(skipped) == 1
    return skipped[0].reason if skipped else ""


def test_a_good_row_is_a_case() -> None:
    (case,), skipped = parse_cases([GOOD])
    assert not skipped
    assert (case.layout.tp, case.layout.pp, case.layout.dp, case.layout.recompute) == (2, 2, 2, "full")
    assert (case.family, case.step_s) == ("lab/A100/<=8", 1.5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": ""}, "missing: precision"),
        ({"recompute": "sometimes"}, "unknown recompute"),
        ({"sp": "perhaps"}, "not a flag: sp"),
        ({"iter_time_s": "0.0015"}, "contradictory: iter_time_s is below what the devices' peak allows (units?)"),
        ({"iter_time_s": "1e30"}, "out of range: iter_time_s (units?)"),
        ({"peak_mem_gb": "1e-320"}, "out of range: peak_mem_gb (units?)"),
        ({"peak_mem_gb": "40960"}, "out of range: peak_mem_gb (units?)"),
        ({"interconnect": "inter_node_bandwidth 0"}, "must be > 0"),
        ({"interconnect": "0 Gb/s RoCE per node"}, "must be > 0"),
        ({"mbs": ""}, "missing: mbs"),
        ({"hidden": ""}, "missing: hidden"),
        ({"gpu_type": ""}, "missing: gpu_type"),
        ({"iter_time_s": ""}, "missing: iter_time_s and peak_mem_gb"),
        ({"gpu_type": "TPUv5"}, "unknown device type"),
        ({"precision": "int3"}, "unknown precision"),
        ({"iter_time_s": "nan"}, "not a positive number: iter_time_s"),
        ({"iter_time_s": "-1"}, "not a positive number: iter_time_s"),
        ({"iter_time_s": "1,5"}, "not a positive number: iter_time_s"),
        ({"layers": "twelve"}, "not a whole number: layers"),
        ({"layers": "1e99"}, "out of range: layers"),
        ({"gpus": "0"}, "out of range: gpus"),
        ({"dp": "4"}, "contradictory: tp x pp x cp x dp"),
        ({"gpus": "9"}, "contradictory: gpus is not a multiple"),
        ({"gbs": "33"}, "contradictory: global batch"),
        ({"heads": "13"}, "contradictory: heads do not divide hidden"),
        ({"pp": "4", "dp": "1", "layers": "1"}, "contradictory: more pipeline chunks"),
        # 1.5 s are 5461 tokens/s/GPU; a table in milliseconds says 1500
        ({"iter_time_s": "1500", "tokens_per_s_per_gpu": "5461"}, "units?"),
    ],
)
def test_reasons(changes: dict[str, str], said: str) -> None:
    assert said in reason(**changes)


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("BF16", "bf16"),
        ("torch.bfloat16", "bf16"),
        ("bf16-mixed", "bf16"),
        ("FP8 (current scaling) / BF16", "fp8"),
        ("fp8_cs", "fp8"),
        ("MXFP8", "mxfp8"),
        ("NVFP4", "nvfp4"),
        ("half", "fp16"),
        ("float32", "fp32"),
    ],
)
def test_precisions_however_they_are_written(text: str, precision: str) -> None:
    (case,), _ = parse_cases([{**GOOD, "gpu_type": "B200", "precision": text}])
    assert case.precision == precision


@pytest.mark.parametrize(
    ("text", "kernel"),
    [("FA3", "flash"), ("xformers", "flash"), ("PyTorch SDPA", "flash"), ("math", "unfused"), ("TE", "flash-cudnn")],
)
def test_attention_kernels_are_fused_unless_they_are_known_not_to_be(text: str, kernel: str) -> None:
    (case,), _ = parse_cases([{**GOOD, "attention_impl": text}])
    assert case.recipe.attention == kernel


@pytest.mark.parametrize(
    ("notes", "version"),
    [
        ("26.04.01 NeMo Container, Pre-Training Performance", "26.04.01"),
        ("NeMo 24.07 container; model FLOPs", "24.07"),
        ("section 'H100 80GB BF16'; iter time = GBS", ""),
    ],
)
def test_the_software_version_is_the_one_that_the_notes_name(notes: str, version: str) -> None:
    (case,), _ = parse_cases([{**GOOD, "notes": notes}])
    assert case.version == version


def test_a_stated_network_slower_than_an_adapter_for_each_device_means_shared_adapters() -> None:
    def shared(interconnect: str) -> float:
        (case,), _ = parse_cases([{**GOOD, "interconnect": interconnect}])
        return case.wiring.devices_per_adapter

    assert shared("vTrain config: inter_node_bandwidth 800") == pytest.approx(2)
    assert shared("NVLink3; 1600 Gb/s RoCE per node") == pytest.approx(1)
    assert shared("12.5 Gb/s Ethernet per node") == pytest.approx(128)
    assert shared("") == 1


def test_columns_in_any_order_and_case(tmp_path: Path) -> None:
    path, names = tmp_path / "cases.csv", sorted(GOOD, reverse=True)
    path.write_text(f"{','.join(name.upper() for name in names)},MORE\n{','.join(GOOD[n] for n in names)},x\n")
    assert parse_cases(read_rows(path)) == parse_cases([GOOD])


def test_layers_that_do_not_divide_are_priced() -> None:
    """Embedding and head may take chunks of their own: 126 layers in 128 chunks."""
    assert reason(layers="126", pp="8", dp="1", tp="1", vpp="16", mbs="1") == ""


TEXT = st.one_of(
    st.text(max_size=8), st.integers(-5, 10**12).map(str), st.floats().map(str), st.sampled_from(["", "8"])
)


# A busy machine is no reason to fail: examples are few and small.
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(GOOD)), TEXT, max_size=4))
def test_no_row_crashes_and_none_is_lost(changes: dict[str, str]) -> None:
    cases, skipped = parse_cases([{**GOOD, **changes}])
    assert len(cases) + len(skipped) == 1
    if cases:
        report = evaluate(cases, skipped)
        assert all(value is None or math.isfinite(value) for f in report["families"] for value in _numbers(f))


def _numbers(family: dict[str, Any]) -> list[float | None]:
    return [v for v in family.values() if v is None or isinstance(v, float)]


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "cases.csv.gz"
    with gzip.open(path, "wt", newline="") as file:
        writer = csv.DictWriter(file, list(GOOD))
        writer.writeheader()
        writer.writerow(GOOD)
    assert len(read_rows(path)) == 1
    whole = path.read_bytes()
    (tmp_path / "broken.csv.gz").write_bytes(b"not gzip")
    (tmp_path / "cut.csv.gz").write_bytes(whole[:-20])
    (tmp_path / "damaged.csv.gz").write_bytes(whole[:30] + bytes(255 - byte for byte in whole[30:60]) + whole[60:])
    (tmp_path / "twice.csv").write_text(f"{','.join(GOOD)},SEQ\n{','.join(GOOD.values())},17\n")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    for name in ("absent.csv", "broken.csv.gz", "cut.csv.gz", "damaged.csv.gz", "empty.csv", "other.csv", "twice.csv"):
        with pytest.raises(SpecError):
            read_rows(tmp_path / name)


def test_groups_share_what_calibration_may_share() -> None:
    rows = [GOOD, {**GOOD, "tp": "4", "dp": "1"}, {**GOOD, "seq": "1024"}, {**GOOD, "gpus": "64", "dp": "16"}]
    cases, _ = parse_cases(rows)
    assert sorted(map(len, groups(cases))) == [1, 1, 2]


def test_the_real_table_is_covered(shared_data: Path) -> None:
    cases, skipped = parse_cases(read_rows(shared_data / "throughput" / "measured_dev.csv.gz"))
    assert len(cases) + len(skipped) == 1215
    assert len(cases) == 983
    assert {s.reason.split(":")[0] for s in skipped} == {"missing"}


def test_rows_with_more_or_fewer_values_than_columns_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "cases.csv"
    line = ",".join(GOOD.values())
    few = ",".join([*GOOD.values()][:-2])  # the first row, too: the header says which columns there are
    path.write_text(f"{','.join(GOOD)}\n{few}\n{line}\n{line},more,values\n")
    cases, skipped = parse_cases(read_rows(path))
    assert len(cases) == 1
    assert [(s.row, s.reason) for s in skipped] == [
        (2, "not a row of this table: fewer values than columns"),
        (4, "not a row of this table: more values than columns"),
    ]


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    path = tmp_path / "cases.csv"
    path.write_text(f"{','.join(GOOD)}\n{','.join(GOOD.values())}\n", encoding="utf-8-sig")
    (case,), _ = parse_cases(read_rows(path))
    assert case.source == "lab"
