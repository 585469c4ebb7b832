import errno
import functools
import itertools
import logging
import math
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import soundfile
from carnelian_training.cli import main
from carnelian_training.data.manifest import Clip, read_manifest
from carnelian_training.synthesis import corpus, texts, voices
from carnelian_training.synthesis.sentences import LIMITS, read_sentences
from carnelian_training.synthesis.utterances import find_fault, make_clip, plan_utterances
from carnelian_training.text import to_labels

PROSE = """
CHAPTER I

It was a bright morning, and the whole village had come to the river. "Who is there?" asked the miller;
nobody answered him. Mr. Hill had bought 12 horses.

The U.S. senator slept.

He said café twice.

They went home before the rain began, for the road was long, the children were tired, and none of them had
thought of bringing anything to eat or to drink, although their mother had told them so again and again, and so
had the miller's wife, who knew the weather of that valley better than anybody.
"""

needs_espeak = pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
needs_flite = pytest.mark.skipif(shutil.which("flite") is None, reason="flite is not installed")


@pytest.fixture
def prose(tmp_path):
    path = tmp_path / "prose.txt"
    path.write_text(PROSE, encoding="utf-8")
    return str(path)


def synthesise(out, text, **options):
    """A corpus of everything in `text`: there is never an hour of it."""
    return corpus.synthesise(out, 1.0, voices=["espeak"], texts=[text], **options)


def names(out):
    return sorted(path.relative_to(out).as_posix() for path in out.rglob("*.*g*") if path.is_file())


# Sentences


def test_prose_becomes_sentences_without_headings(prose):
    [sentences] = read_sentences(texts.choose_sources([prose])).values()
    spoken = " ".join(sentence.spoken for sentence in sentences)
    assert "Who is there? asked the miller; nobody answered him. Mister Hill had bought twelve horses." in spoken
    for refused in ("CHAPTER", "U.S.", "café", '"'):
        assert refused not in spoken


def test_clips_have_readable_lengths(prose):
    [sentences] = read_sentences(texts.choose_sources([prose])).values()
    assert all(texts.MIN_CHARACTERS <= len(sentence.spoken) <= LIMITS[1] for sentence in sentences)
    assert any("better than anybody" in sentence.spoken for sentence in sentences)  # the long one was divided


def test_labels_are_those_of_what_is_spoken(prose):
    [sentences] = read_sentences(texts.choose_sources([prose])).values()
    assert [sentence.labels for sentence in sentences] == [to_labels(sentence.spoken) for sentence in sentences]
    assert sentences[1].labels == (
        "who is there asked the miller nobody answered him mister hill had bought twelve horses"
    )


def test_a_program_that_prints_no_text_is_named(monkeypatch):
    """Rscript says nothing, and ends with status 0, if it cannot write its temporary files."""
    monkeypatch.setattr(texts, "_run", functools.partial(texts._run, "true"))
    for read in (texts.read_austen, texts.read_bible):
        with pytest.raises(RuntimeError, match=r"true must print a text, but printed nothing .* TMPDIR"):
            list(read())


def test_a_sentence_occurs_once_across_texts(tmp_path, prose):
    copy = tmp_path / "copy.txt"
    copy.write_text("Nobody had seen the old man again.\nNobody had seen the old man again!\n", encoding="utf-8")
    found = read_sentences(texts.choose_sources([prose, str(copy)]))
    assert [sentence.labels for sentence in found["copy"]] == ["nobody had seen the old man again"]
    with pytest.raises(ValueError, match="that no other text has"):
        read_sentences([*texts.choose_sources([prose]), replace(texts.choose_sources([prose])[0], name="again")])


def test_files_of_one_name_are_both_read(tmp_path):
    paths = [tmp_path / folder / "book.txt" for folder in ("a", "b")]
    for path, text in zip(paths, ("Nobody had seen the old man.", "Somebody had met the young woman."), strict=True):
        path.parent.mkdir()
        path.write_text(text + "\n", encoding="utf-8")
    found = read_sentences(texts.choose_sources(list(map(str, paths))))
    assert [sentence.labels.split()[0] for sentence in found["book"]] == ["nobody", "somebody"]


def test_a_text_that_is_no_file_is_named():
    with pytest.raises(ValueError, match=r"'missing\.txt', which is neither"):
        texts.choose_sources(["missing.txt"])


@pytest.mark.parametrize("name", texts.SOURCES)
def test_packaged_texts_give_prose(name):
    source = texts.SOURCES[name]
    if (hint := source.install_hint()) is not None:
        pytest.skip(f"not installed: {hint}")
    [sentences] = read_sentences([source]).values()
    assert len(sentences) > 20_000
    labels = {sentence.labels for sentence in sentences}
    assert len(labels) == len(sentences)
    assert not any("<" in sentence.spoken or "strong:" in sentence.spoken for sentence in sentences)


def test_sense_and_sensibility_is_left_out():
    if (hint := texts.SOURCES["austen"].install_hint()) is not None:
        pytest.skip(f"not installed: {hint}")
    text = " ".join(texts.read_austen())
    assert "Netherfield" in text
    assert "Willoughby" not in text
    assert "Barton Cottage" not in text


