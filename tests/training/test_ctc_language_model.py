"""Language models of words beside a network: which files load, and what they say of a text."""

import gzip
import itertools
import math
import os
import resource
import struct
import sys
import tracemalloc
from pathlib import Path

import kenlm
import numpy as np
import pytest
from carnelian_training.ctc import Decoder, MissingPackage, Options
from carnelian_training.ctc.language_model import LanguageModel, LanguageModelError, match_case, read_ngrams

LABELS = [" ", "a", "b"]
NGRAMS = Path(__file__).parents[2] / "model_repository" / "quartznet_demo_ctc" / "1" / "english.klm"


@pytest.mark.parametrize(
    ("labels", "vocabulary", "message"),
    [
        (LABELS, ["a", "naïve", "c3"], r"'3' in 'c3', 'c' in 'c3', .*'ï' in 'naïve'"),
        (LABELS, ["a", "AB"], r"'A' in 'AB', 'B' in 'AB'"),
        (LABELS, ["a", "a\u0308b"], r"hold '\\u0308' in 'a\\u0308b'"),
        # All letters of the words in capitals were named.
        (LABELS, ["A", "B", "AB", "aB"], r"come back to it from the labels' case, but these do not: 'aB'$"),
        # No case would help: "ab" was named alone.
        ([" ", "你", "好"], ["你", "好", "龘", "ab"], "hold 'A' in 'AB', 'B' in 'AB', '龘' in '龘'"),
    ],
)
def test_a_language_model_of_another_alphabet_is_refused_with_its_characters(tmp_path, labels, vocabulary, message):
    path = tmp_path / "lm.arpa"
    words = "".join(f"-1.0\t{word}\t0\n" for word in ["<unk>", "<s>", "</s>", *vocabulary])
    counts = f"ngram 1={len(vocabulary) + 3}\nngram 2=1\n"
    path.write_text(f"\\data\\\n{counts}\n\\1-grams:\n{words}\n\\2-grams:\n-1.0\t<s> {vocabulary[0]}\n\n\\end\\\n")
    with pytest.raises(LanguageModelError, match=message):
        LanguageModel(path, labels)


def test_a_language_model_of_words_needs_a_label_between_them(arpa):
    with pytest.raises(LanguageModelError, match="one label must be the space, but the labels are 'ab'"):
        Decoder(["a", "b"], 0.02, language_model=arpa)


def test_a_language_model_in_either_case_serves_labels_in_the_other(tmp_path, arpa):
    capitals = tmp_path / "capitals.arpa"
    text = arpa.read_text()
    capitals.write_text(text.replace("\ta", "\tA").replace("ab", "AB").replace(" a", " A").replace("\tAb", "\tAB"))
    clip = np.log(np.random.default_rng(2).dirichlet(np.ones(len(LABELS) + 1), 8)).astype(np.float32)
    wanted = Options(decoder="ngram", hotwords=("Ab",), hotword_boost=2.0)
    found = [
        Decoder(labels, 0.02, language_model=path).decode([clip], [wanted])[0]
        for labels in (LABELS, [" ", "A", "B"])
        for path in (arpa, capitals)
    ]
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[2].text == found[0].text.upper() != ""
    assert found[2].confidence == found[0].confidence


@pytest.mark.parametrize(
    ("words", "labels", "spelled"),
    [
        ("IŞIK ALTIN KADIN", " abcdhiklnrstyzış", "ışık altın kadın"),
        ("IŞIK İKİ", " abcdhiklnrstyzış", "ışık iki"),
        ("ışık iki", " ABCDHIKLNRSTYZİŞ", "IŞIK İKİ"),
        ("ΛΌΓΟΣ ΣΟΦΌΣ ΈΝΑ", " αγελνοσφέό", "λόγοσ σοφόσ ένα"),
        ("λόγος σοφός ένα σ'", " αγελνοσφέό'", "λόγοσ σοφόσ ένα σ'"),
        ("λόγος σοφός ένα", " αγελνοσςφέό", "λόγος σοφός ένα"),
        ("λόγος σοφός ένα", " ΑΓΕΛΝΟΣΦΈΌ", "ΛΌΓΟΣ ΣΟΦΌΣ ΈΝΑ"),
    ],
)
def test_a_language_model_keeps_its_letters_i_and_sigma(words, labels, spelled):
    to_labels, from_labels = match_case(words.split(), list(labels))
    assert to_labels(words) == spelled
    assert from_labels(spelled) == words


