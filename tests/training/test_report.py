import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import pty
import struct
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from carnelian_training.cli import main
from carnelian_training.data.manifest import Clip
from carnelian_training.evaluation.error_rates import Evaluation, render
from carnelian_training.loop import plot
from carnelian_training.loop.metrics import read_metrics
from carnelian_training.loop.plot import draw
from carnelian_training.loop.report import Report
from carnelian_training.loop.train import train
from carnelian_training.replacement import WriteError
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c


def events(folder: Path) -> Iterator[Event]:
    """What TensorBoard reads: records of length, its checksum, content, its checksum."""
    for path in sorted(folder.glob("events*")):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            assert int.from_bytes(data[8:12], "little") == masked_crc32c(data[:8])
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """The curves that TensorBoard shows of a run."""
    found: dict[str, dict[int, float]] = {}
    for event in events(folder):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


@pytest.fixture
def heard():
    clips = [Clip(Path("a.wav"), 2.0, "one two", {"source": "a"}), Clip(Path("b.wav"), 2.0, "three", {"source": "b"})]
    return Evaluation(clips, ["one too", "three"])


def log_three_steps(report: Report) -> None:
    for loss in (1.0, 2.0, 3.0):
        report.add(loss, {"utterances": 4, "audio_s": 20.0})
    report.log(3, 0, lr=0.01, grad_norm=0.5)


def test_a_run_leaves_metrics_tensorboard_and_a_picture(tiny_config, tmp_path):
    train(tiny_config, tmp_path)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records if "dev_wer" in r] == [3, 6]
    assert all(r["utterances_per_s"] > 0 and r["audio_s_per_s"] > 0 for r in records if "loss" in r)
    shown = scalars(tmp_path / "tensorboard")
    assert shown["loss"] == pytest.approx({r["step"]: r["loss"] for r in records if "loss" in r})
    assert shown["dev_wer"] == pytest.approx({r["step"]: r["dev_wer"] for r in records if "dev_wer" in r})
    assert (tmp_path / "tiny.png").read_bytes().startswith(b"\x89PNG")


def test_the_log_line_has_the_same_fields_in_the_same_order(tiny_config, tmp_path, heard, caplog):
    report = Report(tmp_path, tiny_config, 0)
    with caplog.at_level(logging.INFO):
        log_three_steps(report)
        report.evaluated(3, heard)
    fields = [field.partition("=")[0] for field in caplog.messages[0].split() if "=" in field]
    assert fields == ["step", "epoch", "loss", "lr", "grad_norm", "utterances_per_s", "audio_s_per_s"]
    assert "loss=2 " in caplog.messages[0]
    with caplog.at_level(logging.INFO):
        report.log(1_234_567, 0, lr=0.01, grad_norm=0.5)
    assert caplog.messages[-1].startswith("step=1234567 ")
    assert caplog.messages[1] == "step=3       dev_wer=33.33% dev_cer=8.33%"
    assert caplog.messages[2] == "reference: one two\n    heard: one too"


def test_a_log_without_room_is_named(tiny_config, room, tmp_path):
    report = Report(tmp_path, tiny_config, 0)
    log_three_steps(report)
    with room(50), pytest.raises(WriteError, match=r"metrics\.jsonl could not be written: File too large"):
        log_three_steps(report)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [3]
    Report(tmp_path, tiny_config, 3)  # goes on


def test_throughput_counts_the_steps_since_the_last_line(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    report = Report(tmp_path, tiny_config, 0)
    monkeypatch.setattr(time, "perf_counter", lambda: 10.0)
    log_three_steps(report)
    monkeypatch.setattr(time, "perf_counter", lambda: 40.0)
    log_three_steps(report)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(record["utterances_per_s"], record["audio_s_per_s"]) for record in records] == [(1.2, 6.0), (0.4, 2.0)]


def test_an_evaluation_takes_no_time_and_no_losses_from_the_line(tiny_config, tmp_path, heard, monkeypatch):
    report = Report(tmp_path, tiny_config, 0)
    report.add(1.0, {"utterances": 4})
    with report.paused():
        clock = time.perf_counter
        monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600)
        report.evaluated(1, heard)
    report.add(3.0, {"utterances": 4})
    report.log(2, 0)
    record = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert record["loss"] == 2.0
    assert record["utterances_per_s"] > 8 / 3600


