"""Trace formats. Samples other than our CSV and Rubick's are written from the published schemas, not from raw files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from suika.core.cluster import parse_cluster_shorthand
from suika.core.errors import SpecError
from suika.core.layout import Layout
from suika.core.quota import Quota
from suika.core.snapshot import Option, ScalingCurve
from suika.simulate.times import Models, measured
from suika.simulate.trace import Trace, read_trace
from suika.simulate.workload import build, load_of


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def jobs(trace: Trace) -> list[tuple[str, float, int, float]]:
    return [(job.id, job.submit_s, job.devices, job.duration_s) for job in trace.jobs]


SAMPLES = {
    "suika": "job_id,submit_s,gpus,duration_s,user\na,100,8,60,ann\nb,160,2,30,bob\n",
    "rubick": "name,submission_time,duration,application,num_gpus,exec_plan,steps,is_sla\n"
    "a,100,60,vit,8,ga,10,0\nb,160,30,bert,2,ga,5,0\n",
    "helios": "job_id,user,vc,jobname,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
    "a,u,vcA,n,8,64,1,COMPLETED,2020-04-01 00:01:40,2020-04-01 00:02:00,2020-04-01 00:03:00,60,20\n"
    "cpu,u,vcA,n,0,64,1,COMPLETED,2020-04-01 00:01:50,2020-04-01 00:02:00,2020-04-01 00:03:00,60,20\n"
    "b,u,vcB,n,2,16,1,FAILED,2020-04-01 00:02:40,2020-04-01 00:02:40,2020-04-01 00:03:10,30,0\n",
    "acme": "job_id,user,node_num,gpu_num,cpu_num,mem_per_pod_GB,type,state,submit_time,start_time,end_time,duration,"
    "queue,gpu_time\n"
    "a,u,1,8,64,512,Pretrain,COMPLETED,2023-03-01 00:01:40+08:00,2023-03-01 00:02:00+08:00,"
    "2023-03-01 00:03:00+08:00,60,20,480\n"
    "b,u,1,2,16,64,Evaluation,FAILED,2023-03-01 00:02:40+08:00,2023-03-01 00:02:40+08:00,"
    "2023-03-01 00:03:10+08:00,30,0,60\n",
    "pai": "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"
    "a,worker,4,Terminated,100,160,600,30,200,V100\na,ps,1,Terminated,100,160,600,30,,\n"
    "b,worker,2,Terminated,160,190,600,30,100,V100\nhalf,worker,1,Terminated,170,190,600,30,50,V100\n",
    "sacct": "JobID|User|Account|Submit|Start|End|ElapsedRaw|AllocTRES|State\n"
    "a|u|x|2024-01-01T00:01:40|2024-01-01T00:02:00|2024-01-01T00:03:00|60|billing=8,cpu=64,gres/gpu=8|COMPLETED\n"
    "a.batch|u|x|2024-01-01T00:01:40|2024-01-01T00:02:00|2024-01-01T00:03:00|60|cpu=64,gres/gpu=8|COMPLETED\n"
    "b|u|x|2024-01-01T00:02:40|2024-01-01T00:02:40|2024-01-01T00:03:10|30|cpu=8,gres/gpu=2|FAILED\n",
    "philly": json.dumps(
        [
            {
                "status": "Pass",
                "vc": "v",
                "jobid": name,
                "user": "u",
                "submitted_time": f"2017-10-09 07:{minute}:40",
                "attempts": [
                    {
                        "start_time": f"2017-10-09 07:{minute}:40",
                        "end_time": end,
                        "detail": [{"ip": "m1", "gpus": [f"gpu{i}" for i in range(num)]}],
                    }
                ],
            }
            for name, minute, num, end in (("a", "01", 8, "2017-10-09 07:02:40"), ("b", "02", 2, "2017-10-09 07:03:10"))
        ]
    ),
}


@pytest.mark.parametrize("format", SAMPLES)
def test_each_format_is_recognised_and_read(format: str, tmp_path: Path):
    trace = read_trace(write(tmp_path, SAMPLES[format]))
    assert trace.format == format
    assert jobs(trace) == [("a", 0.0, 8, 60.0), ("b", 60.0, 2, 30.0)]
    assert trace == read_trace(tmp_path / "trace.csv", format)
    if format == "pai":
        assert [(row.line, "whole" in row.reason) for row in trace.dirty] == [(5, True)]
    else:
        assert not trace.dirty


def test_lingjun_takes_devices_from_the_worker_table(tmp_path: Path):
    text = (
        "id,job_name,kind,model,priority,gmt_job_submitted,gmt_job_running,gmt_job_finished,gmt_job_stopped\n"
        "1,a,PyTorchJob,gpt,1,2023/7/15 02:19,2023/7/15 02:20,2023/7/15 02:21,\n"
        "2,b,PyTorchJob,gpt,1,2023/7/15 02:20,2023/7/15 02:20,,2023/7/15 02:25\n"
        "3,odd,PyTorchJob,gpt,1,2023/7/17 02:53,2023/7/5 15:18,2023/7/17 03:00,\n"
    )
    path = write(tmp_path, text, "job.csv")
    with pytest.raises(SpecError, match=r"worker\.csv"):
        read_trace(path)
    resources = '"{""cpu"": 8, ""nvidia.com/gpu"": 8}"'
    workers = "".join(f"{name},w{i},Worker,{resources}\n" for name, num in (("a", 2), ("b", 1)) for i in range(num))
    write(tmp_path, "job_name,worker_name,replica_type,RES\n" + workers, "worker.csv")
    trace = read_trace(path)
    assert jobs(trace) == [("a", 0.0, 16, 60.0), ("b", 60.0, 8, 300.0)]
    assert [row.reason for row in trace.dirty] == ["runs before it is submitted"]


def test_b73_units_are_declared_or_refused(tmp_path: Path):
    seconds = read_trace(write(tmp_path, "job_id,submit_s,gpus,duration_s\na,100,8,60\nb,160.5,2,30\n", "s.csv"))
    millis = read_trace(
        write(tmp_path, "job_id,submit_ms,gpus,duration_ms\na,100000,8,60000\nb,160500,2,30000\n", "ms.csv")
    )
    assert jobs(seconds) == jobs(millis)
    bare = write(tmp_path, "job_id,submit_time,gpus,duration\na,100,8,60\n", "bare.csv")
    with pytest.raises(SpecError, match="time-unit"):
        read_trace(bare)
    assert jobs(read_trace(bare, time_unit="s")) == [("a", 0.0, 8, 60.0)]
    assert jobs(read_trace(bare, time_unit="ms")) == [("a", 0.0, 8, 0.06)]


def test_b73_dirty_rows_are_listed_with_line_and_reason(tmp_path: Path):
    text = (
        "\ufeffjob_id,submit_s,gpus,duration_s\n"
        "late,500,8,60\n"
        "ends-first,100,8,-5\n"
        "no-end,100,8,\n"
        "no-gpus,100,0,60\n"
        "nan,100,8,nan\n"
        "half,100,0.5,60\n"
        "late,600,8,60\n"
        "short,100\n"
        "early,200,2,60\n"
    )
    trace = read_trace(write(tmp_path, text))
    # Times are shifted to the first submission, jobs ordered by (time, id).
    assert jobs(trace) == [("early", 0.0, 2, 60.0), ("late", 300.0, 8, 60.0)]
    assert {row.line: row.reason.split()[0] for row in trace.dirty} == {
        3: "lasts",
        4: "duration_s",
        5: "asks",
        6: "duration_s",
        7: "gpus=0.5",
        8: "duplicate",
        9: "has",
    }


def test_our_columns_may_say_priority_and_weight(tmp_path: Path):
    """Whole numbers are not cut down to some, and what cannot be meant is listed; empty cells are the defaults."""
    header = "job_id,submit_s,gpus,duration_s,steps,min_gpus,max_gpus,priority,weight\n"
    good = "a,0,4,60,100,2,8,3,2.5\nb,1,4,60,,,,,\n"
    bad = (
        "c,2,4,60,,1.5,,,\n"
        "d,3,4,60,,,,0.5,\n"
        "e,4,4,60,,,,,0\n"
        "f,5,4,60,,,,,-1\n"
        "g,6,4,60,-5,,,,\n"
        "h,7,4,60,,-2,,,\n"
        "i,8,4,60,,,,4000,\n"
        "k,9,4,1e30,,,,,\n"
        "l,1e20,4,60,,,,,\n"
        "m,9,4,60,1e15,,,,\n"
    )
    trace = read_trace(write(tmp_path, header + good + bad))
    a, b = trace.jobs
    assert (a.num_steps, a.min_devices, a.max_devices, a.priority, a.weight) == (100, 2, 8, 3, 2.5)
    assert (b.num_steps, b.min_devices, b.max_devices, b.priority, b.weight) == (0, 0, 0, 0, 1.0)
    assert [row.line for row in trace.dirty] == list(range(4, 14))
    models = Models({"m": ScalingCurve(tuple(Option((n,), Layout(dp=n), 1.0 / n, "") for n in (1, 2, 4, 8)))}, "a test")
    job = build(trace, parse_cluster_shorthand("1x8:cpu"), models).jobs[0]
    assert (job.priority, job.weight) == (3, 2.5)


def test_jobs_that_all_come_at_once_have_no_load(tmp_path: Path):
    models = Models({"m": ScalingCurve((Option((1,), Layout(), 1.0, ""),))}, "a test")
    trace = read_trace(write(tmp_path, "job_id,submit_s,gpus,duration_s\na,5,1,60\nb,5,1,60\n"))
    cluster = parse_cluster_shorthand("1x8:cpu")
    assert build(trace, cluster, models).load is None
    assert all(job.submit_s == 0.0 for job in build(trace, cluster, models, seed=3).jobs)
    with pytest.raises(SpecError, match="at once"):
        build(trace, cluster, models, load=0.5)


def test_jobs_beyond_their_tenants_maximum_are_left_out(tmp_path: Path):
    models = Models({"m": ScalingCurve((Option((4,), Layout(dp=4), 1.0, ""),))}, "a test")
    text = "job_id,submit_s,gpus,duration_s,tenant\na,0,4,60,red\nb,5,4,60,blue\n"
    workload = build(
        read_trace(write(tmp_path, text)), parse_cluster_shorthand("1x8:cpu"), models, quotas={"red": Quota(max=3)}
    )
    assert [job.id for job in workload.jobs] == ["b"]
    assert "may hold 3" in workload.left_out[0].reason


def test_b73_gpus_in_percent(tmp_path: Path):
    """100 is one device, 200 two; 50 is no whole gang and is listed."""
    given = (("a", 1, 100), ("b", 2, 200), ("c", 3, 50))
    rows = "".join(f"{name},w,1,T,{at},{at + 60},600,30,{gpu},V100\n" for name, at, gpu in given)
    trace = read_trace(write(tmp_path, SAMPLES["pai"].split("\n")[0] + "\n" + rows))
    assert [(job.id, job.devices) for job in trace.jobs] == [("a", 1), ("b", 2)]
    assert len(trace.dirty) == 1


@pytest.mark.parametrize("text", ["", "\n", "job_id,submit_s,gpus,duration_s\n", "a,b\n1,2\n"])
def test_nothing_to_read_is_said(text: str, tmp_path: Path):
    with pytest.raises(SpecError):
        read_trace(write(tmp_path, text))


def test_gzip_is_read_as_it_is(tmp_path: Path):
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(SAMPLES["suika"].encode()))
    assert jobs(read_trace(path)) == jobs(read_trace(write(tmp_path, SAMPLES["suika"])))


def test_sacct_gpus_by_type_count_where_no_sum_is_given(tmp_path: Path):
    text = SAMPLES["sacct"].replace("gres/gpu=8|C", "gres/gpu:a100=6,gres/gpu:h100:80g=2|C")
    assert [job.devices for job in read_trace(write(tmp_path, text)).jobs] == [8, 2]
    text = SAMPLES["sacct"].replace("gres/gpu=2", "gres/gpu=2,gres/gpu:a100=2")
    assert [job.devices for job in read_trace(write(tmp_path, text)).jobs] == [8, 2]


def test_the_workload_rule(shared_data: Path):
    """Steps reproduce the trace's duration at its size; ranges are a quarter to four times; seeds are repeatable."""
    cluster = parse_cluster_shorthand("8x8:A800")
    models = measured(shared_data / "rubick" / "iteration_times.csv")
    trace = read_trace(shared_data / "traces" / "philly_w64_busiest.csv.gz")
    workload = build(trace, cluster, models)
    assert workload == build(trace, cluster, models)
    seven = {"vit", "roberta", "bert", "t5", "gpt2", "llama7", "llama30"}  # those of the artifact's own workloads
    assert len({job.model for job in workload.jobs}) > 3
    assert {job.model for job in workload.jobs} <= seven
    traced = {job.id: job for job in trace.jobs}
    for job in workload.jobs:
        assert job.num_steps * job.step_s_at(job.requested_devices) == pytest.approx(traced[job.id].duration_s)
        assert job.min_devices <= job.requested_devices <= job.max_devices <= 4 * traced[job.id].devices
    other = build(trace, cluster, models, seed=1)
    assert [job.model for job in other.jobs] != [job.model for job in workload.jobs]
    rigid = build(trace, cluster, models, elastic_share=0.0)
    assert all(job.min_devices == job.max_devices == job.requested_devices for job in rigid.jobs)


