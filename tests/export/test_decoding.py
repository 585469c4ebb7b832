"""What an export gives a recogniser to decode with: language models, options, calibration."""

import pytest
from carnelian_export.model_configs import read_config
from carnelian_export.repository import write_model
from carnelian_export.stages import Decoding, RepositoryError
from carnelian_training.ctc import Calibration, OptionError

ARPA = "\\data\\\nngram 1=4\nngram 2=1\n\n\\1-grams:\n-1\t<unk>\t0\n0\t<s>\t0\n-1\t</s>\t0\n-1\t{word}\t0\n\n"
ARPA += "\\2-grams:\n-1\t<s> {word}\n\n\\end\\\n"


def test_a_language_model_and_options_are_deployed_with_the_model(tmp_path, config, network):
    (tmp_path / "lm.arpa").write_text(ARPA.format(word="ada"))
    decoding = Decoding(
        language_model=tmp_path / "lm.arpa", options={"decoder": "ngram", "lm_weight": "0.75", "hotwords": '["ada"]'}
    )
    write_model(tmp_path / "r", "tiny", config, network, decoding)
    parameters = read_config(tmp_path / "r" / "tiny_ctc" / "config.pbtxt").parameters
    values = {name: parameter.string_value for name, parameter in parameters.items()}
    assert (values["decoder"], values["lm_weight"], values["hotwords"]) == ("ngram", "0.75", '["ada"]')
    deployed = tmp_path / "r" / "tiny_ctc" / "1" / values["language_model"]
    assert deployed.read_bytes() == (tmp_path / "lm.arpa").read_bytes()


def test_language_models_have_names_of_their_own(tmp_path, config, network, write_language_model):
    """The second was copied over the first."""
    (tmp_path / "a").mkdir()
    write_language_model(tmp_path / "a" / "english.lm", "".join(config.labels))
    for name in ("english.lm", "ctc.json"):
        (tmp_path / name).write_text(ARPA.format(word="ada"))
        neural = tmp_path / "a" / "english.lm" if name == "english.lm" else None
        decoding = Decoding(language_model=tmp_path / name, neural_language_model=neural)
        with pytest.raises(RepositoryError, match=f"there is a {name} already: rename"):
            write_model(tmp_path / "r", "tiny", config, network, decoding)
    assert not (tmp_path / "r").exists()


def test_language_models_have_names_that_a_server_can_open(tmp_path, config, network):
    """The server ended with UnicodeEncodeError."""
    (tmp_path / "français.arpa").write_text(ARPA.format(word="ada"))
    with pytest.raises(RepositoryError, match=r"must have a name in ASCII: rename .*/français\.arpa"):
        write_model(tmp_path / "r", "tiny", config, network, Decoding(language_model=tmp_path / "français.arpa"))


def test_what_an_export_to_the_same_name_drops_is_named_with_what_gives_it(tmp_path, config, network, caplog):
    (tmp_path / "lm.arpa").write_text(ARPA.format(word="ada"))
    (tmp_path / "calibration.json").write_text(Calibration().to_json())
    decoding = Decoding(
        language_model=tmp_path / "lm.arpa",
        options={"decoder": "ngram"},
        calibration=tmp_path / "calibration.json",
    )
    for _ in range(2):
        write_model(tmp_path / "r", "tiny", config, network, decoding)
    path = tmp_path / "r" / "tiny_features" / "config.pbtxt"
    path.write_text(path.read_text().replace("count: 1", "count: 3"))
    assert not caplog.messages  # an equal one changes nothing
    write_model(tmp_path / "r", "tiny", config, network)
    (warning,) = caplog.messages
    assert warning.splitlines()[1:] == [
        "  tiny_ctc: calibration.json was there, is not there (it comes from --calibration)",
        "  tiny_ctc: decoder was ngram, is greedy (it comes from --option, --lm-weights)",
        "  tiny_ctc: language_model was lm.arpa, is not there (it comes from --lm)",
        "  tiny_features: instance_group was [count: 3 kind: KIND_CPU ], is [count: 1 kind: KIND_CPU ] "
        "(it comes from --tuning or an edit of config.pbtxt)",
    ]


def test_corrections_of_another_network_are_named(tmp_path, config, network, caplog):
    path = tmp_path / "calibration.json"
    for measured, warnings in (
        ("", []),  # unknown
        ("tiny", []),
        ("other", [f"the corrections in {path} were measured on other, not on tiny"]),
    ):
        path.write_text(Calibration(model=measured).to_json())
        write_model(tmp_path / "r", "served", config, network, Decoding(calibration=path))
        assert caplog.messages == warnings


def test_a_neural_language_model_is_deployed_with_the_model(tmp_path, config, network, write_language_model):
    path = tmp_path / "lm.onnx"
    write_language_model(path, "".join(config.labels))
    decoding = Decoding(options={"rescore_weight": 0.25}, neural_language_model=path)
    write_model(tmp_path / "r", "tiny", config, network, decoding)
    parameters = read_config(tmp_path / "r" / "tiny_ctc" / "config.pbtxt").parameters
    values = {name: parameter.string_value for name, parameter in parameters.items()}
    assert (values["rescore"], values["rescore_weight"]) == ("false", "0.25")
    assert (tmp_path / "r" / "tiny_ctc" / "1" / values["neural_language_model"]).read_bytes() == path.read_bytes()
    with pytest.raises(OptionError, match="rescore needs a neural language model"):
        write_model(tmp_path / "r", "tiny", config, network, Decoding(options={"rescore": "true"}))


@pytest.mark.parametrize(
    ("word", "options", "message"),
    [
        ("Ädä", {}, r"does not fit the recogniser: .*'Ä' in 'Ädä'"),
        ("ada", {"lm_weight": "11"}, r"lm_weight must be a number from 0 to 10, but is '11'"),
    ],
)
def test_a_decoding_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path, config, network, word, options, message
):
    (tmp_path / "lm.arpa").write_text(ARPA.format(word=word))
    with pytest.raises(ValueError, match=message):
        write_model(
            tmp_path / "r", "tiny", config, network, Decoding(language_model=tmp_path / "lm.arpa", options=options)
        )
    assert not (tmp_path / "r").exists()
