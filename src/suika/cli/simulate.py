"""`suika simulate`: replay a trace under any set of policies, on one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from suika.cli.explained import show
from suika.cli.inputs import read_cluster, read_yaml
from suika.cli.output import Column, Format, JsonOption, OutputOption, emit, emit_document, note
from suika.core.errors import SpecError, require
from suika.core.quota import Quota, parse_quotas
from suika.core.words import parse_seconds, seconds

if TYPE_CHECKING:
    from suika.simulate.study import Study

MOST_LEFT_OUT = 10  # listed beside the table
COLUMNS = (
    Column("POLICY", lambda r: r["policy"]),
    Column("AVG", lambda r: seconds(r["avg_jct_s"])),
    Column("P50", lambda r: seconds(r["p50_jct_s"])),
    Column("P95", lambda r: seconds(r["p95_jct_s"]), wide=True),
    Column("P99", lambda r: seconds(r["p99_jct_s"])),
    Column("MAX", lambda r: seconds(r["max_jct_s"]), wide=True),
    Column("MAKESPAN", lambda r: seconds(r["makespan_s"])),
    Column("SLOWDOWN", lambda r: r["avg_slowdown"]),
    Column("WORST FTF", lambda r: r["worst_ftf"], wide=True),
    Column("MOVES/JOB", lambda r: r["moves_per_job"]),
    Column("LOST DEVICE TIME", lambda r: seconds(r["lost_device_s"]), wide=True),
    Column("DECISION P50/P99", lambda r: f"{r['decision_ms_p50']:.1f}/{r['decision_ms_p99']:.1f} ms"),
)


def simulate(
    jobs: Annotated[Path, typer.Option(help="A trace file; .gz is read as it is.")],
    cluster: Annotated[str, typer.Option(help="A YAML file, or NODESxDEVICES:TYPE.")],
    policy: Annotated[str, typer.Option(help="Policies, e.g. suika,rubick,suika:tax=4.")] = "suika",
    format: Annotated[str, typer.Option(help="auto, or the trace's format.")] = "auto",
    time_unit: Annotated[str | None, typer.Option(help="s or ms, if the file does not say.")] = None,
    times: Annotated[Path | None, typer.Option(help="Measured iteration times, instead of the estimator.")] = None,
    move_cost: Annotated[str, typer.Option(help="'model', or seconds per start and move.")] = "model",
    lengths: Annotated[str, typer.Option(help="declared, noisy:SIGMA or blind.")] = "declared",
    noise: Annotated[float, typer.Option(help="Sigma of the predicted step times' error.")] = 0.0,
    seeds: Annotated[int, typer.Option(help="How many seeds; 0 is the trace as it is.")] = 1,
    load: Annotated[float | None, typer.Option(help="Rescale arrivals to this load.")] = None,
    elastic_share: Annotated[float, typer.Option(help="Share of jobs that may change size.")] = 1.0,
    failures: Annotated[
        str | None, typer.Option(help="A CSV of failures and stragglers, or a node's mean time to fail.")
    ] = None,
    failing_moves: Annotated[float, typer.Option(help="Share of moves that fail and lose their pause.")] = 0.0,
    quotas: Annotated[Path | None, typer.Option(help="YAML: what tenants are guaranteed and may hold.")] = None,
    explain: Annotated[
        str | None, typer.Option(help="JOB@TIME: only explain this job then, e.g. job7@2h, under the first policy.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report here.")] = None,
    output: OutputOption = "table",
    json: JsonOption = False,
) -> None:
    """Replay a trace under any set of policies."""
    from suika.simulate import study as studies
    from suika.simulate.predictor import Lengths
    from suika.simulate.times import estimated, measured
    from suika.simulate.trace import read_trace

    topology = read_cluster(cluster)
    require(0 <= noise < 10, "noise", noise, "must be at least 0 and below 10")
    require(0 <= failing_moves <= 1, "failing-moves", failing_moves, "must be between 0 and 1")
    studies.parse_move_cost(move_cost)
    study = studies.Study(
        read_trace(jobs, format, time_unit),
        topology,
        measured(times) if times is not None else estimated(topology),
        studies.parse_policies(policy),
        move_cost=move_cost,
        lengths=Lengths.parse(lengths),
        noise=noise,
        seeds=studies.seeds_of(seeds),
        load=load,
        elastic_share=elastic_share,
        failures=failures,
        quotas=_quotas(quotas),
        failing_moves=failing_moves,
    )
    if explain is not None:
        _explain(study, explain, "json" if json else output)
        return
    with _bar() as progress:
        document, runs = studies.run(study, progress)
    if report is not None:
        from suika.simulate.report import page

        try:
            report.write_text(page(document, runs))
        except OSError as error:
            raise SpecError("report", str(report), f"cannot be written: {error.strerror}") from None
        note(f"report: {report}")
    for row in study.trace.dirty:
        note(f"{jobs.name} line {row.line}: {row.reason}")
    left_out = document["left_out"]
    for left in left_out[:MOST_LEFT_OUT]:
        note(f"{jobs.name}: left out: {left['reason']}")
    if len(left_out) > MOST_LEFT_OUT:
        note(f"and {len(left_out) - MOST_LEFT_OUT} more jobs (--json has all)")
    emit(document, document["policies"], COLUMNS, "json" if json else output)
    if not json and output in ("table", "wide"):
        note(f"lower bound of the average: {seconds(document['lower_bound_avg_jct_s'])} ({document['models']})")


def _explain(study: Study, wanted: str, output: Format) -> None:
    """One job at one instant, seed 0."""
    from suika.schedule.policies import parse_policy
    from suika.simulate.explain import explained

    job, at, moment = wanted.rpartition("@")
    require(bool(at), "explain", wanted, "names no time", "write JOB@TIME, e.g. job7@2h")
    at_s = parse_seconds(moment, "explain")
    told = explained(study.world(study.seeds[0])[0], parse_policy(study.policies[0]), job, at_s)
    if output in ("json", "yaml"):
        emit_document(told, output)
    else:
        show(told, output, at=seconds)


def _quotas(path: Path | None) -> dict[str, Quota]:
    return {} if path is None else parse_quotas(read_yaml(path, "quotas"))


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int, int], None]]:
    """A progress bar on stderr: one line per policy and seed."""
    from rich.console import Console
    from rich.progress import Progress, TaskID

    lines: dict[tuple[str, int], TaskID] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:

        def told(policy: str, seed: int, left: int, total: int) -> None:
            key = policy, seed
            if key not in lines:
                lines[key] = progress.add_task(f"{policy} (seed {seed})", total=total)
            progress.update(lines[key], completed=total - left)

        yield told
