from typing import Any

from carnelian_perf.clips import WavClip
from carnelian_perf.traffic.open_loop import drive_open


class Silent:
    """A client whose server answers without a transcript."""

    def async_infer(self, *_: Any, callback: Any, **__: Any) -> None:
        callback(self, None)

    def as_numpy(self, name: str) -> None:
        return None


def test_an_answer_that_cannot_be_read_is_an_error_and_not_waited_for():
    outcome = drive_open(Silent(), "model", [WavClip(wav=b"RIFF", duration_s=1.0, frames=1)], [0, 0], [0.0, 0.0])
    assert not outcome.answers
    assert len(outcome.errors) == 2
    assert outcome.errors[0].startswith("clip 0: AttributeError(")
