"""Whatever is written is there whole or not at all, and an error says which file it was."""

import json
from pathlib import Path

import numpy as np
import pytest
from carnelian_training.cli import main
from carnelian_training.data.manifest import Clip, write_manifest
from carnelian_training.data.sound_file import write_sound
from carnelian_training.evaluation.comparison import Measured, Row, write_comparison
from carnelian_training.foreign import nemo
from carnelian_training.language_models.weights import write_weights
from carnelian_training.loop.plot import draw
from carnelian_training.replacement import WriteError, replaced, written

NOISE = np.random.default_rng(0).uniform(-0.5, 0.5, 16000)


def draw_one_loss(path: Path) -> None:
    metrics = path.parent / "metrics.jsonl"
    metrics.write_text(json.dumps({"step": 1, "loss": 2.0}))
    draw([metrics], path)
    metrics.unlink()


WRITERS = {
    "clips.jsonl": lambda path: write_manifest(path, [Clip(Path("a.wav"), 1.0, "a" * 1000)]),
    "a.flac": lambda path: write_sound(path, NOISE, 16000),
    "a.ogg": lambda path: write_sound(path, NOISE, 16000),
    "a.wav": lambda path: write_sound(path, NOISE, 16000),
    "loss.png": draw_one_loss,
    "rows.jsonl": lambda path: write_comparison(path, [Row("test", "greedy", 9, 9, Measured(0, 0, 0, 0))] * 9),
    "weights.json": lambda path: write_weights(path, {"lm_weight": 1.0}, {"wer": {"greedy" * 200: 0.5}}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_finds_no_room_is_named_and_what_was_there_stays(name, room, tmp_path):
    path = tmp_path / name
    path.write_text("old")
    with room(200), pytest.raises(WriteError, match=rf"{name} could not be .* and is as it was before: File too large"):
        WRITERS[name](path)
    assert path.read_text() == "old"
    WRITERS[name](path)
    assert path.stat().st_size > 200
    assert {file.name for file in tmp_path.iterdir()} - {"metrics.jsonl"} == {name}


def test_an_error_of_another_kind_stays_what_it_is_and_leaves_nothing(tmp_path):
    with pytest.raises(UnicodeEncodeError), replaced(tmp_path / "a") as partial:
        partial.write_text("naïve", encoding="ascii")
    assert not list(tmp_path.iterdir())


def test_an_error_that_has_a_name_already_keeps_it(tmp_path):
    words = r"new could not be written: No such file or directory: '.*missing'"
    with pytest.raises(WriteError, match=words), written(tmp_path / "new"):
        (tmp_path / "missing").read_text()


def test_a_link_stays_one_and_a_device_is_written_to(tmp_path):
    (tmp_path / "folder").mkdir()
    for name, place in (("link", "folder/there"), ("full", "/dev/full")):
        (tmp_path / name).symlink_to(place)
    with replaced(tmp_path / "link") as partial:
        partial.write_text("new")
    assert (tmp_path / "folder" / "there").read_text() == "new"
    with (
        pytest.raises(WriteError, match=r"full could not be written: No space left"),
        replaced(tmp_path / "full") as full,
    ):
        full.write_text("new")
    assert all((tmp_path / name).is_symlink() for name in ("link", "full"))


def test_where_a_folder_cannot_be_made_it_is_named(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(WriteError, match=r"file/a could not be written"), replaced(tmp_path / "file" / "a"):
        pass


def test_a_nemo_file_finds_no_room(tiny_config, room, tmp_path):
    from carnelian_training.checkpoint import build_model

    path = tmp_path / "tiny.nemo"
    path.write_text("old")
    with room(10_000), pytest.raises(WriteError, match=r"tiny\.nemo could not be written, and is as it was"):
        nemo.write(path, tiny_config, build_model(tiny_config).state_dict())
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    "words",
    [
        "evaluate MODEL CLIPS --lm LM --neural-lm LM.onnx --lm-weights WEIGHTS --out OUT",
        "evaluate --table MODEL CLIPS --out OUT",
        "transcribe MODEL CLIPS --lm LM --neural-lm LM.onnx --lm-weights WEIGHTS --out OUT",
        "weigh MODEL CLIPS --lm LM --neural-lm LM.onnx --out OUT",
        "perplexity LM --text TEXT --exclude CLIPS --out OUT",
        "ngram --text TEXT.klm --exclude CLIPS.klm OUT",
        "convert --cuts CUTS OUT",
        "convert --recordings RECORDINGS --supervisions SUPERVISIONS OUT",
        "publish MODEL.pt OUT",
        "average MODEL.pt OTHER.pt --out OUT",
        "import MODEL.pt OUT",
        "to-nemo MODEL.nemo OUT",
    ],
)
def test_nothing_is_written_over_what_it_is_made_of(words, tmp_path, call):
    files = ("LM.onnx", "MODEL.nemo", "MODEL.pt", "OTHER.pt", "TEXT.klm", "CLIPS.klm")
    places = [word for word in words.split() if (word.isupper() and word != "OUT") or word in files]
    for place in places:
        (tmp_path / place).write_text(place)
    for place in places:
        given = [tmp_path / word if word in places else word for word in words.split()]
        status, _, err = call(main, *(tmp_path / "." / place if word == "OUT" else word for word in given))
        assert (status, "must be another file than the source" in err) == (1, True), (place, err)
        assert (tmp_path / place).read_text() == place


def test_the_report_of_an_n_gram_model_does_not_take_the_place_of_its_text(tmp_path, call):
    (tmp_path / "train.json").write_text("a sentence")
    status, _, err = call(main, "ngram", tmp_path / "train.klm", "--text", tmp_path / "train.json")
    assert (status, "must be another file than the source" in err) == (1, True)


@pytest.mark.parametrize(
    ("command", "ending"),
    [
        ("publish a.pt", ".pt"),
        ("average a.pt b.pt --out", ".pt"),
        ("import a.nemo", ".pt"),
        ("to-nemo a.pt", ".nemo"),
    ],
)
def test_weights_take_no_other_files_place(tmp_path, call, command, ending):
    """An archive stood in the place of a manifest."""
    (tmp_path / "clips.jsonl").write_text("{}")
    status, _, err = call(main, *command.split(), tmp_path / "clips.jsonl")
    assert (status, f"must end in {ending}" in err) == (2, True)
    (tmp_path / "file").touch()
    status, _, err = call(main, *command.split(), tmp_path / "file" / f"a{ending}")
    assert (status, "must be a file that can be written" in err) == (2, True)


@pytest.mark.parametrize("content", ["# a page", '{"a": 1}', "\n"])
def test_what_is_no_checkpoint_is_called_so(tmp_path, call, content):
    """PyTorch's reason was the number of a byte: 101, or "Unsupported operand 91"."""
    (tmp_path / "page.pt").write_text(content)
    status, _, err = call(main, "publish", tmp_path / "page.pt", tmp_path / "b.pt")
    assert (status, err.strip().endswith("it is no file of PyTorch's")) == (1, True)
