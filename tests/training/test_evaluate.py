import dataclasses
import json
import os
import re
import string
import subprocess
import sys
from pathlib import Path

import jiwer
import numpy as np
import pytest
import soundfile
import torch
from carnelian_training import checkpoint, ctc
from carnelian_training.config import config_from_dict
from carnelian_training.data.manifest import Clip, read_manifest, warn_of_characters, write_manifest
from carnelian_training.evaluation import served
from carnelian_training.evaluation.comparison import Measured, Row, compare, render_comparison
from carnelian_training.evaluation.error_rates import Evaluation, count_errors, render, render_mistakes
from carnelian_training.evaluation.evaluate import evaluate
from carnelian_training.precision import allow_tf32, full_precision

ROOT = Path(__file__).parents[2]
CLIPS = ROOT / "demo" / "clips" / "manifest.jsonl"
DEPLOYED = ROOT / "model_repository" / "quartznet_demo_ctc" / "1"
DEMO = ROOT / "demo" / "quartznet_demo.pt"


@pytest.fixture
def heard():
    texts = [("one two three", "one too three"), ("one two", "two"), ("four", "four five"), ("six", "six"), ("", "oh")]
    clips = [Clip(Path(f"{i}.wav"), 1.0, said) for i, (said, _) in enumerate(texts)]
    return Evaluation(clips, [transcript for _, transcript in texts])


def test_evaluation_does_not_depend_on_the_batch_size(tiny_config, changed):
    torch.manual_seed(1)
    model = checkpoint.build_model(tiny_config)
    results = []
    for batch_s in (1, 9, 1000):
        results.append(evaluate(model, changed(tiny_config, data={"batch_s": batch_s}), CLIPS))
    assert results[0].transcripts == results[1].transcripts == results[2].transcripts
    assert any(results[0].transcripts)
    assert results[0].error_rates() == results[1].error_rates() == results[2].error_rates()
    assert results[0].error_rates().clips == 6


def test_a_gpu_evaluates_in_float32_in_a_run_of_less(tiny_config):
    def found():
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    seen, network = [], checkpoint.build_model(tiny_config)
    network.register_forward_hook(lambda *_: seen.append(found()))
    with full_precision():  # which gives the process its own settings back
        allow_tf32("bf16")
        evaluate(network, tiny_config, CLIPS)
        assert found() == ("high", True)
    assert set(seen) == {("highest", False)}


def test_each_layer_is_in_its_mode_again_after_an_evaluation(tiny_config):
    seen, network = set(), checkpoint.build_model(tiny_config).train()
    network.register_forward_hook(lambda *_: seen.add(network.training))
    network.blocks[0].eval()  # frozen, say
    before = [layer.training for layer in network.modules()]
    evaluate(network, tiny_config, CLIPS)
    assert seen == {False}
    assert [layer.training for layer in network.modules()] == before


def test_a_batch_holds_what_a_laptop_can_however_large_steps_are(tiny_config, changed, monkeypatch):
    config = changed(tiny_config, data={"batch_s": 14400})
    clips = [Clip(Path(f"{i}.wav"), 10.0, "a") for i in range(200)]
    planned = []
    monkeypatch.setattr("carnelian_training.evaluation.evaluate.clips_to_evaluate", lambda manifest: clips)
    monkeypatch.setattr(
        "carnelian_training.evaluation.evaluate.load", lambda batches, *_, **__: planned.extend(batches) or iter(())
    )
    with pytest.raises(ValueError, match="shorter"):  # nothing is heard
        evaluate(checkpoint.build_model(config), config, CLIPS)
    assert max(map(len, planned)) == 60


def test_two_processes_hear_every_clip_once(tmp_path, run_evaluate, second_process):
    alone = run_evaluate(DEMO, CLIPS, "--out", tmp_path / "one.jsonl")
    arguments = (DEMO, CLIPS, "--out", tmp_path / "two.jsonl")
    with second_process("-m", "carnelian_training.cli", "evaluate", *arguments) as second:
        assert run_evaluate(*arguments)[:2] == alone[:2]
        assert second.communicate(timeout=60)[0] == ""
        assert second.returncode == alone[0] == 0
    assert (tmp_path / "two.jsonl").read_text() == (tmp_path / "one.jsonl").read_text()


