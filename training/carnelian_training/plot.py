"""The curves of a run: `metrics.jsonl` to a picture of loss and error rates, or perplexity, over the steps."""

import json
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

SUFFIXES = (".png", ".svg", ".pdf")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a run, in order; a last line that a kill cut short is left out.

    Raises:
        ValueError: A line is no record of a run; the message names the file and the line.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            int(record["step"])
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise ValueError(f"{path}, line {number}: must be a JSON object with `step`, but is {line!r}") from error
        records.append(record)
    return records


def draw(metrics: Path, target: Path) -> None:
    """Draw loss above and dev results below; the suffix of `target` (.png, .svg, .pdf) chooses the format.

    Raises:
        ValueError: There is nothing to draw, or no such format.
    """
    if target.suffix not in SUFFIXES:
        raise ValueError(f"a picture must end in {', '.join(SUFFIXES)}, but its name is {target}")
    records = read_metrics(metrics)
    losses = [(record["step"], record["loss"]) for record in records if "loss" in record]
    error_rates = [record for record in records if "dev_wer" in record]
    perplexities = [record for record in records if "dev_word_perplexity" in record]
    has_results = bool(error_rates or perplexities)
    if not losses and not has_results:
        raise ValueError(
            f"{metrics} must hold a loss, an error rate or a perplexity to draw, but holds {len(records)} records"
        )
    figure = Figure(figsize=(7, 5 if has_results else 2.8), layout="constrained")
    panels = figure.subplots(2 if has_results else 1, sharex=True, squeeze=False)[:, 0]
    panels[0].plot(*zip(*losses, strict=True) if losses else ([], []), color="tab:blue", linewidth=1)
    is_pretraining = any("accuracy" in record for record in records)
    per_item = "loss per hidden frame" if is_pretraining else "CTC loss per character"
    panels[0].set_ylabel("loss per token" if any("tokens_per_s" in record for record in records) else per_item)
    if error_rates:
        _draw_error_rates(panels[1], error_rates)
    elif perplexities:
        _draw_perplexities(panels[1], perplexities)
    panels[-1].set_xlabel("step")
    for panel in panels:
        panel.grid(alpha=0.3)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Equal records give an equal file: no date, no random identifiers.
    with rc_context({"svg.hashsalt": "carnelian"}):
        figure.savefig(target, dpi=150, metadata={"Date": None} if target.suffix == ".svg" else None)


def _draw_error_rates(panel: Axes, evaluations: list[dict[str, Any]]) -> None:
    for name, label, style in (("dev_wer", "WER", "tab:red"), ("dev_cer", "CER", "tab:orange")):
        points = [(record["step"], record[name]) for record in evaluations]
        panel.plot(*zip(*points, strict=True), color=style, marker=".", markersize=4, linewidth=1, label=label)
    best = min(evaluations, key=lambda record: float(record["dev_wer"]))
    panel.set_title(
        f"best WER {best['dev_wer']:.1%}, CER {best['dev_cer']:.1%} at step {best['step']}", fontsize="small"
    )
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panel.set_ylim(bottom=0)
    panel.set_ylabel("dev error rate")
    panel.legend()


def _draw_perplexities(panel: Axes, evaluations: list[dict[str, Any]]) -> None:
    points = [(record["step"], record["dev_word_perplexity"]) for record in evaluations]
    panel.plot(*zip(*points, strict=True), color="tab:red", marker=".", markersize=4, linewidth=1)
    step, best = min(points, key=lambda point: float(point[1]))
    panel.set_title(f"best perplexity per word {best:.1f} at step {step}", fontsize="small")
    panel.set_yscale("log")
    panel.set_ylabel("dev perplexity per word")
