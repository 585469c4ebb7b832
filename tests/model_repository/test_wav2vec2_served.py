"""wav2vec 2.0 through the same ensemble: several alphabets in one repository, errors in words, as heard offline."""

import json
import urllib.request
from pathlib import Path

import jiwer
import numpy as np
import pytest
import torch
from carnelian_client import CarnelianClient
from carnelian_export import acoustic
from carnelian_export.repository import write_model
from carnelian_training.checkpoint import build_model
from carnelian_training.config import config_from_dict
from carnelian_training.data.manifest import read_manifest
from carnelian_training.evaluation.evaluate import evaluate
from carnelian_training.foreign.sources import load_model
from carnelian_training.loop.train import train
from tritonclient.utils import InferenceServerException

DEMO = Path(__file__).parents[2] / "demo" / "clips" / "manifest.jsonl"
REFERENCES = Path(__file__).parents[1] / "training" / "references"
DIFFERENT = 0.015
"""Share of characters. The weights are random, and frames lie between two of them: noise of 1e-4 on the scores, more
than processors differ by, changes up to 0.006 of them, and of 1e-3 0.02 or more."""


@pytest.fixture(scope="module")
def recognisers(tmp_path_factory):
    """Name -> configuration and network: one imported, one of another alphabet and with an Hourglass, one trained."""
    model = {"name": "wav2vec2", "conv_channels": [8, 8, 8], "conv_kernels": [10, 8, 8], "conv_strides": [8, 8, 5]}
    model |= {"width": 16, "layers": 3, "heads": 2, "feed_forward": 16, "position_kernel": 8, "position_groups": 2}
    model["hourglass"] = {"before": 1, "pooled": 1, "after": 1, "factor": 2}
    config = config_from_dict({"name": "german", "model": model, "labels": list(" enäöüß")}, "here")
    torch.manual_seed(0)
    network = build_model(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    trained = train_in_two_stages(model, tmp_path_factory.mktemp("runs"))
    return {"imported": load_model(REFERENCES / "wav2vec2_large"), "german": (config, network), "trained": trained}


def train_in_two_stages(model, folder):
    """What `training/proof/run` does, a few steps of it: pre-trained and fine-tuned on the demo's clips."""
    sections = {"model": model, "data": {"train": [{"path": str(DEMO)}], "dev": str(DEMO), "num_threads": 1}}
    sections["optimizer"] = {"name": "adamw", "lr": 1e-4, "betas": [0.9, 0.98]}
    sections["loop"] = {"steps": 3, "evaluate_every_steps": 3}
    pretraining = {"codes": 4, "code_width": 4, "width": 8}
    masks = {"speed": [1.0, 1.0], "spans": {"time_probability": 0.5}}
    first = sections | {"name": "first", "pretraining": pretraining, "augment": masks}
    train(config_from_dict(first, "here"), folder)
    second = sections | {"name": "second", "init": {"checkpoint": str(folder / "first.pt")}}
    train(config_from_dict(second, "here"), folder / "tuned")
    return load_model(folder / "tuned" / "second.pt")


@pytest.fixture(scope="module")
def served(recognisers, tmp_path_factory, make_server):
    """A server of all, one of them with its weights in a file of their own."""
    repository = tmp_path_factory.mktemp("wav2vec2")
    for name, (config, network) in recognisers.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(acoustic, "MOST_BYTES", 0 if name == "german" else acoustic.MOST_BYTES)
            write_model(repository, name, config, network)
    assert [path.parts[-3] for path in repository.glob("*/1/model.onnx.data")] == ["german_acoustic"]
    with make_server(repository) as server:
        yield server


@pytest.fixture
def url(served):
    return served.grpc_url


@pytest.mark.parametrize("name", ["imported", "german", "trained"])
def test_what_is_served_is_what_is_heard_offline(recognisers, url, name):
    config, network = recognisers[name]
    offline = list(evaluate(network, config, DEMO).transcripts)
    assert all(offline)
    assert set("".join(offline)) <= set(config.labels)
    with CarnelianClient(url, model=name) as client:
        outcomes = client.transcribe_many([clip.audio_filepath for clip in read_manifest(DEMO)])
        assert jiwer.cer(offline, [outcome.text for outcome in outcomes]) <= DIFFERENT


@pytest.mark.parametrize(
    ("samples", "length", "message"),
    [
        (200, 200, "too short: a clip must hold at least 514 samples"),
        (0, 0, "too short"),
        (16_000, 40_000, "too few samples"),
        (60 * 16_000 + 1, 60 * 16_000 + 1, r"this clip of about 59\.98 s is over the limit"),
        (61 * 16_000, 61 * 16_000, "too long: a clip must be at most 60 s long"),
    ],
)
def test_a_clip_that_cannot_be_transcribed_is_an_error(url, connect, samples, length, message):
    signal = np.ones((1, samples), np.float32)
    with pytest.raises(InferenceServerException, match=message):
        connect(url).infer("german_pcm", SIGNAL=signal, SIGNAL_LENGTH=np.int32([[length]]))


def test_a_clip_that_is_too_short_is_counted_as_such(served, connect, wait_until):
    request = {"SIGNAL": np.ones((1, 200), np.float32), "SIGNAL_LENGTH": np.int32([[200]])}
    with pytest.raises(InferenceServerException, match="too short"):
        connect(served.grpc_url).infer("trained_pcm", **request)

    def is_counted():
        with urllib.request.urlopen(served.metrics_url, timeout=60) as answer:
            return 'carnelian_clips_total{model="trained",outcome="too_short"} 1\n' in answer.read().decode()

    wait_until(is_counted)


def test_nan_is_an_error_and_silence_is_none(url, connect):
    silence = np.zeros((2, 16_000), np.float32)
    silence[1, 5000] = np.nan
    rows = connect(url).infer("german_pcm", SIGNAL=silence, SIGNAL_LENGTH=np.int32([[16_000]] * 2))["RESULT"]
    heard, refused = (json.loads(row[0]) for row in rows)
    assert heard["duration"] == pytest.approx(1.0, abs=0.03)
    assert refused["error"].startswith("not finite: all samples must be finite numbers")