def test_load_rescales_arrivals(shared_data: Path):
    cluster = parse_cluster_shorthand("8x8:A800")
    models = measured(shared_data / "rubick" / "iteration_times.csv")
    trace = read_trace(shared_data / "rubick" / "workload-base.csv")
    assert load_of(trace.jobs, 64) == pytest.approx(0.731, abs=1e-3)
    half = build(trace, cluster, models, load=0.5)
    assert half.jobs[-1].submit_s == pytest.approx(trace.jobs[-1].submit_s * 0.7308 / 0.5, rel=1e-3)


def test_measured_times_name_a_layout_for_each_shape(shared_data: Path):
    models = measured(shared_data / "rubick" / "iteration_times.csv")
    assert {"vit", "roberta", "bert", "t5", "gpt2", "llama7", "llama30"} <= set(models.curves)
    for curve in models.curves.values():
        assert all(option.layout.num_ranks == option.num_devices for option in curve.options)
        assert len({option.shape for option in curve.options}) == len(curve.options)
    best = {o.num_devices: o for o in models.curve("llama7").options if o.shape == (8,) * (o.num_devices // 8)}
    assert best[64].layout.tp == 4
    with pytest.raises(SpecError, match="known: "):
        models.curve("gpt5")


NASTY = ("", "NaN", "inf", "-1", "1e400", "9" * 30, "x", "null", '"', "a,b", "2020-13-45", "[]", "1.5", "gres/gpu=")


@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "philly"])
def test_any_cell_may_be_dirty(name: str, tmp_path: Path):
    """Each cell of each row, the header's too, with each nasty value: listed with its line, or a user's error."""
    rows = SAMPLES[name].splitlines()
    between = "|" if name == "sacct" else ","
    for place, row in enumerate(rows):
        for column in range(len(row.split(between))):
            for value in NASTY:
                cells = row.split(between)
                cells[column] = value
                dirty = [*rows[:place], between.join(cells), *rows[place + 1 :]]
                try:
                    trace = read_trace(write(tmp_path, "\n".join(dirty) + "\n"), name)
                except SpecError:
                    continue
                assert len(trace.jobs) + len(trace.dirty) <= len(rows)
                assert all(job.id and job.devices > 0 and 0 < job.duration_s < 1e300 for job in trace.jobs)
                assert all(row.reason and row.line >= 1 for row in trace.dirty)