# The plan


def plan(prose, seed=1):
    chosen = [voices.VOICES[0], voices.VOICES[-1]]
    return list(plan_utterances(texts.choose_sources([prose]), chosen, seed))


def test_the_seed_decides_the_plan(prose):
    assert plan(prose) == plan(prose)
    assert [u.path for u in plan(prose)] == [u.path for u in plan(prose)]
    assert plan(prose) != plan(prose, seed=2)


def test_the_plan_says_every_sentence_once(prose):
    [sentences] = read_sentences(texts.choose_sources([prose])).values()
    assert sorted(u.sentence.labels for u in plan(prose)) == sorted(sentence.labels for sentence in sentences)


def test_a_file_name_depends_on_all_that_is_asked(prose):
    utterance = plan(prose)[0]
    others = [replace(utterance, **change) for change in ({"speed": 0.5}, {"pitch": 0.5}, {"seed": 0})]
    assert len({u.path for u in [utterance, *others]}) == 4


def test_the_files_of_a_corpus_of_before_are_found_again(prose):
    assert plan(prose)[0].path.name == "000000_hibari_1f7a1202.ogg"


def test_speeds_and_pitches_are_within_the_range_of_the_voice(prose):
    for utterance in plan(prose):
        voice = utterance.voice
        assert utterance.speaker in voice.speakers
        assert voice.speed[0] <= utterance.speed <= voice.speed[1]
        assert voice.pitch[0] <= utterance.pitch <= voice.pitch[1]


def test_any_part_of_the_plan_has_the_mix_of_the_whole():
    source = texts.Source(
        name="numbers",
        share=1,
        read=lambda: (f"This is sentence number {number}." for number in range(6000)),
        install_hint=lambda: None,
    )
    utterances = plan_utterances([source], voices.VOICES, 1)
    shares = sum(voice.share for voice in voices.VOICES)
    for _ in range(3):
        part = list(itertools.islice(utterances, 2000))
        for voice in voices.VOICES:
            percent = 100 * sum(utterance.voice == voice for utterance in part) / len(part)
            # Four standard deviations of a count of 2000 draws at the largest share.
            assert percent == pytest.approx(100 * voice.share / shares, abs=4.5)


def test_formant_speech_is_rare():
    shares = {voice.name: voice.share for voice in voices.VOICES}
    assert shares["espeak"] <= 0.05 * sum(shares.values())


def test_speech_that_cannot_be_the_sentence_is_found_out():
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 3 * 16000).astype(np.float32)
    labels = "a sentence of three seconds at a common pace"
    assert find_fault(noise, labels) is None
    assert "silent" in find_fault(noise * 0, labels)
    assert "silent" in find_fault(noise * np.float32("nan"), labels)
    assert "outside" in find_fault(noise[:1000], labels)
    assert "letters per second" in find_fault(noise, labels * 10)


# The corpus


@needs_espeak
def test_a_corpus_does_not_depend_on_the_number_of_workers(tmp_path, prose):
    one = synthesise(tmp_path / "one", prose, workers=1)
    two = synthesise(tmp_path / "two", prose, workers=2)
    assert names(tmp_path / "one") == names(tmp_path / "two")
    assert [clip.text for clip in one] == [clip.text for clip in two]
    assert [clip.extra for clip in one] == [clip.extra for clip in two]


@needs_espeak
def test_the_manifest_holds_what_was_made(tmp_path, prose):
    clips = synthesise(tmp_path / "corpus", prose, workers=1)
    assert clips
    assert read_manifest(tmp_path / "corpus" / "manifest.jsonl") == clips
    for clip in clips:
        sound = soundfile.info(clip.audio_filepath)
        assert (sound.samplerate, sound.channels, sound.format) == (16000, 1, "OGG")
        assert sound.duration == pytest.approx(clip.duration, abs=0.001)
        assert clip.extra["voice"] == "espeak"
        assert clip.extra["source"] == "prose"
        assert clip.extra["speaker"].startswith("espeak-en")


@needs_espeak
def test_going_on_makes_only_what_is_missing(tmp_path, prose):
    out = tmp_path / "corpus"
    clips = synthesise(out, prose, workers=1)
    written = {clip.audio_filepath: clip.audio_filepath.stat().st_mtime_ns for clip in clips}
    lost = [clips[0].audio_filepath, clips[-1].audio_filepath]
    for path in lost:
        path.unlink()
    (out / "manifest.jsonl").unlink()
    assert synthesise(out, prose, workers=1) == clips
    changed = [path for path, time_ns in written.items() if path.stat().st_mtime_ns != time_ns]
    assert sorted(changed) == sorted(lost)


@needs_espeak
def test_more_hours_append(tmp_path, prose):
    out = tmp_path / "corpus"
    short = corpus.synthesise(out, 3 / 3600, voices=["espeak"], texts=[prose], workers=1)
    longer = synthesise(out, prose, workers=1)
    assert 0 < len(short) < len(longer)
    assert longer[: len(short)] == short


