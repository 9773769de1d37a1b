"""`paceline doctor`: checks whether this machine can run Paceline, and says what to do about what is wrong."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from paceline.cli.options import from_environment, takes
from paceline.config import ServerConfig, config_from

Model = Annotated[
    str | None,
    typer.Option(**from_environment("model"), help="Model to check: a folder, a .gguf file or a downloaded hub id."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


@takes(ServerConfig)
def doctor(options: dict[str, object], model: Model = None, as_json: Json = False) -> None:
    """Check whether this machine can serve: software, GPU, memory, folders, port, limits, and a model.

    Exit status 1: there is a problem. Give the options of the server that you would start.
    """
    from paceline import __version__
    from paceline.doctor.finding import Status, run_checks
    from paceline.doctor.machine import machine_checks
    from paceline.doctor.model_files import model_checks
    from paceline.doctor.software import software_checks

    checks = [
        *software_checks(),
        *machine_checks(config_from(ServerConfig, options)),
        *(model_checks(model) if model is not None else ()),
    ]
    findings = []
    for finding in run_checks(checks):
        findings.append(finding)
        if not as_json:
            colour = {Status.OK: None, Status.WARNING: "yellow", Status.PROBLEM: "red"}[finding.status]
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            typer.secho(f"{finding.status:8}", nl=False, fg=colour)
            typer.echo(f" {finding.name:16} {finding.text}{remedy}")
    worst = max((finding.status for finding in findings), key=list(Status).index)
    if as_json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        typer.echo(json.dumps({"version": __version__, "status": worst, "findings": rows}, indent=1))
    if worst is Status.PROBLEM:
        raise typer.Exit(1)
