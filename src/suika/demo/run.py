"""The demo from beginning to end.

data        text becomes tokens
play        a cluster comes up, the script's events happen, the scheduler moves the jobs
twins       each job again in one process, unmoved: the losses must agree
rivals      each move again by checkpoint and restart
tell        result, report, trace
"""

from __future__ import annotations

import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from suika.control.service import Service
from suika.control.store import Event
from suika.core.cluster import parse_cluster_shorthand
from suika.core.errors import SpecError, require
from suika.core.job import ENDED, Job, JobState
from suika.core.plan import Plan
from suika.demo.predictions import Predictions
from suika.demo.result import DemoResult, JobResult, MoveResult
from suika.demo.rival import add_rivals, cold_restart
from suika.demo.scene import LiveScene, Recorder, StepSeen
from suika.demo.script import CLUSTER, SEQUENCE_LENGTH, events
from suika.demo.show import Show
from suika.demo.tell import tell, write_events
from suika.demo.timeline import Mark
from suika.demo.twin import largest_difference, run_twins
from suika.train.data import prepare

TEXT_BYTES = 4 << 20  # more than the jobs will read
LONGEST_S = 900.0  # for the jobs: far beyond what a slow machine needs
# Of the whole demo, which is to end within three minutes: no further restart is begun after that.
MEMORY_UNTIL_S, DISK_UNTIL_S = 150.0, 140.0
POLL_S = 0.05


def run_demo(text: Path | None, out: Path, show: Show, rivals: bool = True) -> DemoResult:
    """Play the demo on `text` (a file or folder; by default the sources of this Python) and write into `out`."""
    began_s = time.monotonic()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError("out", str(out), f"cannot be made: {error.strerror}", "give another folder") from None
    with _workplace(out) as work:
        show.phase("reading text")
        data = work / "text.bin"
        source, pattern = (text, "*") if text else (Path(sysconfig.get_paths()["stdlib"]), "*.py")
        manifest = prepare(source, data, pattern=pattern, max_bytes=TEXT_BYTES)
        enough = manifest.num_tokens > SEQUENCE_LENGTH
        require(enough, "data", str(source), f"holds {manifest.num_tokens} tokens", f"give more than {SEQUENCE_LENGTH}")
        show.say(f"{manifest.num_tokens:,} tokens from {manifest.num_files} files below {source}")
        show.phase("bringing up 8 devices")
        recorder = Recorder()
        with Service(parse_cluster_shorthand(CLUSTER), work, listener=recorder) as service:
            marks, predictions = _play(service, data, show)
            store = service.controller.state.store
            jobs, happened = store.jobs(), store.events()
            write_events(happened, out)
            moves = _moves(jobs, happened)
            show.phase("training each job again, unmoved, in one process")
            specs = [job.spec for job in jobs]
            twins = run_twins(specs, service.backend, work, show.twins)
            results = tuple(_job_result(job, recorder.steps[job.id], twins[job.spec.name].losses) for job in jobs)
            cold_restart_s = None
            if rivals and moves:
                by_name = {spec.name: spec for spec in specs}
                place = (service.backend, work, show)
                moves = add_rivals(by_name, moves, *place, medium="memory", until_s=began_s + MEMORY_UNTIL_S)
                cold_restart_s = cold_restart(by_name, moves, *place)
                # The disk is seldom the quicker one: on a slow machine it is left out, and the result says so.
                moves = add_rivals(by_name, moves, *place, medium="disk", until_s=began_s + DISK_UNTIL_S)
        wall_s = time.monotonic() - began_s
        result = DemoResult(results, moves, _problems(happened), wall_s, cold_restart_s, predictions.found())
        return tell(result, jobs, recorder.steps, happened, marks, out)


@contextmanager
def _workplace(out: Path) -> Iterator[Path]:
    """Sockets, snapshots and tokens while the demo runs; gone after it, however it ends, but for the logs.

    Whatever else lies in `out` is not ours to touch.
    """
    with tempfile.TemporaryDirectory(prefix=".work-", dir=out) as folder:
        try:
            yield Path(folder)
        finally:
            (out / "logs").mkdir(exist_ok=True)
            for log in Path(folder, "logs").glob("*.log"):
                log.replace(out / "logs" / log.name)


def _play(service: Service, data: Path, show: Show) -> tuple[list[Mark], Predictions]:
    """Let the script's events happen, each when its time has come, until every job has ended."""
    scene, api = LiveScene(service.controller.state), service.api
    story, marks, predictions = list(events(data)), [], Predictions()
    origin_s, deadline = None, time.monotonic() + LONGEST_S
    show.phase("training and moving")
    while story or any(job.state not in ENDED for job in scene.state.store.jobs()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the jobs did not end within {LONGEST_S:.0f} s")
        if story and story[0].when(scene):
            event = story.pop(0)
            try:
                getattr(api, event.call)(**event.arguments(scene))
            except SpecError as error:
                service.controller.state.log("script-skipped", why=f"{event.what}: {error}")
            service.controller.call(lambda: None)  # the loop has decided about it before the script looks again
            origin_s = origin_s or scene.state.store.events()[0].at_s
            marks.append(Mark(time.time() - origin_s, event.what))
            show.say(event.what)
        rows = api.jobs(all=True)
        predictions.note(rows)
        show.cluster(rows, scene.state.store.events())
        time.sleep(POLL_S)
    return marks, predictions


def _moves(jobs: tuple[Job, ...], happened: tuple[Event, ...]) -> tuple[MoveResult, ...]:
    """The measured moves in the order of their commits, each with what else was training."""
    names = {job.id: job.spec.name for job in jobs}
    records = {(e.job_id, e.data["generation"]): e.data for e in happened if e.kind == "redeployed"}
    running: dict[str, Plan] = {}  # by job id
    found = []
    for event in happened:
        if event.job_id is None:
            continue
        if event.kind == "committed" and (record := records.get((event.job_id, event.data["generation"]))):
            beside = tuple((names[other], plan) for other, plan in running.items() if other != event.job_id)
            found.append(MoveResult.of(names[event.job_id], record, event.at_s - happened[0].at_s, beside))
        if event.kind in ("launched", "committed"):
            running[event.job_id] = Plan.from_dict(event.data["plan"])
        elif event.kind in ("job-finished", "job-failed", "job-cancelled", "job-recovering"):
            running.pop(event.job_id, None)
    return tuple(found)


def _job_result(job: Job, steps: dict[int, StepSeen], twin: dict[int, float]) -> JobResult:
    losses = {step: seen.loss for step, seen in steps.items()}
    return JobResult(
        job.spec.name,
        job.steps_done,
        losses.get(job.spec.steps),
        job.ended_s - job.submitted_s if job.ended_s is not None else None,
        job.state is JobState.FINISHED,
        largest_difference(losses, twin, job.spec.steps),
    )


def _problems(happened: tuple[Event, ...]) -> tuple[str, ...]:
    """What went wrong: failed moves, faults, events of the script that could not be, jobs that lost something."""
    told = {"move-failed": "error", "controller-fault": "error", "script-skipped": "why", "recovering": "error"}
    problems = [f"{event.kind}: {event.data[told[event.kind]]}" for event in happened if event.kind in told]
    committed = sum(event.kind == "committed" for event in happened)
    measured = sum(event.kind == "redeployed" for event in happened)
    if committed != measured:
        problems.append(f"{committed} moves were committed, {measured} measured")
    return tuple(problems)