@needs_espeak
def test_a_manifest_loses_no_clips(tmp_path, prose):
    """Fewer hours, or other voices, left the clips of before unlisted, and said nothing."""
    out = tmp_path / "corpus"
    clips = synthesise(out, prose, workers=1)
    fewer = {"hours": 3 / 3600, "voices": ["espeak"], "texts": [prose]}
    for change in (fewer, fewer | {"hours": 1.0, "voices": ["espeak:en-us*"]}, fewer | {"hours": 1.0, "seed": 2}):
        message = (
            rf"would lose \d of {len(clips)} clips, such as .*clips/.*ogg: ask for at least 0\.0\d hours of the same"
        )
        with pytest.raises(ValueError, match=message):
            corpus.synthesise(out, **change)
    assert read_manifest(out / "manifest.jsonl") == clips
    length_h = sum(clip.duration for clip in clips) / 3600
    assert corpus.synthesise(out, math.ceil(length_h * 100) / 100, voices=["espeak"], texts=[prose]) == clips


@needs_espeak
def test_a_text_that_is_too_short_is_said(tmp_path, prose, caplog):
    with caplog.at_level(logging.WARNING):
        synthesise(tmp_path / "corpus", prose, workers=1)
    assert "the texts are used up" in caplog.text


@needs_espeak
def test_going_on_never_shortens_the_manifest(tmp_path, prose, monkeypatch):
    sizes, write = [], corpus.write_manifest

    def seen(path, clips):
        sizes.append(len(clips))
        write(path, clips)

    monkeypatch.setattr(corpus, "MANIFEST_PERIOD_S", -1)
    monkeypatch.setattr(corpus, "write_manifest", seen)
    count = len(synthesise(tmp_path / "corpus", prose, workers=1))
    assert sizes == [*range(1, count + 1), count]
    sizes.clear()
    synthesise(tmp_path / "corpus", prose, workers=1)
    assert sizes == [count]


def test_a_voice_that_cannot_speak_ends_the_run(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"They had seen {number} old men again.\n" for number in range(12)))
    flite = tmp_path / "bin" / "flite"
    flite.parent.mkdir()
    flite.write_text("#!/bin/sh\nexit 3\n")
    flite.chmod(0o755)
    monkeypatch.setenv("PATH", f"{flite.parent}:{os.environ['PATH']}")
    message = "flite-slt must say its sentences, but 10 in a row failed, the last with .* exit status 3.*; mend it"
    with pytest.raises(RuntimeError, match=message):
        corpus.synthesise(tmp_path / "corpus", 1.0, voices=["flite-slt"], texts=[str(text)], workers=1)


def test_what_is_left_out_is_summed_up_by_voice(tmp_path, prose, monkeypatch, caplog):
    def make_clips(utterances, out, workers):
        for i, utterance in enumerate(utterances):
            yield utterance, "silent" if i % 2 else Clip(out / utterance.path, 1.0, "a", {"voice": "espeak"})

    monkeypatch.setattr(corpus, "_make_clips", make_clips)
    monkeypatch.setattr(corpus, "choose_voices", lambda _: [voices.VOICES[-3]])
    clips = corpus.synthesise(tmp_path / "corpus", 1.0, texts=[prose])
    total = len(plan(prose))
    assert len(clips) == (total + 1) // 2
    assert f"espeak: {total // 2} of {total} clips left out" in caplog.text


def test_a_full_disk_is_no_sentence_to_leave_out(tmp_path, prose, monkeypatch):
    def fail_with(number):
        def fail(*_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("carnelian_training.synthesis.utterances.render", fail)
        return make_clip(plan(prose)[0], tmp_path)

    assert fail_with(errno.EPIPE) == "BrokenPipeError: [Errno 32] Broken pipe"
    with pytest.raises(OSError, match="No space left"):
        fail_with(errno.ENOSPC)


@pytest.mark.parametrize("change", [{"hours": 0.0}, {"hours": math.nan}, {"workers": 0}])
def test_a_setting_out_of_range_is_named(tmp_path, change):
    [name] = change
    with pytest.raises(ValueError, match=f"`{name}`"):
        corpus.synthesise(tmp_path, **({"hours": 1.0} | change))


# The command


@needs_flite
def test_the_command_makes_a_corpus(tmp_path, prose, call):
    options = ["--hours", 2 / 3600, "--voices", "flite-kal16", "--text", prose, "--workers", 1]
    status, out, err = call(main, "synthesise", tmp_path / "corpus", *options)
    assert status == 0, err
    clips = read_manifest(tmp_path / "corpus" / "manifest.jsonl")
    assert f"{len(clips)} clips" in out


def test_a_voice_that_there_is_not_is_status_1(tmp_path, call):
    status, _, err = call(main, "synthesise", tmp_path, "--hours", 1, "--voices", "nobody")
    assert status == 1
    assert "a voice must be one of" in err


def test_another_seed_says_the_sentences_in_another_order(prose):
    first, again, other = ([u.sentence.labels for u in plan(prose, seed)] for seed in (1, 1, 2))
    assert first == again != other
