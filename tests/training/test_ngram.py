import dataclasses
import gzip
import json
import os
import random
import subprocess
import unicodedata

import kenlm
import pytest
from carnelian_training.cli import main
from carnelian_training.ctc.language_model import LanguageModel, LanguageModelError, read_ngrams
from carnelian_training.data.manifest import Clip, write_manifest
from carnelian_training.language_models import ngram
from carnelian_training.language_models.ngram import find_tool
from carnelian_training.language_models.perplexity import score_words_by_ngrams
from carnelian_training.language_models.sentences import divide, read_text
from carnelian_training.synthesis.texts import SOURCES, choose_sources, read_text_file
from carnelian_training.text import LABEL_CHARACTERS

try:
    find_tool("lmplz")
    HAS_KENLM = True
except FileNotFoundError:
    HAS_KENLM = False
needs_kenlm = pytest.mark.skipif(not HAS_KENLM, reason="KenLM's programs are not installed: make kenlm")

NOUNS, VERBS = ["cat", "dog", "king", "queen", "ship", "harbour", "3rd", "letter"], ["saw", "heard", "met", "followed"]


@pytest.fixture
def text(tmp_path):
    rng = random.Random(0)
    sentences = [
        f"Mr. Smith's {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(NOUNS)}, number {number}."
        for number in range(2, 2000)
    ]
    path = tmp_path / "text.txt"
    path.write_text("\n".join([*sentences, "The naïve æsthete said çà."]))
    return path


@pytest.fixture
def build(call):
    """Runs `carnelian-train ngram`."""
    return lambda text, target, *options: call(main, "ngram", target, "--text", text, *options)


@needs_kenlm
def test_text_becomes_a_binary_language_model_in_the_labels(text, tmp_path, build):
    status, out, err = build(text, tmp_path / "lm.klm")
    assert status == 0, err
    report = json.loads((tmp_path / "lm.json").read_text())
    assert report["refused"] == 1
    assert "left out: 1 that cannot be written in the labels" in out
    assert f"perplexity {report['perplexity']:g} on {report['held_out_sentences']} others" in out
    assert 2 < report["perplexity"] < 100
    assert report["bytes"] == (tmp_path / "lm.klm").stat().st_size
    LanguageModel(tmp_path / "lm.klm", list(LABEL_CHARACTERS))  # no other characters in it
    model = kenlm.Model(str(tmp_path / "lm.klm"))
    assert model.score("mister smith's cat saw the third") > model.score("third the saw cat smith's mister") + 2


@needs_kenlm
def test_a_binary_without_its_words_names_the_flag_that_left_them_out(arpa, tmp_path):
    binary = tmp_path / "lm.bin"
    subprocess.run([find_tool("build_binary"), "-v", "trie", arpa, binary], check=True, capture_output=True)
    with pytest.raises(LanguageModelError, match="run build_binary without -v"):
        LanguageModel(binary, list(LABEL_CHARACTERS))


@needs_kenlm
@pytest.mark.parametrize("unknown", [True, False], ids=["with <unk>", "without"])
@pytest.mark.parametrize("form", ["probing", "trie", "-q 8 trie", "-a 22 trie"])
def test_a_binary_of_any_form_has_its_words(arpa, tmp_path, form, unknown):
    """A probing model counts <unk> only if its ARPA file had it."""
    if not unknown:
        arpa.write_text(arpa.read_text().replace("ngram 1=5", "ngram 1=4").replace("-2.0\t<unk>\t0\n", ""))
    binary = tmp_path / "lm.bin"
    subprocess.run([find_tool("build_binary"), *form.split(), arpa, binary], check=True, capture_output=True)
    assert sorted(read_ngrams(binary)[1]) == ["a", "ab"]
    os.truncate(binary, binary.stat().st_size - 1)
    with pytest.raises(LanguageModelError, match="is cut short"):
        read_ngrams(binary)