@pytest.mark.parametrize(
    ("letters", "count", "absent"),
    [
        ("AIS\u015e", 10_000, "i"),
        ("AI\u0130S\u015e", 10_000, None),
        ("AIS\u015e", 9_999, None),
        ("a\u0131s", 10_000, "i \u015f"),
    ],
)
def test_labels_that_no_word_of_a_large_language_model_has_are_told(tmp_path, caplog, letters, count, absent):
    """Python's upper case of Turkish has no capital of i: its words come back with another letter."""
    spelled = map("".join, itertools.islice(itertools.product(letters, repeat=9), count - 1))
    words = "".join(f"-3.0\t{word}\t0\n" for word in ["<unk>", "<s>", "</s>", letters, *spelled])
    path = tmp_path / "lm.arpa"
    counts = f"ngram 1={count + 3}\nngram 2=1\n"
    path.write_text(
        f"\\data\\\n{counts}\n\\1-grams:\n{words}\n\\2-grams:\n-1.0\t<s> {letters}\n\n\\end\\\n", encoding="utf-8"
    )
    LanguageModel(path, list(" a\u0131is\u015f"))
    told = [message for message in caplog.messages if "should have words with every label" in message]
    assert [f"but has none with {absent}, so" in message for message in told] == [True] * (absent is not None)


def test_a_language_model_that_would_not_come_back_from_the_other_case_is_refused(tmp_path, arpa):
    path = tmp_path / "lm.arpa"
    path.write_text(arpa.read_text().replace("ab", "aß"))
    with pytest.raises(LanguageModelError, match="'ß' in 'aß'"):
        LanguageModel(path, [" ", "A", "S"])


# The form of LibriSpeech's published 3-gram.pruned.*.arpa.gz: SRILM's, with an empty line first, in capitals, the
# unknown word as <UNK> and sentence ends without a back-off, words with apostrophes at either end.
PUBLISHED = """
\\data\\
ngram 1=7
ngram 2=3
ngram 3=1

\\1-grams:
-1.2\t</s>
-2.5\t<UNK>
-99\t<s>\t-0.8
-1.1\tA\t-0.4
-2.1\tA'B\t-0.2
-1.3\tAB\t-0.3
-3.1\t'B

\\2-grams:
-0.4\t<s> A\t-0.1
-0.6\tA AB\t-0.2
-0.5\tAB </s>

\\3-grams:
-0.2\t<s> A AB

\\end\\
"""


