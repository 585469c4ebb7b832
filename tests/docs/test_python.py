"""The Python of the pages runs."""

import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the code of a page at the root, with some of its words replaced; return its variables."""
    monkeypatch.chdir(ROOT)

    def run(page, **replaced):
        [code] = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
        for old, new in replaced.items():
            assert old in code
            code = code.replace(old, new)
        variables = {}
        exec(compile(code, page, "exec"), variables)
        return variables

    return run


def test_recognisers_are_loaded_evaluated_and_trained(run, tmp_path, capsys):
    code = run("training/README.md", **{"runs/mine": str(tmp_path), "loop.steps=20": "loop.steps=1"})
    assert (tmp_path / "quartznet_5x3.pt").is_file()
    text, rates, *words = capsys.readouterr().out.splitlines()
    assert " the " in f" {text} "
    assert "clips=6" in rates
    assert len(words) == 6
    assert code["rate_hz"] == 16_000


def test_models_are_exported(run, tmp_path):
    run("export/README.md", model_repository=str(tmp_path))
    assert (tmp_path / "mine_acoustic" / "1" / "model.onnx").is_file()


def test_the_graph_runs_outside_of_triton(run):
    code = run("export/docs/graph.md")
    assert np.isfinite(code["log_probs"]).all()
    assert code["lengths"].tolist() == [[226], [100]]