def test_a_source_without_words_has_no_rate(tiny_config, tmp_path):
    clips = [Clip(Path("a.wav"), 2.0, "one two"), Clip(Path("b.wav"), 2.0, "", {"source": "noise"})]
    evaluation = Evaluation(clips, ["one two", "what ever"])
    assert Report(tmp_path, tiny_config, 0).evaluated(1, evaluation).keys() == {"step", "dev_wer", "dev_cer"}
    noise, everything = render(evaluation).splitlines()
    assert noise.endswith("0 words  WER       -  CER       -  2 words inserted")
    assert everything.endswith("WER 100.00%  CER 128.57%")


def test_without_a_space_among_the_labels_the_rate_is_that_of_characters(tiny_config, tmp_path):
    config = dataclasses.replace(tiny_config, labels=("你", "好"))
    evaluation = Evaluation([Clip(Path("a.wav"), 2.0, "你好", {"source": "a"})], ["你"])
    record = Report(tmp_path, config, 0).evaluated(1, evaluation)
    assert record == {"step": 1, "dev_cer": 0.5, "dev_cer/a": 0.5}


def test_any_name_of_a_source_has_a_curve(tiny_config, tmp_path, heard, caplog):
    clips = [dataclasses.replace(clip, extra={"source": "LibriSpeech (größer)"}) for clip in heard.clips]
    with caplog.at_level(logging.INFO):
        report = Report(tmp_path, tiny_config, 0)
        report.evaluated(3, dataclasses.replace(heard, clips=clips))
        report.close()
    assert "dev_wer/LibriSpeech__größer_" in scalars(tmp_path / "tensorboard")
    assert "dev_wer/LibriSpeech (größer)" in read_metrics(tmp_path / "metrics.jsonl")[0]
    assert "illegal" not in caplog.text


def test_a_terminal_gets_a_bar_and_no_log_lines(tiny_config, tmp_path, heard, monkeypatch, caplog):
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    with os.fdopen(controller, "rb", buffering=0) as screen, os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with caplog.at_level(logging.INFO):
            report = Report(tmp_path, tiny_config, 0)
            log_three_steps(report)
            report.evaluated(3, heard)
            report.bar.close()
        stderr.close()
        seen = b""
        with contextlib.suppress(OSError):  # that there is no terminal any more; until then it comes in pieces
            while piece := screen.read(65536):
                seen += piece
    assert b"3/6" in seen
    assert b"loss=2" in seen
    assert b"heard: one too" in seen
    assert not caplog.messages


def test_what_a_resumed_run_will_record_again_is_dropped(tiny_config, tmp_path):
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "lo')
    Report(tmp_path, tiny_config, 2)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("character", ["\u2028", "\u0085"])
def test_a_record_ends_at_its_line_feed_alone(tiny_config, tmp_path, heard, character):
    """A name of a source may hold what else ends a line of text; the run could not be resumed."""
    source = f"News{character}2019"
    clips = [dataclasses.replace(clip, extra={"source": source}) for clip in heard.clips]
    Report(tmp_path, tiny_config, 0).evaluated(3, dataclasses.replace(heard, clips=clips))
    Report(tmp_path, tiny_config, 3, 3)
    assert f"dev_wer/{source}" in read_metrics(tmp_path / "metrics.jsonl")[0]


def test_a_line_that_a_kill_cut_within_a_character_is_left_out(tmp_path):
    cut = '{"step": 2, "dev_wer/größer": 0.1}'.encode().partition(b"\xb6")[0]
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 1.0}\n' + cut)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_an_evaluation_that_comes_again_is_recorded_once(tiny_config, tmp_path, write_rows):
    lines = [
        {"step": 1, "loss": 1.0},
        {"step": 1, "dev_wer": 0.5},
        {"step": 2, "loss": 1.0},
        {"step": 2, "dev_wer": 0.4},
    ]
    write_rows(tmp_path / "metrics.jsonl", lines)
    Report(tmp_path, tiny_config, 2, 1)  # killed between the record and the checkpoint that knows of it
    assert read_metrics(tmp_path / "metrics.jsonl") == lines[:3]


