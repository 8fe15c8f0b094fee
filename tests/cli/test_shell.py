"""Completion as shells ask for it, outputs of every read command, and odd job files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from suika.cli.app import COMMANDS, load
from suika.core.job import parse_job

READ = ("ps", "describe", "explain", "logs", "nodes", "events", "quota", "top")
ODD = [
    "",
    "[]",
    "7",
    "name: x",
    "name: [x]",
    "command: [true]",
    "name: x\ncommand: true\n",
    "name: x\ncommand: [1, 2]\n",
    "name: x\ncommand: [a]\nmodel: gpt2\n",
    "name: x\ncommand: [a]\nenvironment: here\n",
    "name: x\ncommand: [a]\nenvironment: {workdir: 7}\n",
    "name: x\ncommand: [a]\nenvironment: {variables: {A: 1}}\n",
    "name: x\ncommand: [a]\npreemption: never\n",
    "name: x\ncommand: [a]\ndevices: 4\n",
    "name: &a [*a]",
    "name: !!python/object/apply:os.system [id]",
    "a: b: c",
    "\t- x",
    "\x00",
]


def complete(words: str) -> list[str]:
    number = len(words.split()) - (0 if words.endswith(" ") else 1)
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(number), "_SUIKA_COMPLETE": "complete_bash"}
    command = [sys.executable, "-m", "suika.cli"]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done.stdout.split()


def test_commands_and_options_are_completed() -> None:
    assert set(complete("suika ")) == set(COMMANDS)
    assert complete("suika undr") == ["undrain"]
    assert {"--deadline", "--undo", "--wait", "--output"} <= set(complete("suika drain --"))
    assert {"add", "list", "token"} <= set(complete("suika account "))
    assert complete("suika no-such-command --") == ["--help"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_that_the_shell_takes(shell: str) -> None:
    command = [sys.executable, "-m", "suika.cli", "completion", shell]
    script = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "_SUIKA_COMPLETE=complete_" + shell in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_every_read_command_has_every_output() -> None:
    from typer.main import get_command

    for name in READ:
        command = get_command(load(COMMANDS[name][0]))
        options = {option for parameter in command.params for option in parameter.opts}
        if name != "top":  # a screen
            assert {"-o", "--output", "--json"} <= options, name


@pytest.mark.parametrize("text", ODD)
def test_an_odd_job_file_is_one_line_and_exit_code_2(tmp_path: Path, text: str, capsys: pytest.CaptureFixture) -> None:
    from suika.cli import jobs
    from suika.core.errors import SpecError

    file = tmp_path / "job.yaml"
    file.write_text(text)

    def ask(call: str, **arguments: object) -> object:
        """What the controller's door does with it."""
        return parse_job(arguments["job"]).model_dump()

    jobs_ask, jobs.ask = jobs.ask, ask
    try:
        with pytest.raises((SpecError, SystemExit)) as refusal:
            jobs.submit(file, dry_run=True)
    finally:
        jobs.ask = jobs_ask
    if isinstance(refusal.value, SystemExit):
        assert refusal.value.code == 2
    else:
        assert len(str(refusal.value).splitlines()) == 1


def test_the_example_is_a_command() -> None:
    example = yaml.safe_load((Path(__file__).parents[2] / "examples" / "command.yaml").read_text())
    spec = parse_job(example)
    assert spec.rigid
    assert spec.devices.max == 2