def test_an_unfinished_binary_is_not_said_to_lack_its_words(tmp_path):
    (tmp_path / "lm.bin").write_bytes(b"mmap lm http://kheafield.com/code incomplete\n" + b"\xcd\xcc\x8c\xbf" * 250)
    with pytest.raises(LanguageModelError, match="This binary file did not finish building"):
        read_ngrams(tmp_path / "lm.bin")


@needs_kenlm
def test_a_disk_without_room_costs_no_model_that_is_there(text, mount_tmpfs, build):
    path = mount_tmpfs("size=8k") / "lm.klm"
    path.write_text("old")
    status, _, err = build(text, path)
    assert status == 1
    assert f"{path} could not be written, and is as it was before: build_binary was ended by SIGBUS" in err
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


@needs_kenlm
def test_a_model_that_cannot_be_rated_is_not_put_in_place_of_another(text, tmp_path, build, monkeypatch):
    """It lay beside the report of the old one."""
    query = tmp_path / "query"
    query.write_text("#!/bin/sh\ncat > /dev/null\necho no >&2\nexit 3\n")
    query.chmod(0o755)
    find = ngram.find_tool
    monkeypatch.setattr(ngram, "find_tool", lambda name: str(query) if name == "query" else find(name))
    (tmp_path / "lm.klm").write_text("old")
    status, _, err = build(text, tmp_path / "lm.klm")
    assert (status, "query failed: no" in err) == (1, True), err
    assert (tmp_path / "lm.klm").read_text() == "old"


@needs_kenlm
def test_a_vocabulary_has_a_size(text, tmp_path, build):
    assert build(text, tmp_path / "lm.klm", "--vocabulary", "12", "--order", "2")[0] == 0
    assert json.loads((tmp_path / "lm.json").read_text())["vocabulary"] == 12
    model = kenlm.Model(str(tmp_path / "lm.klm"))
    assert model.order == 2
    assert "the" in model
    assert "eleven" not in model


@needs_kenlm
def test_words_that_are_pruned_are_not_counted(text, tmp_path, build):
    assert build(text, tmp_path / "lm.klm", "--prune", "150")[0] == 0
    vocabulary = read_ngrams(tmp_path / "lm.klm")[1]
    assert "the" in vocabulary
    assert "eleven" not in vocabulary
    assert json.loads((tmp_path / "lm.json").read_text())["vocabulary"] == len(vocabulary)


@needs_kenlm
def test_sentences_of_a_test_set_are_left_out(text, tmp_path, build):
    sentences = [sentence for sentence in read_text(choose_sources([str(text)])) if sentence]
    said = sentences[:50]
    write_manifest(tmp_path / "dev.jsonl", [Clip(tmp_path / "a.wav", 1.0, sentence.upper() + "!") for sentence in said])
    assert build(text, tmp_path / "lm.klm", "--exclude", tmp_path / "dev.jsonl")[0] == 0
    report = json.loads((tmp_path / "lm.json").read_text())
    # Those that share six words in a row share the six before their numbers.
    openings = [sentence.partition(" number ")[0] for sentence in sentences]
    excluded = sum(opening in openings[:50] for opening in openings)
    assert report["excluded"] == excluded
    assert (report["texts"], report["exclude"]) == ([text.stem], [str(tmp_path / "dev.jsonl")])
    assert report["sentences"] + report["held_out_sentences"] == len(sentences) - excluded > 1000


def test_text_of_another_language_than_the_labels_is_warned_of(tmp_path, caplog):
    (tmp_path / "text.txt").write_text("Die Tür ist zu.\nSchöne Grüße!\nDas Haus.")
    assert divide(choose_sources([str(tmp_path / "text.txt")]), labels=LABEL_CHARACTERS + "äöüß").refused == 0
    assert not caplog.messages
    assert divide(choose_sources([str(tmp_path / "text.txt")])).refused == 2
    assert '2 of 3 cannot be written in the labels, " abcdefghijklmnopqrstuvwxyz\'"' in caplog.text


