"""The command line as scripts rely on it: flags, exit codes, one document on stdout, light imports."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from suika.cli.app import COMMANDS, load
from suika.cli.root import require_no_root
from suika.core.errors import SpecError

HERE = Path(__file__).parent
OURS = (
    *("demo", "submit", "ps", "describe", "explain", "logs", "resize", "cancel"),
    *("nodes", "drain", "undrain", "events", "up", "down"),
)


def suika(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"SUIKA_HOME": str(home)}
    command = [sys.executable, "-m", "suika.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


def flags(name: str) -> dict[str, Any]:
    from typer.main import get_command

    command = get_command(load(COMMANDS[name][0]))
    return {
        parameter.name: {"opts": sorted(parameter.opts), "default": repr(parameter.default)}
        for parameter in command.params
        if parameter.name != "help"
    }


def test_flags_are_frozen() -> None:
    """Scripts use these. To change them on purpose: `SUIKA_FREEZE=1 pytest tests/cli` and say so in the changelog."""
    golden = HERE / "flags.json"
    found = {name: flags(name) for name in OURS}
    if os.environ.get("SUIKA_FREEZE"):
        golden.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    assert found == json.loads(golden.read_text())


def test_help_is_fast_and_names_every_command(tmp_path: Path) -> None:
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        shown = suika("--help", home=tmp_path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.3, f"suika --help takes {min(spent):.2f} CPU-s"
    assert all(f"  {name} " in shown.stdout for name in OURS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets in a help text are markup to the library that prints it, and can make it fail."""
    with contextlib.suppress(SystemExit):
        load(COMMANDS[name][0])(args=["--help"], prog_name=f"suika {name}")
    assert f"Usage: suika {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["ps"], ["submit", "job.yaml"], ["explain", "x"], ["nodes"], ["bench", "--help"]]
)
def test_light_commands_import_no_torch(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: x\n")
    code = (
        "import sys\nfrom suika.cli.app import main\nsys.argv = ['suika', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'scipy', 'matplotlib'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    environment = os.environ | {"SUIKA_HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("arguments", [["ps"], ["describe", "x"], ["cancel", "x"], ["down"], ["events", "--json"]])
def test_without_a_cluster_every_command_says_so(arguments: list[str], tmp_path: Path) -> None:
    run = suika(*arguments, home=tmp_path)
    assert run.returncode == 3
    assert run.stdout == ""
    assert "`suika up` starts one" in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_jobs_do_not_get_root_by_an_oversight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent does not start as root, unless somebody says so."""
    monkeypatch.delenv("SUIKA_ALLOW_ROOT", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    from suika.cli.agent import agent

    token = tmp_path / "token"
    token.write_text("x")
    token.chmod(0o600)
    with pytest.raises(SpecError, match="user.*would run the commands of every tenant's jobs.*--allow-root"):
        agent("http://127.0.0.1:1", token, devices="cpu:1")
    require_no_root(True, "")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    require_no_root(False, "")


def test_users_mistakes_are_one_line_and_exit_2(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [1,\n")
    for arguments in (
        ["submit", str(tmp_path / "none.yaml")],
        ["submit", str(tmp_path / "bad.yaml")],
        ["up", "--cluster", "2 x 4"],
        ["up", "--cluster", str(tmp_path / "none.yaml")],
        ["up", "--policy", "nobody", "--foreground"],
    ):
        run = suika(*arguments, home=tmp_path / "home")
        assert run.returncode == 2, (arguments, run)
        assert run.stdout == ""
        assert len(run.stderr.strip().splitlines()) == 1, run.stderr
        assert "Traceback" not in run.stderr
    assert suika("nonsense", home=tmp_path).returncode == 2
    assert suika("submit", home=tmp_path).returncode == 2


def test_the_job_schema_is_a_json_schema_and_accepts_the_example(tmp_path: Path) -> None:
    schema = json.loads(suika("submit", "--schema", home=tmp_path).stdout)
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["name"]
    kinds = [set(kind["required"]) for kind in schema["anyOf"]]
    assert kinds == [{"model", "data", "global_batch", "sequence_length", "steps"}, {"command"}]
    import yaml

    from suika.core.job import parse_job

    examples = sorted((HERE.parents[1] / "examples").glob("*.yaml"))
    assert examples
    for example in examples:
        if "job" in example.name:
            parse_job(yaml.safe_load(example.read_text()))


@pytest.mark.parametrize(("option", "value"), [("--pairs", "9"), ("--pairs", "1,x"), ("--sizes", "2")])
def test_a_bench_names_what_it_does_not_know(option: str, value: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "suika.cli", "bench", "redeploy", option, value], capture_output=True, text=True
    )
    assert run.returncode == 2
    assert f"{option[2:]}='" in run.stderr
    assert "known: " in run.stderr
    assert "Traceback" not in run.stderr