@pytest.mark.parametrize("name", ["3-gram.arpa", "3-gram.arpa.gz"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_published_language_models_of_librispeech_load_as_they_are(tmp_path, name, newline):
    path = tmp_path / name
    content = PUBLISHED.replace("\n", newline).encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    model = LanguageModel(path, [" ", "a", "b", "'"])
    known, unknown = model.rate("a ab"), model.rate("bb a'b")
    assert known == (pytest.approx((-0.4 - 0.2 - 0.2 - 0.5) * math.log(10)), 0)
    assert unknown == (pytest.approx((-0.8 - 2.5 - 2.1 - 0.2 - 1.2) * math.log(10)), 1)
    assert {word for word in ("a", "ab", "a'b", "'b") if model.rate(word)[1]} == set()


def test_without_an_unknown_word_it_is_as_likely_as_the_least_likely_one(tmp_path, arpa, caplog):
    known, path = tmp_path / "known.arpa", tmp_path / "lm.arpa"
    known.write_text(arpa.read_text().replace("-2.0\t<unk>", "-0.9\t<unk>"))
    path.write_text(arpa.read_text().replace("ngram 1=5", "ngram 1=4").replace("-2.0\t<unk>\t0\n", ""))
    clip = np.log(np.random.default_rng(4).dirichlet(np.ones(len(LABELS) + 1), 8)).astype(np.float32)
    wanted = Options(decoder="ngram", n_best=20, hotwords=("bb",), hotword_boost=8.0)
    expected, found = (Decoder(LABELS, 0.02, language_model=lm).decode([clip], [wanted])[0] for lm in (known, path))
    assert [reading.text for reading in found.alternatives] == [reading.text for reading in expected.alternatives]
    assert [reading.language for reading in found.alternatives] == pytest.approx(
        [reading.language for reading in expected.alternatives], abs=1e-4
    )
    assert "bb" in found.text.split()
    rates = [LanguageModel(lm, LABELS).rate("a bb") for lm in (path, known)]
    assert rates[0] == pytest.approx(rates[1], abs=1e-4)
    assert f"{path} has no <unk>" in caplog.text
    assert f"{known} has no <unk>" not in caplog.text


def test_a_word_that_never_comes_is_not_the_least_likely_one(tmp_path, arpa):
    path = tmp_path / "lm.arpa"
    without = arpa.read_text().replace("ngram 1=5", "ngram 1=4").replace("-2.0\t<unk>\t0\n", "")
    path.write_text(without.replace("-0.9\tab", "-99\tab"))
    assert LanguageModel(path, LABELS).best[-1] == pytest.approx(-0.7 * math.log(10), abs=1e-4)


def test_many_labels_take_their_table_once(tmp_path):
    labels = [" ", *map(chr, range(0x4E00, 0x5600))]
    words = [first + second for first, second in zip(labels[1:1001], labels[1000:2000], strict=True)]
    unigrams = "".join(f"-1.0\t{word}\t0\n" for word in ["<unk>", "<s>", "</s>", *words])
    counts = f"ngram 1={len(words) + 3}\nngram 2=1\n"
    path = tmp_path / "lm.arpa"
    path.write_text(f"\\data\\\n{counts}\n\\1-grams:\n{unigrams}\n\\2-grams:\n-1.0\t<s> {words[0]}\n\n\\end\\\n")
    tracemalloc.start()
    try:
        model = LanguageModel(path, labels)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert model.tree.shape == (1 + 2 * 1000 + 1, len(labels))
    assert peak < 1.2 * model.tree.nbytes


@pytest.mark.parametrize(
    "content", [b"no language model", gzip.compress(b"no", mtime=0), gzip.compress(b"x", mtime=0)[:10] + b"!" * 20]
)
def test_what_is_no_language_model_is_refused(tmp_path, content):
    path = tmp_path / "lm.klm"
    path.write_bytes(content)
    with pytest.raises(LanguageModelError, match=r"must be an ARPA file or a KenLM binary"):
        LanguageModel(path, LABELS)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("count", ["-3", "0x3", "1000000", "18446744073709551612", "9" * 5000])
def test_a_count_that_the_file_cannot_hold_is_refused(tmp_path, arpa, count, packed):
    """KenLM takes a large or negative count as it is, and ended the process."""
    content = arpa.read_text().replace("ngram 2=4", f"ngram 2={count}")
    path = tmp_path / ("lm.arpa.gz" if packed else "lm.arpa")
    path.write_bytes(gzip.compress(content.encode(), mtime=0) if packed else content.encode())
    with pytest.raises(LanguageModelError) as raised:
        LanguageModel(path, LABELS)
    assert f"{path} must give a count of n-grams that it can hold" in str(raised.value)
    assert f"gives 'ngram 2={count[:100]}" in str(raised.value)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("line", ["-0.9\t\n-0.9 ab", "-0.9\t\t-0.3"])
def test_a_line_without_its_word_is_named(arpa, line):
    """KenLM looks for the word in the next line."""
    arpa.write_text(arpa.read_text().replace("-0.9\tab", line))
    with pytest.raises(LanguageModelError) as raised:
        LanguageModel(arpa, LABELS)
    message = f"{arpa} must give a logarithm, tab and word in each line of `\\1-grams:`, not '-0.9\\t"
    assert message in str(raised.value)


@pytest.mark.parametrize("word", ["<unk>", "</s>", "the"])
def test_a_damaged_probability_is_refused(tmp_path, word):
    """Those of <unk> and </s> loaded."""
    nowhere = kenlm.State()
    original = kenlm.Model(str(NGRAMS))
    original.NullContextWrite(nowhere)
    number = struct.pack("<f", original.BaseScore(nowhere, word, kenlm.State()))
    path = tmp_path / "lm.klm"
    path.write_bytes(NGRAMS.read_bytes().replace(number, struct.pack("<f", math.nan)))
    with pytest.raises(
        LanguageModelError, match=rf"must give each word a logarithm of 0 at most, but gives '{word}' nan"
    ):
        LanguageModel(path, [" ", "'", *map(chr, range(ord("a"), ord("z") + 1))])


@pytest.mark.parametrize("line", ["-2.0\t<unk>", "-1.0\t</s>", "-0.9\tab", "-0.4\ta ab", "-0.3\tab </s>"])
def test_minus_infinity_means_never(tmp_path, arpa, line):
    """At a weight of 0 it became NaN, and what was said was no longer found."""
    paths, words = [tmp_path / "never.arpa", tmp_path / "infinity.arpa"], line.partition("\t")[2]
    for path, number in zip(paths, ("-99", "-inf"), strict=True):
        path.write_text(arpa.read_text().replace(line, f"{number}\t{words}"))
    clip = np.log(np.full((8, len(LABELS) + 1), 0.01, np.float32))
    clip[range(0, 8, 2), [1, 0, 1, 2]] = clip[1::2, -1] = math.log(0.97)
    decoders = [Decoder(LABELS, 0.02, language_model=path) for path in paths]
    for weight in (0.0, 0.5):
        options = Options(decoder="ngram", lm_weight=weight, n_best=9)
        never, infinity = (decoder.decode([clip], [options])[0] for decoder in decoders)
        assert [reading.text for reading in infinity.alternatives] == [reading.text for reading in never.alternatives]
        assert weight or infinity.text == "a ab"
    never, infinity = (decoder.language_model.rate("a ab b")[0] for decoder in decoders)
    assert infinity == pytest.approx(never, abs=1.0)  # -99 becomes a little less by a backoff


def test_white_space_of_unicode_is_part_of_a_word_as_for_kenlm(tmp_path, arpa):
    """It was lost, so the model did not know its own word."""
    arpa.write_text(arpa.read_text().replace("ab", "ab\u00a0"), encoding="utf-8")
    with pytest.raises(LanguageModelError, match=r"'\\xa0' in 'ab\\xa0'"):
        LanguageModel(arpa, LABELS)


def test_a_byte_order_mark_is_named(tmp_path, arpa):
    arpa.write_text(arpa.read_text(), encoding="utf-8-sig")
    (tmp_path / "lm.arpa.gz").write_bytes(gzip.compress(arpa.read_bytes()))
    for path in (arpa, tmp_path / "lm.arpa.gz"):
        with pytest.raises(LanguageModelError, match="must begin without a byte order mark"):
            LanguageModel(path, LABELS)


def test_a_small_file_that_would_fill_the_disk_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "lm.arpa.gz"
    path.write_bytes(gzip.compress(b"\n" * (1 << 24)))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 23, limit[1]))  # a larger file would be an OSError
    try:
        with pytest.raises(LanguageModelError, match=r"lm\.arpa\.gz must hold at most 100 times its size.* `gzip -d`"):
            LanguageModel(path, LABELS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_n_grams_of_number_words_alone_may_be_packed(tmp_path):
    words = [f"{digit}undzwanzig" for digit in ("ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht")]
    grams = [[" ".join(gram) for gram in itertools.product(words, repeat=order)] for order in range(1, 6)]
    grams[0] += ["<unk>", "<s>", "</s>"]
    lines = ["\\data\\", *(f"ngram {i}={len(some)}" for i, some in enumerate(grams, 1))]
    for i, some in enumerate(grams, 1):
        lines += ["", f"\\{i}-grams:", *(f"-1.5\t{gram}" for gram in some)]
    path = tmp_path / "lm.arpa.gz"
    content = "\n".join([*lines, "", "\\end\\", ""]).encode()
    path.write_bytes(gzip.compress(content, mtime=0))
    assert len(content) > 25 * path.stat().st_size
    assert LanguageModel(path, sorted(set("".join(words)) | {" "})).rate(words[0])[1] == 0


def test_a_language_model_may_be_in_a_folder_that_is_not_utf8(tmp_path, arpa):
    path = tmp_path / os.fsdecode(b"caf\xe9") / "lm.arpa"
    path.parent.mkdir()
    arpa.rename(path)
    assert LanguageModel(path, LABELS).rate("a")[1] == 0


def test_a_language_model_that_was_cut_short_or_is_no_utf8_is_refused(tmp_path, arpa):
    cut, latin = tmp_path / "cut.arpa.gz", tmp_path / "latin.arpa"
    cut.write_bytes(gzip.compress(arpa.read_bytes())[:-20])
    latin.write_text(arpa.read_text().replace("ab", "aé"), encoding="latin-1")
    for path in (cut, latin):
        with pytest.raises(LanguageModelError, match=r"must be an ARPA file or a KenLM binary"):
            LanguageModel(path, LABELS)


@pytest.mark.parametrize(
    ("size", "zeros"), [(60, 0), (1_000_000, 0), (2_200_000, 0), (-2, 0), (-1, 0), (2_200_000, 300_000)]
)
def test_a_binary_that_was_cut_short_is_refused(tmp_path, size, zeros):
    """It loaded without its last words, or was said to be built without any."""
    path = tmp_path / "lm.klm"
    path.write_bytes(NGRAMS.read_bytes()[:size] + bytes(zeros))
    with pytest.raises(LanguageModelError, match=r"lm\.klm must end with its [\d,]+ words, but is cut short"):
        read_ngrams(path)


def test_without_kenlm_a_language_model_says_what_to_install(arpa, monkeypatch):
    monkeypatch.setitem(sys.modules, "kenlm", None)
    monkeypatch.delitem(sys.modules, "carnelian_training.ctc.language_model", raising=False)
    with pytest.raises(MissingPackage, match="pip install ufal-kenlm"):
        Decoder(LABELS, 0.02, language_model=arpa)
    assert Decoder(LABELS, 0.02).decoders == ["greedy", "beam"]


def test_answers_are_forgotten_before_they_fill_the_memory(arpa, monkeypatch):
    monkeypatch.setattr("carnelian_training.ctc.language_model.MAX_ANSWERS", 2)
    model = LanguageModel(arpa, LABELS)
    context = model.start()
    first = [model.score(context, word) for word in (0, 1, -1)]
    context = model.start()
    assert not model._answers
    assert [model.score(context, word)[0] for word in (0, 1, -1)] == [score for score, _ in first]