def test_other_processes_write_nothing(tiny_config, tmp_path, heard):
    report = Report(tmp_path, tiny_config, 0, enabled=False)
    log_three_steps(report)
    assert not report.losses  # they would be kept for ever
    assert report.evaluated(3, heard)["dev_wer"] == pytest.approx(1 / 3, abs=1e-4)
    report.close()
    assert not list(tmp_path.iterdir())


def test_equal_records_give_an_equal_picture(tmp_path, call, write_rows):
    records = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}, {"step": 2, "dev_wer": 0.5, "dev_cer": 0.2}]
    metrics = write_rows(tmp_path / "metrics.jsonl", records)
    for name in ("a.svg", "b.svg"):
        assert call(main, "plot", metrics, tmp_path / name)[0] == 0
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()
    assert "best WER 50.0%, CER 20.0% at step 2" in (tmp_path / "a.svg").read_text()


def test_several_runs_are_named_by_their_folders_wherever_one_is(tmp_path, monkeypatch, write_rows):
    for place in ("runs", "runs/one", "runs/two"):
        (tmp_path / place).mkdir()
        write_rows(tmp_path / place / "metrics.jsonl", [{"step": step, "loss": 2.0} for step in (1, 2)])
    (tmp_path / "runs" / "best").symlink_to("two")
    monkeypatch.chdir(tmp_path / "runs" / "one")
    draw([Path(place, "metrics.jsonl") for place in (".", "../two", "../best", "..")], Path("curves.svg"))
    picture = Path("curves.svg").read_text()
    assert all(f"<!-- {name} -->" in picture for name in ("one", "two", "best", "runs"))


def test_the_picture_names_the_evaluation_that_training_kept(tmp_path, write_rows):
    def picture(*evaluations):
        records = [{"step": step, **record} for step, record in enumerate(evaluations)]
        write_rows(tmp_path / "metrics.jsonl", records)
        draw([tmp_path / "metrics.jsonl"], tmp_path / "curves.svg")
        return (tmp_path / "curves.svg").read_text()

    words = picture({"dev_wer": 1.0, "dev_cer": 0.9}, {"dev_wer": 1.0, "dev_cer": 0.2})
    assert "best WER 100.0%, CER 20.0% at step 1" in words
    characters = picture({"dev_cer": 0.9}, {"dev_cer": 0.2}, {"dev_cer": 0.3})
    assert "best CER 20.0% at step 1" in characters
    assert "WER" not in characters


def test_a_language_models_perplexity_is_not_that_of_codes(tmp_path, monkeypatch):
    def panels(**record):
        drawn = []
        monkeypatch.setattr(plot, "_draw_panel", lambda axes, panel, records: drawn.append(panel.title))
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **record}) + "\n")
        draw([tmp_path / "metrics.jsonl"], tmp_path / "curves.svg")
        return drawn[1:]

    assert panels(dev_perplexity=8.0, dev_word_perplexity=90.0, dev_bits_per_character=2.0) == [
        "dev perplexity per word"
    ]
    assert panels(dev_accuracy=0.5, dev_codes_used=20, dev_perplexity=8.0) == ["accuracy on hidden frames", "codes"]


def test_what_holds_no_curve_is_refused(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    for name in ("curves.txt", "curves"):
        with pytest.raises(ValueError, match=rf"must end in \.png, \.svg, \.pdf, but its name is .*{name}$"):
            draw([metrics], tmp_path / name)
    metrics.write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="must hold a loss"):
        draw([metrics], tmp_path / "x.png")
    metrics.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": "abc"}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: `loss` must be a number, but is 'abc' at step 2"):
        draw([metrics], tmp_path / "x.png")
    with pytest.raises(
        ValueError, match=r"must be `metrics\.jsonl` of a run, but: Is a directory: give .*metrics\.jsonl"
    ):
        draw([tmp_path], tmp_path / "x.png")
    with pytest.raises(
        ValueError, match=r"gone\.jsonl must be `metrics\.jsonl` of a run, but: No such file or directory$"
    ):
        draw([tmp_path / "gone.jsonl"], tmp_path / "x.png")


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        '{"step": Infinity}',
        '{"step": "3"}',
        r'{"step": 1, "dev_wer/\ud800": 0.1}',
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_what_is_no_record_is_named_by_its_line(tmp_path, line):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(
        ValueError, match=r"metrics\.jsonl, line 2: must be a JSON object with `step`, a whole number, but is "
    ):
        read_metrics(metrics)


