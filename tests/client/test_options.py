"""The decoder's options and what they bring."""

import json
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pydantic
import pytest
from carnelian_client import Alternative, DecodingOptions, InvalidOption


def test_options_travel_as_request_parameters(client, triton, wav):
    client.transcribe(wav, decoder="beam", beam_width=20, lm_weight=0.5, hotwords=["ada", "charles babbage"])
    parameters = triton.requests[0].parameters
    assert parameters["decoder"].string_param == "beam"
    assert parameters["beam_width"].int64_param == 20
    assert parameters["lm_weight"].string_param == "0.5"
    assert json.loads(parameters["hotwords"].string_param) == ["ada", "charles babbage"]


def test_options_may_be_numbers_of_numpy(client, triton, wav):
    numbers = {"beam_width": np.int64(20), "lm_weight": np.float32(0.5), "rescore": np.bool_(True)}
    client.transcribe(wav, **numbers)
    parameters = triton.requests[0].parameters
    assert parameters["beam_width"].int64_param == 20
    assert parameters["lm_weight"].string_param == "0.5"
    assert parameters["rescore"].string_param == "true"


@pytest.mark.parametrize("number", [Fraction(1, 2), Decimal("0.5")], ids=["fraction", "decimal"])
def test_options_may_be_exact_numbers(client, triton, wav, number):
    client.transcribe(wav, lm_weight=number)
    assert triton.requests[0].parameters["lm_weight"].string_param == "0.5"


def test_web_frameworks_may_take_options_from_requests():
    """Before Python 3.12, pydantic refused them, and with it FastAPI."""
    options = pydantic.TypeAdapter(DecodingOptions)
    assert options.validate_python({"decoder": "beam", "n_best": "3"}) == {"decoder": "beam", "n_best": 3}
    assert options.json_schema()["properties"].keys() == DecodingOptions.__annotations__.keys()
    with pytest.raises(pydantic.ValidationError, match="'greedy', 'beam' or 'ngram'"):
        options.validate_python({"decoder": "best"})


def test_alternatives_are_typed(client, triton, wav, answers):
    reading = {"text": "a b", "score": -1.5, "acoustic": -2.5, "language": 0.75, "hotwords": 0.25}
    triton.answer = answers("a b", alternatives=[reading], decoder="ngram")
    transcript = client.transcribe(wav, decoder="ngram", n_best=1)
    assert transcript.alternatives == (Alternative("a b", -1.5, -2.5, 0.75, 0.25),)
    assert (transcript.decoder, transcript.rescored) == ("ngram", False)  # of a server that knows no rescoring
    triton.answer = answers("a b", alternatives=[reading | {"neural": -3.25}], decoder="ngram", rescored=True)
    transcript = client.transcribe(wav, decoder="ngram", rescore=True, n_best=1)
    assert triton.requests[-1].parameters["rescore"].string_param == "true"
    assert transcript.alternatives[0].neural == -3.25
    assert transcript.rescored


def test_a_wrong_option_is_an_error_of_its_own(client, triton, wav):
    triton.script = [("INVALID_ARGUMENT", "in ensemble 'm', wrong option: n_best must be from 1")]
    with pytest.raises(InvalidOption, match="n_best must be from 1"):
        client.transcribe(wav, n_best=0)


def test_an_integer_of_any_size_reaches_the_server_which_says_what_is_allowed(client, triton, wav):
    client.transcribe(wav, beam_width=2**63)
    assert triton.requests[0].parameters["beam_width"].string_param == str(2**63)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 5}, "Triton keeps 'timeout' for itself; the time for a call is `timeout_s`"),
        ({"priority": 1}, "Triton keeps 'priority' for itself"),
        ({"headers": {"a": "b"}}, "'headers' is the client's, for all its calls; make another client with `headers`"),
        ({"metadata": [("a", "b")]}, "'metadata' is the client's, .* make another client with `headers`"),
        ({"api_key": "secret"}, "'api_key' is the client's, .* make another client with `api_key`"),
        ({"hotwords": '["caf\udce9"]'}, r"option 'hotwords' must be text in UTF-8, but is '\[\"caf\\udce9"),
        ({"caf\udce9": 1}, r"option 'caf\\udce9' must be text in UTF-8"),
        ({"lm_weight": None}, "'lm_weight' must be a number, .* but is None; leave it out for the default"),
        ({"hotwords": iter(["ada"])}, "'hotwords' must be .* a list of strings"),
        ({"hotwords": [b"ada"]}, r"'hotwords' must be .* a list of strings, but is \[b'ada'\]"),
    ],
)
def test_what_cannot_be_an_option_is_refused_before_it_is_sent(client, triton, wav, options, message):
    with pytest.raises(InvalidOption, match=message):
        client.transcribe(wav, **options)
    assert [type(outcome) for outcome in client.transcribe_many([wav, wav], **options)] == [InvalidOption] * 2
    assert not triton.requests