@pytest.mark.parametrize("arguments", [("--table", DEMO, CLIPS), ("--url", "localhost:1", CLIPS)])
def test_what_processes_do_not_share_runs_in_one(run_evaluate, monkeypatch, arguments):
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, printed, err = run_evaluate(*arguments)
    assert (status, printed) == (2, "")
    assert "must run in one process, not in 2" in " ".join(err.replace("│", " ").split())


def test_mistakes_are_aligned_and_counted(heard):
    rates = heard.error_rates()
    assert (rates.words, rates.substitutions, rates.deletions, rates.insertions) == (7, 1, 1, 2)
    assert rates.wer == pytest.approx(4 / 7)
    assert rates.cer == pytest.approx((1 + 4 + 5 + 2) / 27)
    mistakes = heard.mistakes(2)
    assert mistakes.substitutions == [(("two", "too"), 1)]
    assert mistakes.deletions == [("one", 1)]
    assert mistakes.insertions == [("five", 1), ("oh", 1)]
    assert [(wer, clip.text) for wer, clip, _ in mistakes.worst] == [(float("inf"), ""), (1.0, "four")]
    table = render_mistakes(heard, 3).splitlines()
    assert table[:3] == ["substitutions 1, deletions 1, insertions 2", "     1  two -> too", "     1  one -> (nothing)"]
    assert "  heard      four five" in table


@pytest.mark.parametrize(("transcript", "errors"), [("a c b d", 2), ("a c", 1), ("a", 1), ("a\tb", 0)])
def test_word_errors_are_insertions_substitutions_and_deletions(transcript, errors):
    assert count_errors("a b", transcript) == errors


def test_mistakes_are_of_characters_where_there_are_no_words():
    clips = [Clip(Path("a.wav"), 1.0, "你好吗"), Clip(Path("b.wav"), 1.0, "好")]
    lines = render_mistakes(Evaluation(clips, ["你号吗啊", "好"], has_spaces=False), 3).splitlines()
    assert lines[:4] == [
        "substitutions 1, deletions 0, insertions 1",
        "     1  好 -> 号",
        "     1  (nothing) -> 啊",
        "",
    ]
    assert lines[4:] == ["CER 67%  a.wav", "  reference  你好吗", "  heard      你号吗啊"]


def test_the_table_has_no_rate_where_nothing_was_said():
    row = Row("noise", "greedy", 2, 0, Measured(None, None, 0.01, 0.001))
    assert render_comparison([row]).splitlines()[-1] == "| noise | greedy | 2 | 0 | - | - | 0.01 | 0.001 |"
    silence = Evaluation([Clip(Path("a.wav"), 1.0, " ")], ["oh my"]).error_rates()
    assert np.isnan([silence.wer, silence.cer]).all()
    assert (silence.words, silence.insertions) == (0, 2)


def test_white_space_is_no_error(caplog):
    clips = [Clip(Path("a.wav"), 1.0, " go\tso  far\u00a0on\n"), Clip(Path("b.wav"), 1.0, "ten")]
    evaluation = Evaluation(clips, ["go so far on", "ten"])
    rates = evaluation.error_rates()
    assert (rates.wer, rates.cer, rates.words) == (0, 0, 5)
    mistakes = evaluation.mistakes(9)
    assert not mistakes.substitutions
    assert not mistakes.worst
    warn_of_characters(clips, [*string.ascii_lowercase, " "])
    assert not caplog.messages


def test_no_words_at_all_cannot_be_evaluated(tiny_config, tmp_path):
    (tmp_path / "silent.jsonl").write_text('{"audio_filepath": "a.wav", "duration": 1.0, "text": ""}\n')
    with pytest.raises(ValueError, match="at least one word"):
        evaluate(checkpoint.build_model(tiny_config), tiny_config, tmp_path / "silent.jsonl")


def test_the_time_of_fewer_rows_is_not_taken_for_that_of_all(monkeypatch):
    class Behind(served.DecodingClock):
        def __init__(self):
            self._stage, self._started = "quartznet_demo_ctc", (0, 0)

        def _read(self):
            return 3, 5_000_000

    monkeypatch.setattr(served, "COUNTED_WITHIN_S", 0.0)
    assert Behind().elapsed_s(3) == 0.005
    with pytest.raises(RuntimeError, match="must have counted 10 rows of quartznet_demo_ctc, but has 3"):
        Behind().elapsed_s(10)


