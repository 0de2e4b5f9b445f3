"""`model.quantization: auto`: what is measured, what is chosen by it, and that one output has one choice."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from batchrun import Engine, load_job, run_job
from batchrun.data.view import OutputView
from batchrun.engine import fastest_form
from batchrun.engine.fastest_form import Fastest, fastest
from batchrun.errors import JobError
from batchrun.job import EngineSpec, ModelSpec
from batchrun.model_files import resolve
from tests.jobs import output_rows, write_job

ROWS = [{"id": f"r{i}", "text": f"row {i}"} for i in range(4)]
JOB: dict[str, Any] = {"model": {"quantization": "auto"}, "sampling": {"temperature": 0, "max_tokens": 4}}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and small weights are measured, and not for long."""
    monkeypatch.setattr(fastest_form, "_ELEMENTS", 1 << 16)
    monkeypatch.setattr(fastest_form, "_SECONDS", 0.0)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the workers of the test find fastest, each the first of these that is left."""
    forms: list[str] = []

    def choose(*_: Any) -> Fastest:
        form: Any = forms.pop(0)
        return Fastest(form, {form: 1.0}, 4)

    monkeypatch.setattr(fastest_form, "fastest", choose)
    return forms


def recorded(folder: Path) -> str:
    view = OutputView.at(str(folder / "out"))
    assert view is not None
    return str(view.recorded_configuration()["model"]["quantization"])


@pytest.mark.usefixtures("quick")
def test_all_forms_are_measured(tiny_model: Path) -> None:
    spec, engine = ModelSpec(name_or_path=str(tiny_model)), EngineSpec(max_num_seqs=3)
    found = fastest(resolve(str(tiny_model)), spec, engine, "cpu", "float32")
    assert found.tokens == 3
    assert set(found.seconds) == {"none", "int8", "int4"}
    assert all(0 < seconds < math.inf for seconds in found.seconds.values())
    assert found.form in found.seconds
    assert str(found).startswith(f"{found.form} (")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("seconds", "form"),
    [
        ({"none": 1.0, "int8": 0.98, "int4": 0.99}, "none"),  # not clearly less
        ({"none": 1.0, "int8": 0.9, "int4": 0.89}, "int8"),
        ({"none": 1.0, "int8": 0.9, "int4": 0.5}, "int4"),
        ({"dequantize": 0.7, "none": 1.0}, "dequantize"),
    ],
)
def test_what_loses_nothing_is_kept_unless_another_is_clearly_faster(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], form: str
) -> None:
    monkeypatch.setattr(fastest_form, "_measure", lambda *_: seconds)
    spec = ModelSpec(name_or_path=str(tiny_model))
    assert fastest(resolve(str(tiny_model)), spec, EngineSpec(), "cpu", "float32").form == form


@pytest.mark.usefixtures("quick")
def test_an_engine_says_what_it_chose(tiny_model: Path) -> None:
    engine = Engine(str(tiny_model), quantization="auto", max_num_seqs=2)
    assert engine.model_spec.quantization in {"none", "int8", "int4"}
    engine.close()


def test_an_output_keeps_the_choice_that_it_was_begun_with(
    tmp_path: Path, tiny_model: Path, chosen: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_job(tmp_path, tiny_model, ROWS, **JOB)
    chosen += ["int8", "int4"]
    assert run_job(load_job(path), limit=2) == 0
    assert "model.quantization: int8" in capsys.readouterr().err
    assert recorded(tmp_path) == "int8"
    assert run_job(load_job(path)) == 0
    assert (recorded(tmp_path), len(output_rows(tmp_path)), chosen) == ("int8", 4, ["int4"])
    assert run_job(load_job(path), overwrite=True) == 0
    assert recorded(tmp_path) == "int4"
    assert run_job(load_job(path, ["model.quantization=int4"])) == 0
    with pytest.raises(JobError, match=r'model\.quantization: was "int4", is now "int8"'):
        run_job(load_job(path, ["model.quantization=int8"]))


def test_workers_that_come_at_once_agree(
    tmp_path: Path, tiny_model: Path, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One measures while another begins the output with another choice."""
    path = write_job(tmp_path, tiny_model, ROWS, **JOB)
    chosen += ["int8"]

    def slow(*_: Any) -> Fastest:
        monkeypatch.undo()
        assert run_job(load_job(path, ["model.quantization=int4"]), limit=1) == 0
        return Fastest("int8", {"int8": 1.0}, 4)

    monkeypatch.setattr(fastest_form, "fastest", slow)
    assert run_job(load_job(path)) == 0
    assert recorded(tmp_path) == "int4"
