"""Which evaluation of a recogniser is the best: for the weights that training keeps, and for the picture of a run."""

from collections.abc import Mapping

TIE = 1e-6
"""Less than a difference of WER in `metrics.jsonl`, 1e-4, for any CER below 100."""


def error_of(record: Mapping[str, float]) -> float:
    """What the best has least of: WER and, where that is equal, CER. Records of a run without words have CER alone."""
    cer = record["dev_cer"]
    return record["dev_wer"] + TIE * cer if "dev_wer" in record else cer