def test_wrong_number_of_paths(run_evaluate):
    assert run_evaluate(CLIPS)[0] == 2
    assert run_evaluate("--url", "localhost:1", DEMO, CLIPS)[0] == 2


def test_weights_without_a_language_model_are_refused(run_evaluate):
    weights = ("--lm-weights", DEMO.parent / "lm_weights.json")
    for words in ((CLIPS,), ("--table", CLIPS)):
        status, _, err = run_evaluate(DEMO, *words, *weights)
        assert (status, "must come with the language models" in err) == (1, True)


def test_a_language_model_that_nothing_asks_is_wrong_use(run_evaluate):
    assert run_evaluate(DEMO, CLIPS, "--lm", DEPLOYED / "english.klm")[0] == 2
    assert run_evaluate(DEMO, CLIPS, "--neural-lm", DEPLOYED / "english.onnx", "--decoder", "beam")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", ""], "--url must be host:port, but is empty"),
        (["--url", "localhost:8001", "--model", ""], "--model must be the name of a served model, but is empty"),
        (["--decoder", "greedy", "--option", "decoder=beam"], "decoder is given as 'beam' and 'greedy'"),
        (["--option", "beam_width=5", "--option", "beam_width=7"], "beam_width is given as '5' and '7'"),
        (["--model", "jasper"], "--model must come with --url"),
        (["--option", "beam_width=abc"], "beam_width must be a whole number"),
        (["--option", "nosuch=1"], "an option must be one of"),
    ],
)
def test_an_option_that_is_wrong_or_would_be_dropped_is_wrong_use(run_evaluate, arguments, message):
    status, _, err = run_evaluate(DEMO, CLIPS, *arguments)
    assert status == 2
    assert message in err


def test_a_clip_too_short_for_a_frame_is_named_and_counts_as_nothing_heard(tmp_path):
    model = {"name": "wav2vec2", "conv_channels": [8, 8], "conv_kernels": [10, 8], "conv_strides": [8, 8]}
    model |= {"width": 8, "layers": 1, "heads": 2, "feed_forward": 16, "position_kernel": 8, "position_groups": 2}
    config = config_from_dict({"name": "tiny", "model": model}, "here")
    clips = []
    for name, samples in (("short", 65), ("long", 16_000)):
        soundfile.write(tmp_path / f"{name}.wav", np.random.default_rng(0).uniform(-0.1, 0.1, samples), 16_000)
        clips.append(Clip(tmp_path / f"{name}.wav", samples / 16_000, "a"))
    write_manifest(tmp_path / "dev.jsonl", clips)
    found = evaluate(checkpoint.build_model(config), config, tmp_path / "dev.jsonl")
    assert found.failures == {0: "too short: the network makes no frame of 0.0040625 s"}
    assert found.transcripts[0] == ""


def test_what_is_written_can_be_read_as_a_manifest(heard, tmp_path):
    heard.write(tmp_path / "heard.jsonl")
    clips = read_manifest(tmp_path / "heard.jsonl")
    assert [clip.extra["pred_text"] for clip in clips] == list(heard.transcripts)
    assert [clip.audio_filepath for clip in clips] == [clip.audio_filepath.absolute() for clip in heard.clips]


def test_segments_stay_segments_in_what_is_written(tmp_path):
    clip = Clip(tmp_path / "sounds" / "long.wav", 1.0, "one", offset=2.5)
    Evaluation([clip], ["one"], {0: "refused"}).write(tmp_path / "heard.jsonl")
    (found,) = read_manifest(tmp_path / "heard.jsonl")
    assert found == clip
    assert found.extra == {"pred_text": "one", "error": "refused"}
    assert '"sounds/long.wav"' in (tmp_path / "heard.jsonl").read_text()


def test_sources_may_be_numbers_or_missing(tmp_path):
    texts = [("one", 1), ("two", None), ("three", "1")]
    clips = [Clip(Path("a.wav"), 1.0, text, {"source": source}) for text, source in texts]
    evaluation = Evaluation(clips, ["one", "two", "four"])
    assert evaluation.sources() == ["1"]
    assert evaluation.error_rates("1").clips == 2