@pytest.mark.parametrize("value", [None, -1, 1e400, "x", [], {}, [1], True, {"gpus": 3}])
def test_any_part_of_a_philly_entry_may_be_dirty(value: object, tmp_path: Path):
    for key in ("jobid", "vc", "submitted_time", "attempts"):
        entries = json.loads(SAMPLES["philly"])
        entries[0][key] = value
        trace = read_trace(write(tmp_path, json.dumps(entries)), "philly")
        assert len(trace.jobs) + len(trace.dirty) == len(entries)
    for key in ("start_time", "end_time", "detail"):
        entries = json.loads(SAMPLES["philly"])
        entries[0]["attempts"][-1][key] = value
        trace = read_trace(write(tmp_path, json.dumps(entries)), "philly")
        assert len(trace.jobs) + len(trace.dirty) == len(entries)


def test_a_missing_column_and_an_endless_cell_are_named(tmp_path: Path):
    text = SAMPLES["rubick"].replace("application", "app", 1)
    with pytest.raises(SpecError, match="has no column application"):
        read_trace(write(tmp_path, text), "rubick")
    trace = read_trace(write(tmp_path, SAMPLES["suika"] + "x" * 200_000 + "\n"), "suika")
    assert len(trace.jobs) == 2
    assert trace.dirty[0].line == 4
