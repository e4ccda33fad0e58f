"""`fastgrpo doctor`: what is installed, what the machine is fast at, what is missing. Paste it into bug reports."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # nothing to choose


def run(args: argparse.Namespace) -> int:
    del args
    from fastgrpo.evidence import doctor

    checkup = doctor.examine()
    print(doctor.render(checkup))
    return 0 if checkup.healthy else 1
