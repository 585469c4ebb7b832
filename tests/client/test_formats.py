import pytest
from carnelian_client import Transcript, Word
from carnelian_client._formats import render, split_cues


def spoken(text: str, start_s: float = 0.0, word_s: float = 0.5) -> tuple[Word, ...]:
    words = text.split()
    return tuple(Word(word, start_s + i * word_s, start_s + (i + 1) * word_s, 0.9) for i, word in enumerate(words))


def transcript(words: tuple[Word, ...]) -> Transcript:
    return Transcript(" ".join(word.word for word in words), words, 0.9, 1.0, "m", "1", "7", "greedy", (), {})


def test_a_pause_starts_a_new_cue():
    cues = list(split_cues(spoken("one two") + spoken("three", start_s=2.0)))
    assert [[word.word for word in cue] for cue in cues] == [["one", "two"], ["three"]]


def test_a_cue_is_short_enough_to_be_read():
    cues = list(split_cues(spoken("word " * 100, word_s=0.7)))
    assert all(cue[-1].end_s - cue[0].start_s <= 6.0 for cue in cues)


@pytest.mark.parametrize("text", ["abcdefgh " * 100, "a bc def extraordinarily " * 40])
def test_a_cue_has_at_most_two_lines_of_42(text):
    printed = render(transcript(spoken(text, word_s=0.1)), "srt", "a.wav")
    cues = [cue.split("\n")[2:] for cue in printed.strip().split("\n\n")]
    assert {len(cue) for cue in cues[:-1]} == {2}
    assert max(len(line) for cue in cues for line in cue) <= 42
    assert " ".join(line for cue in cues for line in cue) == text.strip()


def test_a_word_that_is_longer_than_a_line_has_one_of_its_own():
    long = "x" * 50
    printed = render(transcript(spoken(f"so {long} so", word_s=0.1)), "srt", "a.wav")
    assert [cue.split("\n")[2:] for cue in printed.strip().split("\n\n")] == [["so"], [long], ["so"]]


@pytest.mark.parametrize("letters_a_second", [4, 13])
def test_a_text_without_spaces_fills_cues(letters_a_second):
    text = Word("今天天气很好我们去公园" * 9, 1.0, 1.0 + 99 / letters_a_second, 0.9)
    printed = render(transcript((text,)), "srt", "a.wav")
    lines = [line for cue in printed.strip().split("\n\n") for line in cue.split("\n")[2:]]
    assert "".join(lines) == text.word
    assert max(map(len, lines)) <= 42
    cues = list(split_cues((text,)))
    assert all(cue[-1].end_s - cue[0].start_s <= 6.0 + 1e-9 for cue in cues)
    assert (cues[0][0].start_s, cues[-1][-1].end_s) == (1.0, pytest.approx(text.end_s))


def test_no_mark_is_cut_from_its_letter():
    words = [cue[0].word for cue in split_cues((Word("ที่น้ำ" * 10, 0.0, 20.0, 0.9),))]
    assert len(words) == 4
    assert not any(word.startswith(("ี", "่", "้", "ำ")) for word in words)
    assert "".join(words) == "ที่น้ำ" * 10


def test_a_mark_without_a_letter_is_not_lost():
    """A recogniser may hear one at the beginning of a word."""
    cues = split_cues((Word("\u0e35" + "ก" * 42, 0.0, 13.0, 0.9),))
    assert "".join(cue[0].word for cue in cues) == "\u0e35" + "ก" * 42


def test_a_part_that_would_have_no_letter_is_no_cue():
    """Its line would be empty, which ends a cue."""
    cues = [word for [word] in split_cues((Word("ที่" * 8, 0.0, 60.0, 0.9),))]
    assert [word.word for word in cues] == ["ที่"] * 8
    assert [(word.start_s, word.end_s) for word in cues] == [(7.5 * i, 7.5 * (i + 1)) for i in range(8)]


def test_a_word_that_is_drawn_out_is_not_cut():
    assert [[word.word for word in cue] for cue in split_cues(spoken("so", word_s=9.0))] == [["so"]]


def test_hours_and_milliseconds_are_written_out():
    words = spoken("soon", start_s=1.001) + spoken("late", start_s=3725.0625)
    text = render(transcript(words), "vtt", "a.wav")
    assert "00:00:01.001 --> 00:00:02.001" in text  # where 1.001 * 1000 is below 1001
    assert "01:02:05.062 --> 01:02:06.062" in text


def test_a_short_cue_stays_for_a_second_or_until_the_next_one():
    words = spoken("one", word_s=0.1) + spoken("two", start_s=0.95, word_s=0.1) + spoken("three", start_s=9, word_s=3)
    times = [line for line in render(transcript(words), "srt", "a.wav").splitlines() if "-->" in line]
    assert times == [
        "00:00:00,000 --> 00:00:00,950",
        "00:00:00,950 --> 00:00:01,950",
        "00:00:09,000 --> 00:00:12,000",
    ]


def test_webvtt_has_no_markup_of_the_words():
    assert render(transcript(spoken("R&B --> <b>")), "vtt", "a.wav").splitlines()[3] == "R&amp;B --&gt; &lt;b&gt;"
    assert render(transcript(spoken("R&B <b>")), "srt", "a.wav").splitlines()[2] == "R&B <b>"


def test_silence_is_no_cue():
    silence = transcript(())
    assert render(silence, "srt", "a.wav") == ""
    assert render(silence, "vtt", "a.wav") == "WEBVTT\n\n"
    assert render(silence, "ctm", "a.wav") == ""
    assert render(silence, "text", "a.wav") == "\n"


@pytest.mark.parametrize(
    "stem", ["plain", "a b", "a\tb", "a\nb", "a\u00a0b", "a\x1b\x9b", "a\u202e\U000e0041", ";;a", "", "-"]
)
def test_each_line_of_a_ctm_has_its_columns_and_is_no_comment(stem):
    printed = render(transcript(spoken("one two")), "ctm", f"folder/{stem}.wav")
    columns = [line.split() for line in printed.splitlines()]
    assert [row[1:] for row in columns] == [["1", "0.00", "0.50", "one", "0.90"], ["1", "0.50", "0.50", "two", "0.90"]]
    assert ";;" not in printed
    assert printed.replace("\n", "").isprintable()
