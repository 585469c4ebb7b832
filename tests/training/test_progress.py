import io
import logging
import sys
import time

import pytest
from carnelian_training.progress import clip_progress


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())


def test_a_log_says_about_each_minute_how_many_clips_are_done(monkeypatch, caplog):
    clock = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    caplog.set_level(logging.INFO)
    with clip_progress(300, "dev.jsonl") as progress:
        for _ in range(30):
            clock += 10
            progress(10)
    assert caplog.messages == [f"dev.jsonl: {done} of 300 clips" for done in (60, 120, 180, 240, 300)]


def test_other_processes_say_nothing(monkeypatch, caplog):
    clock = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    caplog.set_level(logging.INFO)
    with clip_progress(3, is_shown=False) as progress:
        for _ in range(3):
            clock += 1000
            progress(1)
    assert not caplog.messages


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stderr", [None, closed()], ids=["none", "closed"])
def test_without_standard_error_there_is_no_bar(monkeypatch, stderr):
    monkeypatch.setattr(sys, "stderr", stderr)
    with clip_progress(1) as progress:
        progress(1)
