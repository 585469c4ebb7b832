"""Check answers: send perf_analyzer's requests once more, and compare each transcript with that of the clip alone."""

from collections.abc import Sequence
from typing import Any

import jiwer
import numpy as np

from carnelian_perf.cuts import Cut
from carnelian_perf.load import Inputs, ask, file_inputs, pcm_inputs
from carnelian_perf.sweeps.grid import Cell, CellError


def rounding_cer(precision: str, accelerator: str) -> float:
    """Return the most that rounding may change a transcript of random weights, as a character error rate.

    In fp16, and in any precision on a GPU (`none` is no accelerator), batches of other sizes are rounded otherwise, and
    random weights decide few labels clearly. Transcripts of other clips differ in more.
    """
    return 0.1 if precision != "fp32" or accelerator != "none" else 0.0


def transcribe_file(client: Any, model: str, cut: Cut) -> str:
    """Send a clip's file to `<model>`.

    Raises:
        LoadError: The server answered with an error.
    """
    (text,) = _infer(client, model, file_inputs(cut.file), "a clip")
    return text


def transcribe_batch(client: Any, model: str, cuts: Sequence[Cut]) -> list[str]:
    """Send clips of one length to `<model>_pcm`, in one request.

    Raises:
        LoadError: The server answered with an error.
    """
    signals = np.stack([cut.samples for cut in cuts])
    return _infer(client, f"{model}_pcm", pcm_inputs(signals), f"a batch of {len(cuts)}")


def check_answers(client: Any, cell: Cell, cuts: Sequence[Cut], expected: Sequence[str], most_cer: float) -> None:
    """Send each different request of perf_analyzer in a cell once, and compare the transcripts.

    Args:
        client: A `tritonclient.grpc.InferenceServerClient`.
        cell: The model, the kind of input and the batch.
        cuts: The clips.
        expected: Transcript of each clip alone: other clips in the batch must not change it.
        most_cer: Share of its characters in which a transcript may differ from that.

    Raises:
        CellError: A transcript is not the expected one.
        LoadError: The server answered with an error.
    """
    if cell.input == "file":
        batches = [[index] for index in range(len(cuts))]
        answers = [[transcribe_file(client, cell.model, cut)] for cut in cuts]
    else:
        # perf_analyzer's request number n begins at clip n * batch, and begins again after the last clip.
        starts = sorted({number * cell.batch % len(cuts) for number in range(len(cuts))})
        batches = [[(start + place) % len(cuts) for place in range(cell.batch)] for start in starts]
        answers = [transcribe_batch(client, cell.model, [cuts[index] for index in batch]) for batch in batches]
    for batch, texts in zip(batches, answers, strict=True):
        for index, text in zip(batch, texts, strict=True):
            if text != expected[index] and (not most_cer or jiwer.cer(expected[index], text) > most_cer):
                raise CellError(
                    f"clip {index} must be transcribed as alone, {expected[index]!r}"
                    f"{f', but for {most_cer:.0%} of its characters' if most_cer else ''}, but in a batch of "
                    f"{cell.batch} to {cell.served_model} it is {text!r}"
                )


def _infer(client: Any, model: str, inputs: Inputs, of_what: str) -> list[str]:
    result, _ = ask(client, model, inputs, ("TRANSCRIPT",), of_what)
    return [text.decode() for text in result.as_numpy("TRANSCRIPT")[:, 0]]
