"""The plot of one or more runs: loss and evaluations over the steps, from `metrics.jsonl`."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from carnelian_training.config_errors import shown
from carnelian_training.loop.metrics import error_of, read_metrics
from carnelian_training.replacement import replaced

SUFFIXES = (".png", ".svg", ".pdf")
STYLES = ("-", "--")


@dataclass(frozen=True)
class Panel:
    """One panel of the plot."""

    title: str
    curves: Mapping[str, str]
    """The fields of records to draw, each with its label in the legend."""
    sign: str
    """The field whose presence in a record makes the panel appear. Another field of the panel may mean something else
    in other runs."""
    is_share: bool = False
    scale: str = "linear"


PANELS = (
    Panel("dev error rate", {"dev_wer": "WER", "dev_cer": "CER"}, "dev_cer", is_share=True),
    Panel("dev perplexity per word", {"dev_word_perplexity": ""}, "dev_word_perplexity", scale="log"),
    Panel("accuracy on hidden frames", {"dev_accuracy": "dev"}, "dev_accuracy", is_share=True),
    Panel("codes", {"dev_codes_used": "used, dev", "dev_perplexity": "perplexity, dev"}, "dev_codes_used"),
)
"""The panels below the loss, in order; each is drawn if its `sign` occurs in a record."""


def draw(runs: Sequence[Path], target: Path) -> None:
    """Draw the loss of runs, with their evaluations below it; the legend names several runs by their folders.

    The suffix of `target`, one of `SUFFIXES`, chooses the format.

    Raises:
        ValueError: A run has nothing to draw, a figure is no number, or the suffix is not one of `SUFFIXES`.
    """
    if target.suffix not in SUFFIXES:
        raise ValueError(f"a picture must end in {', '.join(SUFFIXES)}, but its name is {target}")
    records = {path: read_metrics(path) for path in runs}
    drawn = {"loss", *(name for panel in PANELS for name in panel.curves)}
    for path, found in records.items():
        for record, name in itertools.product(found, sorted(drawn)):
            if not isinstance(figure := record.get(name, 0), int | float):
                raise ValueError(f"{path}: `{name}` must be a number, but is {shown(figure)} at step {record['step']}")
        if not any(drawn & record.keys() for record in found):
            raise ValueError(f"{path} must hold a loss or an evaluation to draw, but holds {len(found)} records")
    names = {name for found in records.values() for record in found for name in record}
    below = [panel for panel in PANELS if panel.sign in names]
    width_in = 7 if len(runs) == 1 else 9.5  # several runs have their legends beside the panels, not over the curves
    figure = Figure(figsize=(width_in, 2.8 + 2.2 * len(below)), layout="constrained")
    panels = figure.subplots(1 + len(below), sharex=True, squeeze=False)[:, 0]
    per_item = "loss per hidden frame" if names & {"accuracy", "dev_accuracy"} else "CTC loss per character"
    loss = Panel("loss per token" if "tokens_per_s" in names else per_item, {"loss": ""}, "loss")
    for axes, panel in zip(panels, [loss, *below], strict=True):
        _draw_panel(axes, panel, records)
    if len(runs) == 1 and below:
        panels[1].set_title(_best(records[runs[0]]), fontsize="small")
    panels[-1].set_xlabel("step")
    # The same records must give the same file, so it gets no date and no random identifiers.
    with rc_context({"svg.hashsalt": "carnelian"}), replaced(target) as partial:
        figure.savefig(partial, dpi=150, metadata={"Date": None} if target.suffix == ".svg" else None)


def _best(records: list[dict[str, Any]]) -> str:
    """Describe the best evaluation of a run in words; empty for pre-training, whose curve shows it."""
    if evaluations := [record for record in records if "dev_cer" in record]:
        best = min(evaluations, key=error_of)
        wer = f"WER {best['dev_wer']:.1%}, " if "dev_wer" in best else ""
        return f"best {wer}CER {best['dev_cer']:.1%} at step {best['step']}"
    if evaluations := [record for record in records if "dev_word_perplexity" in record]:
        best = min(evaluations, key=lambda record: float(record["dev_word_perplexity"]))
        return f"best perplexity per word {best['dev_word_perplexity']:.1f} at step {best['step']}"
    return ""


def _draw_panel(axes: Axes, panel: Panel, records: Mapping[Path, list[dict[str, Any]]]) -> None:
    """Draw a panel. Colour tells runs apart and line style the fields; with one run, colour tells the fields apart."""
    for i, (path, found) in enumerate(records.items()):
        for j, (name, label) in enumerate(panel.curves.items()):
            points = [(record["step"], record[name]) for record in found if name in record]
            if not points:
                continue
            folder = Path(os.path.abspath(path)).parent.name  # noqa: PTH100  (a link keeps its name)
            words = [label, folder if len(records) > 1 else ""]
            axes.plot(
                *zip(*points, strict=True),
                color=f"C{i if len(records) > 1 else j}",
                linestyle="-" if len(records) == 1 else STYLES[j],
                marker="" if name == "loss" else ".",
                markersize=4,
                linewidth=1,
                label=", ".join(filter(None, words)),
            )
    axes.set_ylabel(panel.title)
    axes.set_yscale(panel.scale)
    axes.grid(alpha=0.3)
    if panel.is_share:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if any(axes.get_legend_handles_labels()[1]):
        if len(records) == 1:
            axes.legend()
        else:
            axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, fontsize="small")
