"""The fourth law: what is served is what was evaluated, utterance by utterance."""

import json
from pathlib import Path

import jiwer
import numpy as np
import pytest
import soundfile
from carnelian_client import Transcript
from carnelian_training.checkpoint import load_model
from carnelian_training.data.loading import load
from carnelian_training.data.manifest import Clip, read_manifest, write_manifest
from carnelian_training.data.plan import Item
from carnelian_training.evaluation.evaluate import evaluate

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "demo" / "quartznet_demo.pt"
DEMO = ROOT / "demo" / "clips" / "manifest.jsonl"
RECORDINGS = Path("/usr/share/pocketsphinx/test/data")
RECORDINGS_MISSING = (
    f"real speech of the Debian package pocketsphinx-testdata is not in {RECORDINGS}; "
    "apt-get install --no-install-recommends pocketsphinx-testdata"
)
RATE_HZ = 16_000
FEATURE_TOLERANCE = 1e-4
"""What the features promise: a server in a container has another DALI, which decodes Opus a little differently."""
WORST_WER = 0.5
"""Of the demo's clips. Loose: a broken path hears nothing, and other weights hear a little more or less."""


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> Path:
    """A manifest of people speaking, at 16 kHz: the WAV files as they are, the headerless ones with a header.

    Nobody wrote down all that they say, and only what is heard is compared: a name stands for each text.
    """
    if not RECORDINGS.is_dir():
        pytest.skip(RECORDINGS_MISSING)
    folder = tmp_path_factory.mktemp("recordings")
    paths = sorted(RECORDINGS.glob("*/*.wav"))
    for raw in sorted(RECORDINGS.glob("*.raw")):
        paths.append(folder / f"{raw.stem}.wav")
        soundfile.write(paths[-1], np.fromfile(raw, "<i2"), RATE_HZ)
    assert all(soundfile.info(path).samplerate == RATE_HZ for path in paths)
    manifest = folder / "manifest.jsonl"
    write_manifest(manifest, [Clip(path, soundfile.info(path).duration, path.stem) for path in paths])
    return manifest


def transcripts(sdk, manifest: Path) -> list[str]:
    outcomes = list(sdk.transcribe_many([clip.audio_filepath for clip in read_manifest(manifest)]))
    assert all(isinstance(outcome, Transcript) for outcome in outcomes), outcomes
    return [outcome.text for outcome in outcomes]


@pytest.fixture(scope="module")
def evaluate_offline():
    config, model = load_model(CHECKPOINT)
    return lambda manifest: list(evaluate(model, config, manifest).transcripts)


def test_the_demo_clips_of_every_format_and_rate_are_read_as_offline(sdk, evaluate_offline):
    offline = evaluate_offline(DEMO)
    assert all(offline)
    assert transcripts(sdk, DEMO) == offline


def test_recordings_of_people_are_read_as_offline(sdk, evaluate_offline, recordings):
    offline = evaluate_offline(recordings)
    assert len(offline) >= 12
    assert sum(map(bool, offline)) >= len(offline) - 2  # a short one may pass for silence
    assert transcripts(sdk, recordings) == offline


def test_the_features_are_those_of_training(models):
    """Decoded, resampled, mixed down and framed by two pipelines, of different operators where the rate differs."""
    config, _ = load_model(CHECKPOINT)
    for clip in read_manifest(DEMO):
        (batch,) = load([[Item(clip)]], config.features, num_threads=1)
        decoded = models.infer("audio_decode", AUDIO=np.fromfile(clip.audio_filepath, np.uint8)[None])
        served = models.infer("quartznet_demo_features", **decoded)
        assert served["FEATURE_LENGTH"].item() == batch.lengths.item()
        np.testing.assert_allclose(served["FEATURES"], batch.features.numpy(), rtol=0, atol=FEATURE_TOLERANCE)


def test_the_demo_clips_are_understood(sdk):
    references = [json.loads(line)["text"] for line in DEMO.read_text().splitlines()]
    assert jiwer.wer(references, transcripts(sdk, DEMO)) < WORST_WER