def test_a_folder_in_the_place_of_metrics_has_none_inside(tiny_config, tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"metrics\.jsonl must be `metrics\.jsonl` of a run, but: Is a directory$"):
        Report(tmp_path, tiny_config, 0)


def test_runs_are_compared_in_one_picture_by_the_names_of_their_folders(tmp_path, write_rows):
    for run, wer in (("tuned", 0.5), ("scratch", 0.9)):
        (tmp_path / run).mkdir()
        records = [{"step": 1, "loss": 2.0}, {"step": 2, "dev_wer": wer, "dev_cer": wer / 2}]
        write_rows(tmp_path / run / "metrics.jsonl", records)
    draw([tmp_path / run / "metrics.jsonl" for run in ("tuned", "scratch")], tmp_path / "curves.svg")
    picture = (tmp_path / "curves.svg").read_text()
    for name in ("WER, tuned", "CER, tuned", "WER, scratch", "CER, scratch"):
        assert f"<!-- {name} -->" in picture


def test_a_pre_training_shows_accuracy_and_codes(tmp_path):
    # A run that was too short for a log line.
    record = {"step": 1, "dev_accuracy": 0.1, "dev_codes_used": 9.0, "dev_perplexity": 7.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    draw([tmp_path / "metrics.jsonl"], tmp_path / "curves.svg")
    picture = (tmp_path / "curves.svg").read_text()
    for words in ("loss per hidden frame", "accuracy on hidden frames", "perplexity, dev"):
        assert f"<!-- {words} -->" in picture


def test_no_dev_manifest_draws_the_loss_alone(tiny_config, changed, tmp_path):
    train(changed(tiny_config, data={"dev": None}), tmp_path)
    assert (tmp_path / "tiny.png").exists()


def test_curves_lose_what_a_resumed_run_will_record_again_and_nothing_before(tiny_config, tmp_path):
    Report(tmp_path, tiny_config, 2)
    starts = [event.step for event in events(tmp_path / "tensorboard") if event.HasField("session_log")]
    assert starts == [3]  # TensorBoard hides what there is of this step and of later ones


def test_a_run_goes_on_without_tensorboard_where_that_finds_no_room(tiny_config, room, tmp_path, heard, caplog):
    report = Report(tmp_path, tiny_config, 0)
    with room(100):
        report.tensorboard.add_scalars(1, dict.fromkeys("abcdefgh", 1.0))
    for _ in range(20):  # more events than any queue holds
        log_three_steps(report)
    report.evaluated(3, heard)
    report.close()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 21
    (said,) = [message for message in caplog.messages if "TensorBoard" in message]
    assert said.startswith("the run goes on without TensorBoard: ")
    assert said.endswith(" could not be written: [Errno 27] File too large")


@pytest.mark.parametrize("content", ["", '{"step": 1}\n', "no record\n"])
def test_a_run_that_cannot_be_drawn_ends_well(tiny_config, tmp_path, content, caplog):
    report = Report(tmp_path, tiny_config, 0)
    (tmp_path / "metrics.jsonl").write_text(content)
    report.close()
    assert "tiny.png was not drawn: " in caplog.text


def test_what_is_no_text_is_named(tmp_path, call):
    (tmp_path / "metrics.jsonl").write_bytes(b"\x89PNG\r\n")
    status, _, err = call(main, "plot", tmp_path / "metrics.jsonl", tmp_path / "a.svg")
    assert (status, f"{tmp_path / 'metrics.jsonl'}, line 1: must be a JSON object" in err) == (1, True)