def test_brackets_of_packaged_texts_are_read_out_and_tags_are_not(tmp_path):
    (tmp_path / "text.txt").write_text("I said (smiling) yes.\nHe had [noise] none.")
    source = dataclasses.replace(SOURCES["austen"], read=lambda: read_text_file(tmp_path / "text.txt"))
    assert list(read_text([source])) == ["i said smiling yes", "he had noise none"]
    assert list(read_text(choose_sources([str(tmp_path / "text.txt")]))) == [None, None]


def test_a_transcript_of_few_words_is_left_out_too(tmp_path):
    (tmp_path / "text.txt").write_text("Go forward ten meters.\nHello world how are you?\nGo forward ten meters more.")
    said = ["go forward ten meters", "hello world how are you"]
    write_manifest(tmp_path / "dev.jsonl", [Clip(tmp_path / "a.wav", 1.0, text) for text in said])
    sentences = divide(choose_sources([str(tmp_path / "text.txt")]), [tmp_path / "dev.jsonl"])
    assert [*sentences.used, *sentences.held_out] == ["go forward ten meters more"]
    assert sentences.excluded == 2


@needs_kenlm
def test_words_that_are_not_divided_are_warned_of(tmp_path, build):
    sentences = {"".join(random.Random(seed).choices("abcde", k=12)) for seed in range(300)}
    (tmp_path / "text.txt").write_text("\n".join(sorted(sentences)))
    status, out, err = build(tmp_path / "text.txt", tmp_path / "lm.klm", "--prune", "0,0,0")
    assert status == 0, err
    assert "100.00% of their words unknown" in out
    assert "of the held-out words should be known, but 100 % are unknown" in err


@needs_kenlm
def test_other_languages_are_written_in_the_recognisers_labels(tmp_path, build):
    labels = LABEL_CHARACTERS + "äöüß"
    sentences = [f"Der {noun} hört das {other}." for noun in ("König", "Bär", "Löwe") for other in ("Pferd", "Mädchen")]
    (tmp_path / "text.txt").write_text(" ".join([*sentences, "Über 80 Gäste kamen."]))
    write_manifest(tmp_path / "train.jsonl", [Clip(tmp_path / "a.wav", 1.0, "übung macht den meister")])
    write_manifest(tmp_path / "dev.jsonl", [Clip(tmp_path / "b.wav", 1.0, "und der löwe hört das pferd nicht")])
    more = ["--text", tmp_path / "train.jsonl", "--exclude", tmp_path / "dev.jsonl", "--labels", labels]
    status, out, err = build(tmp_path / "text.txt", tmp_path / "lm.klm", *more)
    assert status == 0, err
    assert "left out: 1 that cannot be written in the labels, 0 of --exclude" in out
    model = kenlm.Model(str(tmp_path / "lm.klm"))
    assert all(word in model for word in ("bär", "mädchen", "übung", "meister"))
    assert all(word not in model for word in ("über", "duration"))
    LanguageModel(tmp_path / "lm.klm", list(labels))
    assert f'"labels": "{labels}"' in (tmp_path / "lm.json").read_text(encoding="utf-8")  # readable, not escaped


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("यह एक किताब है। लड़का स्कूल गया। क्या आप पढ़ते हैं?", ["यह एक किताब है", "लड़का स्कूल गया", "क्या आप पढ़ते हैं"]),
        ("这是书。男孩去了学校！“你读书吗？”是", ["这是书", "男孩去了学校", "你读书吗", "是"]),
        ("هذا كتاب. هل تحب القراءة؟ عمره 12 سنة. نعم", ["هذا كتاب", "هل تحب القراءة", None, "نعم"]),
        (
            "Hola. ¿Qué tal? ¡Muy bien! «Sí.» Dijo el Sr. de la casa.",
            ["hola", "qué tal", "muy bien", "sí", "dijo el sr de la casa"],
        ),
        ("„Er kam.“ Sie ging am 3. oder 4. heim. „Gut!“", ["er kam", None, "gut"]),
        ("‹Wer ist da?› Er ging… ‚Oh!‘ Ende", ["wer ist da", "er ging", "oh", "ende"]),
        ("She said ‘no.’ He left. ‘Oh?’", ["she said no", "he left", "oh"]),
        (
            "Ես գնացի։ Նա եկավ։\nՈւր է նա։\n\nՆա տանն է։ Ես\nտեսա նրան։",
            ["ես գնացի", "նա եկավ", "ուր է նա", "նա տանն է", "ես տեսա նրան"],
        ),
        ("Τι κάνεις; Πού είναι\u037e Καλά; ναι.", ["τι κάνεις", "πού είναι", "καλά ναι"]),
        (unicodedata.normalize("NFD", "Δεν μπορώ; Πού είναι;"), ["δεν μπορώ", "πού είναι"]),
        ("እኔ ሄድኩ። እሱ መጣ።\n\nእሷ ሄደች።", ["እኔ ሄድኩ", "እሱ መጣ", "እሷ ሄደች"]),
    ],
    ids=["hi", "zh", "ar", "es", "de", "de-single", "en-single", "hy", "el", "el-nfd", "am"],
)
def test_sentences_end_where_their_language_ends_them(tmp_path, text, sentences):
    (tmp_path / "text.txt").write_text(text)
    labels = "".join({" ", *"".join(filter(None, sentences))})
    assert list(read_text(choose_sources([str(tmp_path / "text.txt")]), labels)) == sentences


