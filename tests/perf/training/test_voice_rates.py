from pathlib import Path

from carnelian_perf.training.voice_rates import render_table

DOCS = Path(__file__).parents[3] / "training" / "docs"


def test_the_table_of_rates_is_that_of_the_records():
    assert render_table(DOCS / "voice_rates.jsonl") in (DOCS / "corpus.md").read_text(encoding="utf-8")
