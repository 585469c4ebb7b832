"""What pages say of the demo model is what was measured."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HELD_OUT = json.loads((ROOT / "perf" / "results" / "quartznet_demo_held_out.json").read_text())["summary"]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "demo/README.md"])
def test_error_rates_are_those_of_the_evaluation(page):
    rows = re.findall(r"^(.+?) +(\d+) clips +(\d+) words  WER +([\d.]+)%  CER +([\d.]+)%$", read("demo/wer.txt"), re.M)
    assert rows[-1][0] == "all"
    for row in rows:
        assert f"| {' | '.join(row)} |\n" in read(page)


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_gains_of_language_models_are_those_on_other_speakers(page):
    for decoder in ("greedy", "transformer_xl") if page == "CHANGELOG.md" else ("n-gram", "transformer_xl"):
        assert f"{100 * HELD_OUT['wer'][decoder]:.1f} %" in read(page)


def test_the_cards_intervals_are_those_of_the_raw_file():
    card = read("demo/README.md")
    assert f"| greedy | {100 * HELD_OUT['wer']['greedy']:.2f} | | |\n" in card
    for gain in HELD_OUT["gains"]:
        points, low, high = (f"{100 * gain[part]:.2f}" for part in ("difference", "low", "high"))
        assert f" | {100 * HELD_OUT['wer'][gain['to']]:.2f} | {points} | {low} to {high} |\n" in card


def test_the_table_of_decoders_is_that_of_the_raw_file():
    page = read("training/docs/evaluation.md")
    rows = [json.loads(line) for line in read("perf/results/quartznet_demo_table.jsonl").splitlines()]
    overall = [row for row in rows if row["test_set"] == "dev.jsonl"]
    assert len(overall) == 3
    for row in overall:
        start = f"| dev.jsonl | {row['decoder']} | {row['clips']} | {row['words']} "
        offline, served = (
            " | ".join(f"{100 * row[side][rate]:.2f}" for rate in ("wer", "cer")) for side in ("offline", "served")
        )
        (shown,) = [line for line in page.splitlines() if line.startswith(start)]
        assert f"{start}| {offline} | " in shown
        assert f" | {served} | " in shown[len(start) + len(offline) :]
        assert shown.endswith(f"| {row['same']} of {row['clips']} |")
