"""The error by which evaluations of a recogniser are compared, for the best weights and for the plot of a run."""

from collections.abc import Mapping

TIE = 1e-6
"""The weight of CER in :func:`error_of`: with CER below 100, less than the 1e-4 to which `metrics.jsonl` rounds WER."""


def error_of(record: Mapping[str, float]) -> float:
    """Return the error to compare evaluations by: WER, with CER to break ties, or CER alone if there is no WER."""
    cer = record["dev_cer"]
    return record["dev_wer"] + TIE * cer if "dev_wer" in record else cer