def test_each_clip_is_aligned_once_for_all_sources_and_mistakes(monkeypatch):
    align, aligned = jiwer.process_words, []
    monkeypatch.setattr(jiwer, "process_words", lambda *texts: (aligned.extend(texts[0]), align(*texts))[1])
    clips = [Clip(Path("a.wav"), 1.0, f"clip {i}", {"source": i // 2}) for i in range(20)]
    evaluation = Evaluation(clips, [clip.text for clip in clips])
    assert len(render(evaluation).splitlines()) == 11
    render_mistakes(evaluation, 3)
    assert aligned == [clip.text for clip in clips]


def test_columns_stay_in_line_beside_letters_of_any_width():
    sources = ["Rundfunk", "日本放送", "Z\u0075\u0308rich"]
    clips = [Clip(Path("a.wav"), 1.0, "ja", {"source": source}) for source in sources]
    lines = render(Evaluation(clips, ["ja"] * 3)).splitlines()
    assert [line.index("1 clips") for line in lines[:3]] == [38, 38 - 4, 38 + 1]
    assert all(map(str.startswith, lines, [*sources, "all"]))


def test_a_terminal_that_cannot_spell_a_word_costs_no_result(tmp_path):
    line = {"audio_filepath": str(CLIPS.parent / "letter.wav"), "duration": 3.6, "text": "п'ять", "source": "Київ"}
    (tmp_path / "m.jsonl").write_text(json.dumps(line))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "carnelian_training.cli",
            "evaluate",
            DEMO,
            tmp_path / "m.jsonl",
            "--mistakes",
            "1",
            "--out",
            tmp_path / "o",
        ],
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert rb"\u041a\u0438\u0457\u0432" in done.stdout
    assert (tmp_path / "o").exists()


def test_an_empty_source_is_not_taken_for_all(tmp_path, run_evaluate, write_rows, read_rows):
    lines = [
        line | {"source": "", "audio_filepath": str(CLIPS.parent / line["audio_filepath"])} for line in read_rows(CLIPS)
    ]
    write_rows(tmp_path / "m.jsonl", lines)
    assert [row.split()[0] for row in run_evaluate(DEMO, tmp_path / "m.jsonl")[1].splitlines()] == ["''", "all"]
    config, network = checkpoint.load_model(DEMO)
    rows = list(compare(network, config, [tmp_path / "m.jsonl"], ctc.Decoder(config.labels, 0.02), ctc.Options()))
    assert [row.test_set for row in rows[:: len(rows) // 2]] == ["''", str(tmp_path / "m.jsonl")]


def test_another_toolkits_checkpoint_is_evaluated_as_it_is(run_evaluate):
    status, printed, _ = run_evaluate(Path(__file__).parent / "references" / "quartznet.nemo", CLIPS)
    assert status == 0
    assert "6 clips" in printed


def test_cer_stands_alone_for_labels_without_a_space(tmp_path, run_evaluate, tiny_config):
    config = dataclasses.replace(tiny_config, labels=("a", "b"))
    checkpoint.save(tmp_path / "a.pt", config, checkpoint.build_model(config).state_dict(), results={})
    status, printed, _ = run_evaluate(tmp_path / "a.pt", CLIPS, "--mistakes", 1)
    assert status == 0
    assert re.search(r"CER.*\nsubstitutions .*\nCER ", printed, re.DOTALL)
    assert "WER" not in printed


def test_references_that_no_label_can_write_are_warned_of(tmp_path, run_evaluate, write_rows):
    line = {"audio_filepath": str(CLIPS.parent / "letter.wav"), "duration": 3.6}
    lines = [line | {"text": text} for text in ("Two Words", "two words")]
    write_rows(tmp_path / "m.jsonl", lines)
    status, _, err = run_evaluate(DEMO, tmp_path / "m.jsonl")
    assert status == 0
    assert "1 of 2 references hold characters outside the labels, which count as errors: 'TW'" in err


def test_references_say_what_would_mend_them(caplog):
    clips = [Clip(Path("a.wav"), 1.0, "scho\u0308n."), Clip(Path("b.wav"), 1.0, "gut")]
    warn_of_characters(clips, [*" cghnostuö"])
    assert caplog.messages == [
        r"1 of 2 references hold characters outside the labels, which count as errors: '.\u0308'"
        "; `to_given_labels` can write 1 of them"
    ]
