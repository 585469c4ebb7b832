"""A language model as one file: what it holds, and that it says what PyTorch says."""

import base64
import math

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from carnelian_export import language_model
from carnelian_export.cli import main
from carnelian_export.language_model import export_language_model, run, write_language_model
from carnelian_export.parity import ParityError, open_graph
from carnelian_training.checkpoint import save
from carnelian_training.ctc.rescoring import NeuralLanguageModel
from carnelian_training.language_models.perplexity import score_sentences
from carnelian_training.language_models.tokens import Tokenizer, train_tokenizer
from carnelian_training.models.transformer_xl import TransformerXl
from carnelian_training.replacement import WriteError
from carnelian_training.run_config import run_from_dict

SENTENCES = ["the king saw the ship", "a letter followed", "the queen met the king of the harbour"] * 5


def make(labels=None, sentences=SENTENCES, **model):
    tree = {
        "name": "tiny",
        "model": {"name": "transformer_xl", "width": 16, "layers": 2, "heads": 2, "feed_forward": 24, "memory": 6}
        | model,
        "text": {"tokens": {"kind": "char"} if labels else {"size": 33}, "segment": 5, "labels": labels},
    }
    config = run_from_dict(tree, "here")
    torch.manual_seed(0)
    network = TransformerXl(config.model, config.text.vocabulary).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    network.tokenizer = train_tokenizer(sentences, config.text.tokens, config.text.alphabet).model
    return config, network


@pytest.fixture(
    scope="module", params=[{}, {"norm_first": True}, {"cutoffs": [10, 20]}], ids=["", "norm_first", "adaptive"]
)
def exported(request, tmp_path_factory):
    config, network = make(**request.param)
    path = tmp_path_factory.mktemp("lm") / "lm.onnx"
    difference = write_language_model(path, "tiny", config, network)
    assert 0 < difference < 0.02
    return path, network


def test_the_file_describes_itself(exported):
    path, network = exported
    session = open_graph(path)
    assert [(i.name, i.type, i.shape) for i in session.get_inputs()] == [
        ("TOKENS", "tensor(int64)", ["rows", "time"]),
        ("TOKEN_LENGTH", "tensor(int64)", ["rows"]),
    ]
    assert [(o.name, o.type, o.shape) for o in session.get_outputs()] == [("LOG_PROB", "tensor(float)", ["rows"])]
    properties = session.get_modelmeta().custom_metadata_map
    assert {name: properties[name] for name in ("format", "name", "case")} == {
        "format": "carnelian-language-model-1",
        "name": "tiny",
        "case": "lower",
    }
    assert base64.b64decode(properties["tokenizer"]) == network.tokenizer


@pytest.mark.parametrize("labels", [" аєіїнвпрстуя'", " АЄІЇНВПРСТУЯ'", " 你好吗"])
def test_a_recogniser_of_the_same_labels_takes_it(tmp_path, labels):
    path = tmp_path / "lm.onnx"
    write_language_model(path, "tiny", *make(labels, ["".join(labels[::2]), "".join(labels[::-1])]))
    assert np.isfinite(NeuralLanguageModel(path, labels).score([labels.strip()])).all()


def test_weights_are_stored_once_in_float16(exported):
    path, network = exported
    large = [i for i in onnx.load(path).graph.initializer if len(i.dims) > 1]
    assert {i.data_type for i in large} == {onnx.TensorProto.FLOAT16}
    # An adaptive softmax cuts the embedding in parts, which the graph has beside the whole.
    again = network.embedding.weight.numel() if network.config.cutoffs else 0
    assert sum(math.prod(i.dims) for i in large) == again + sum(p.numel() for p in network.parameters() if p.ndim > 1)


def test_sentences_are_rated_as_in_pytorch_whatever_is_beside_them(exported):
    path, network = exported
    session = open_graph(path)
    rows = Tokenizer(network.tokenizer).encode([*SENTENCES[:3], ""])
    expected = score_sentences(network, rows, 5).numpy()
    np.testing.assert_allclose(run(session, rows, padding=-9), expected, atol=0.2)
    alone = np.concatenate([run(session, [row]) for row in rows])
    np.testing.assert_allclose(run(session, rows), alone, atol=1e-4)
    long = [*rows, list(range(2, 40))]
    np.testing.assert_allclose(run(session, long)[:-1], alone, atol=1e-4)


def test_a_bad_row_fails_alone(exported):
    session = open_graph(exported[0])
    tokens = np.array([[5, 6, 7], [5, 33, 7], [5, -1, 7], [5, 6, 7], [5, 6, 33]], np.int64)
    found = session.run(None, {"TOKENS": tokens, "TOKEN_LENGTH": np.array([3, 3, 3, 4, 2], np.int64)})[0]
    assert np.isnan(found).tolist() == [False, True, True, True, False]


def test_another_network_is_refused_and_nothing_written(tmp_path, monkeypatch):
    config, network = make()
    _, other = make()
    torch.nn.init.normal_(other.token_bias)
    graph = export_language_model(other)
    monkeypatch.setattr(language_model, "export_language_model", lambda network: graph)
    with pytest.raises(
        ParityError, match=r"^tiny in ONNX Runtime: .* by token, must be within 0\.02 of PyTorch's.*but differ by"
    ):
        write_language_model(tmp_path / "lm.onnx", "tiny", config, network)
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_it(tmp_path, call):
    config, network = make()
    save(tmp_path / "tiny.pt", config, network.state_dict(), results={})
    status, out, err = call(main, tmp_path / "tiny.pt", "--out", tmp_path / "lm.onnx")
    assert status == 0, err
    assert "a token of PyTorch's" in out
    properties = onnxruntime.InferenceSession(str(tmp_path / "lm.onnx")).get_modelmeta().custom_metadata_map
    assert properties["name"] == "tiny"
    status, _, err = call(main, tmp_path / "tiny.pt", "--name", "tiny", "--repository", tmp_path / "r")
    assert status == 1
    assert "must be a recogniser, but is a language model" in err
    assert call(main, tmp_path / "tiny.pt")[0] == 2
    assert call(main, tmp_path / "tiny.pt", "--out", tmp_path / "tiny.pt")[0] == 1  # it would be lost
    assert call(main, tmp_path / "tiny.pt", "--out", tmp_path / "lm.onnx")[0] == 0


@pytest.mark.parametrize("option", [["--precision", "fp16"], ["--repository", "r"], ["--option", "decoder=ngram"]])
def test_an_option_of_recognisers_is_refused(tmp_path, call, option):
    """All but --repository were ignored."""
    status, _, err = call(main, tmp_path / "tiny.pt", "--out", tmp_path / "lm.onnx", *option)
    assert (status, option[0] in err, "language model" in err) == (2, True, True)


def test_a_file_that_finds_no_room_is_named_and_the_old_one_stays(room, tmp_path):
    path = tmp_path / "lm.onnx"
    path.write_text("old")
    with room(1000), pytest.raises(WriteError, match=r"lm\.onnx could not be written, and is as it was before"):
        write_language_model(path, "tiny", *make())
    assert path.read_text() == "old"
