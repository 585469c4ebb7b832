"""The log of a run: a progress bar on a terminal, otherwise log lines; and metrics, TensorBoard and a plot.

The loop passes what it measures. The report writes to the run's folder: `metrics.jsonl` (one record per log line and
evaluation), `tensorboard/` (the same as scalars, with sample transcripts) and, at the end, `<name>.png`.
"""

import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from carnelian_training.config import Config
from carnelian_training.evaluation.error_rates import ErrorRates, Evaluation
from carnelian_training.loop.metrics import METRICS, drop_after
from carnelian_training.loop.plot import draw
from carnelian_training.loop.tensorboard import TensorBoard
from carnelian_training.replacement import written
from carnelian_training.run_config import RunConfig

logger = logging.getLogger(__name__)

SAMPLES = 2  # transcripts shown at each evaluation


class Report:
    """The log and metrics of a run; of several processes, only the first has a report that is `enabled`.

    Args:
        directory: the run's folder.
        config: the run's configuration.
        step: the step that the run continues from. Records of later steps, which an interrupted run left, are
            dropped, because the run will take those steps again.
        evaluated_step: the step of the last evaluation, by default `step`. Records of later evaluations are dropped,
            because the run will repeat them.
        enabled: False makes every method do nothing.
    """

    def __init__(
        self, directory: Path, config: RunConfig, step: int, evaluated_step: int | None = None, *, enabled: bool = True
    ) -> None:
        self.directory = directory
        self.config = config
        self.enabled = enabled
        self.bar: tqdm[Any] | None = None
        self._restart()
        if not enabled:
            return
        drop_after(directory / METRICS, step, step if evaluated_step is None else evaluated_step)
        self.tensorboard = TensorBoard(directory / "tensorboard", step)
        if sys.stderr.isatty():
            self.bar = tqdm(total=config.loop.steps, initial=step, unit="step", dynamic_ncols=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside the context, for example of an evaluation, out of the rates per second."""
        began = time.perf_counter()
        yield
        self.started += time.perf_counter() - began

    def _restart(self) -> None:
        self.losses: list[float] = []
        self.amounts: dict[str, float] = {}
        self.started = time.perf_counter()

    def add(self, loss: float, amounts: Mapping[str, float]) -> None:
        """Add the loss and the amounts of data of one step; a loss that is not finite is left out of the mean."""
        if not self.enabled:
            return
        self.losses += [loss] if math.isfinite(loss) else []
        for unit, amount in amounts.items():
            self.amounts[unit] = self.amounts.get(unit, 0) + amount
        if self.bar is not None:
            self.bar.update()

    def log(self, step: int, epoch: int, **measured: float) -> None:
        """Record the mean loss and the rates per second since the last log line.

        Epochs count from 0. `measured` are further fields, the same in each call and in the same order.
        """
        if not self.enabled:
            return
        seconds = time.perf_counter() - self.started
        rates = {f"{unit}_per_s": round(amount / seconds, 2) for unit, amount in self.amounts.items()}
        record = {
            "step": step,
            "epoch": epoch,
            "loss": round(sum(self.losses) / len(self.losses), 4) if self.losses else math.inf,
            **measured,
            **rates,
        }
        if self.bar is not None:
            self.bar.set_postfix({"loss": record["loss"], **rates})
        else:
            # Integers are counts, which are shown in full.
            fields = [f"{key}={value:<{'8' if isinstance(value, int) else '8.5g'}}" for key, value in record.items()]
            logger.info(" ".join(fields))
        self._record(record)
        self._restart()

    def evaluated(self, step: int, evaluation: Evaluation) -> dict[str, Any]:
        """Record the error rates of an evaluation, show a few transcripts and return the record.

        The record has a rate for each source of clips, unless its references have no words.
        """
        shares = self._shares(evaluation.error_rates())
        record = {"step": step, **{name: round(share, 4) for name, share in shares.items()}}
        first = next(iter(shares))
        for source in evaluation.sources():
            rates = evaluation.error_rates(source)
            if rates.words:
                record[f"{first}/{source}"] = round(self._shares(rates)[first], 4)
        if not self.enabled:
            return record
        self._say(" ".join([f"step={step:<7d}", *(f"{name}={share:.2%}" for name, share in shares.items())]))
        samples = list(zip(evaluation.clips, evaluation.transcripts, strict=True))[:SAMPLES]
        for clip, transcript in samples:
            self._say(f"reference: {clip.text}\n    heard: {transcript}")
        # Indented lines are preformatted text in Markdown.
        text = "\n\n".join(f"    {clip.text}\n    {transcript}" for clip, transcript in samples)
        self.tensorboard.add_text(step, "transcripts", text)
        self._record(record)
        return record

    def record(self, step: int, found: dict[str, Any]) -> dict[str, Any]:
        """Record the figures of an evaluation without transcripts, and return the record."""
        record = {"step": step, **found}
        if self.enabled:
            self._say(" ".join(f"{key}={value:<8.5g}" for key, value in record.items()))
            self._record(record)
        return record

    def close(self) -> None:
        """Draw the run's plot; a plot that fails is only logged, because the run itself has succeeded."""
        if not self.enabled:
            return
        if self.bar is not None:
            self.bar.close()
        if (self.directory / METRICS).exists():
            target = self.directory / f"{self.config.name}.png"
            try:
                draw([self.directory / METRICS], target)
            except Exception as error:  # errors of matplotlib too
                logger.warning("%s was not drawn: %s", target, error)
            else:
                logger.info("wrote %s", target)

    def _shares(self, rates: ErrorRates) -> dict[str, float]:
        """Return WER and CER; only CER if the labels have no space, since a whole sentence would be one word."""
        assert isinstance(self.config, Config)
        return ({"dev_wer": rates.wer} if " " in self.config.labels else {}) | {"dev_cer": rates.cer}

    def _say(self, line: str) -> None:
        if self.bar is not None:
            self.bar.write(line, file=sys.stderr)
        else:
            logger.info("%s", line)

    def _record(self, record: dict[str, Any]) -> None:
        record = {name: value for name, value in record.items() if math.isfinite(value)}  # JSON lacks infinity and NaN
        metrics = self.directory / METRICS
        with written(metrics), metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self.tensorboard.add_scalars(record.pop("step"), record)