def test_an_empty_line_at_the_end_does_not_join_sentences(tmp_path):
    (tmp_path / "text.txt").write_text("yes sir\nno sir\n\n")
    assert list(read_text(choose_sources([str(tmp_path / "text.txt")]), " einorsy")) == ["yes sir", "no sir"]


@pytest.mark.parametrize("documents", [2, 30, 300])
def test_empty_lines_between_documents_join_no_sentences(tmp_path, documents):
    sentences = [f"{first}{second} sir" for first in "abcdefghijklmnopqrstuvwxyz" for second in "aeiouy" * 4]
    length = len(sentences) // documents
    blocks = ["\n".join(sentences[start : start + length]) for start in range(0, len(sentences), length)]
    (tmp_path / "text.txt").write_text("\n\n".join(blocks))
    assert len([*read_text_file(tmp_path / "text.txt")]) >= len(sentences)


def test_an_empty_line_joins_no_long_document_that_ends_in_a_mark(tmp_path):
    (tmp_path / "text.txt").write_text("yes sir\n" * 30 + "no sir.\n\n" + "maybe sir\n" * 30)
    assert list(read_text(choose_sources([str(tmp_path / "text.txt")]))) == ["yes sir", "no sir", "maybe sir"]


@pytest.mark.parametrize(
    "paragraphs",
    [
        [
            "CHAPTER I",
            "The road was long,\nand the night was\ndark.",
            '"Who is there?"\nasked the _miller._',
            "(He slept.)",
        ],
        ["Tyger Tyger, burning bright,\nIn the forests of the night;\nWhat immortal hand or eye,\nCould frame it?"] * 5,
        ["这是\n书。", "男孩去了\n学校！”"],
        ["»Wer ist da?«\nfragte er.", "Er ging nach\n„Hause.“"],
    ],
    ids=["prose", "verse", "zh", "de"],
)
@pytest.mark.parametrize("between", ["\n\n", "\n\n\n\n\n", "\n \n"], ids=["one", "four", "space"])
def test_wrapped_lines_are_joined_to_paragraphs(tmp_path, paragraphs, between):
    (tmp_path / "text.txt").write_text(between.join(paragraphs))
    assert list(read_text_file(tmp_path / "text.txt")) == paragraphs


@pytest.mark.parametrize("line_end", ["\r\n", "\r"])
def test_any_line_ends_divide_lines(tmp_path, line_end):
    text = "The road was long,\nand dark.\n\nHe slept.\n\nNobody\ncame."
    (tmp_path / "text.txt").write_bytes(text.replace("\n", line_end).encode())
    assert list(read_text_file(tmp_path / "text.txt")) == text.split("\n\n")


def test_a_byte_order_mark_takes_no_sentence(tmp_path):
    (tmp_path / "text.txt").write_text("\ufeffyes sir\nno sir\n", encoding="utf-8")
    assert list(read_text(choose_sources([str(tmp_path / "text.txt")]))) == ["yes sir", "no sir"]


@needs_kenlm
def test_the_perplexity_is_of_every_sentence_that_was_kept_out(tmp_path, build):
    text = tmp_path / "text.txt"
    text.write_text("the cat saw a king\na king met the queen\nthe queen met a dog\na dog saw the cat\n")
    assert build(text, tmp_path / "lm.klm")[0] == 0
    rated = score_words_by_ngrams(tmp_path / "lm.klm", divide(choose_sources([str(text)])).held_out)
    report = json.loads((tmp_path / "lm.json").read_text())
    assert report["perplexity"] == pytest.approx(rated.perplexity(), abs=0.006)  # as the report is rounded
    assert report["held_out_sentences"] == 1


@pytest.mark.parametrize("prune", ["abc", "", "0,2,1", "-1"])
def test_thresholds_that_cannot_be_are_wrong_use(text, tmp_path, build, prune):
    status, _, err = build(text, tmp_path / "lm.klm", "--prune", prune)
    assert status == 2
    assert "counts that never fall" in " ".join(err.split())


def test_thresholds_of_longer_words_than_there_are_are_wrong_use(text, tmp_path, build):
    status, _, err = build(text, tmp_path / "lm.klm", "--order", "3", "--prune", "0,0,1,2,3")
    assert (status, "one count for each of --order 3" in " ".join(err.split())) == (2, True)


@pytest.mark.parametrize("name", ["lm.json", "lm.arpa", "lm"])
def test_no_two_models_have_a_report_of_one_name(text, tmp_path, build, name):
    status, _, err = build(text, tmp_path / name)
    assert (status, "name it lm.klm" in " ".join(err.replace("│", " ").split())) == (2, True)


def test_labels_without_a_space_have_no_words(text, tmp_path, build):
    status, _, err = build(text, tmp_path / "lm.klm", "--labels", "你好")
    assert (status, "one label must be the space" in " ".join(err.split())) == (2, True)


@needs_kenlm
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must hold sentences that can be used, but hold none"),
        ("naïve".encode(), "1 cannot be written in the labels"),
        (b"one sentence", "beside the one that is kept out"),
        (b"\xff\xfe", "text.txt must be text"),
        (gzip.compress(b"one sentence", mtime=0), "text.txt must be text in UTF-8, but is packed; unpack it: gzip -d"),
    ],
)
def test_what_holds_no_sentences_says_so(tmp_path, build, content, message):
    (tmp_path / "text.txt").write_bytes(content)
    status, _, err = build(tmp_path / "text.txt", tmp_path / "lm.klm")
    assert status == 1
    assert message in err


def test_without_kenlm_it_says_how_to_get_it(text, tmp_path, build, monkeypatch):
    monkeypatch.setattr("carnelian_training.language_models.ngram.sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, err = build(text, tmp_path / "lm.klm")
    assert status == 1
    assert "run `make kenlm` in a clone of Carnelian" in err


@pytest.mark.parametrize("command", ["weigh am.pt clips.jsonl --out", "ngram", "perplexity lm.klm --out"])
def test_what_cannot_be_written_is_refused_before_the_work(command, tmp_path, call):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "lm"):
        status, _, err = call(main, *command.split(), path)
        assert (status, "this must be a file" in err) == (2, True), err
