import contextlib
import dataclasses
import datetime
import functools
import importlib.util
import itertools
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import yaml
from carnelian_serving.addresses import held_ports
from carnelian_training.cli import main
from carnelian_training.config import config_from_dict
from carnelian_training.config_tree import config_to_dict
from carnelian_training.data.manifest import Clip
from torch import distributed

CLIPS = Path(__file__).parents[2] / "demo" / "clips" / "manifest.jsonl"
FIT_UNTIL_KILLED = Path(__file__).parent / "fit_until_killed.py"
STEPS = Path(__file__).parent / "run_steps.py"
ARPA = """\\data\\
ngram 1=5
ngram 2=4

\\1-grams:
-2.0\t<unk>\t0
0\t<s>\t-0.3
-1.0\t</s>\t0
-0.7\ta\t-0.2
-0.9\tab\t-0.1

\\2-grams:
-0.2\t<s> a
-1.5\t<s> ab
-0.4\ta ab
-0.3\tab </s>

\\end\\
"""


@pytest.fixture(scope="session")
def tiny_config():
    """A network of a few thousand parameters on the demo clips."""
    return config_from_dict(
        {
            "name": "tiny",
            "model": {
                "name": "quartznet",
                "stages": [
                    {"filters": 16, "kernel": 5, "stride": 2, "residual": False},
                    {"filters": 16, "kernel": 5, "repeat": 2, "dropout": 0.1},
                ],
            },
            "data": {"train": [{"path": str(CLIPS)}], "dev": str(CLIPS), "batch_s": 12, "num_threads": 1},
            "optimizer": {"name": "adamw", "lr": 0.002, "betas": [0.9, 0.98], "warmup_steps": 2},
            "loop": {"steps": 6, "log_every_steps": 1, "evaluate_every_steps": 3},
        },
        "tiny_config",
    )


@pytest.fixture
def hf_folder(tmp_path):
    """A copy of references/wav2vec2_base, a folder of Hugging Face's, to change."""
    return shutil.copytree(Path(__file__).parent / "references" / "wav2vec2_base", tmp_path / "x")


@pytest.fixture(scope="session")
def set_keys():
    """Set keys of a JSON file, which is made if it is not there: `set_keys(path, unk_token="?")`; None removes one."""

    def write(path, **keys):
        content = (json.loads(path.read_text()) if path.is_file() else {}) | keys
        path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))

    return write


@pytest.fixture(scope="session")
def changed():
    """A configuration with some fields of its sections replaced, as in `changed(config, loop={"steps": 3})`."""

    def replace(config, **sections):
        parts = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()}
        return dataclasses.replace(config, **parts)

    return replace


@pytest.fixture(scope="session")
def without_dropout(tiny_config, changed):
    """The tiny configuration whose network says the same in every step."""
    stages = tuple(dataclasses.replace(stage, dropout=0.0) for stage in tiny_config.model.stages)
    return changed(tiny_config, model={"stages": stages})


@pytest.fixture
def second_process():
    """Within `second_process(*words)` this process is the first of two, as under `torchrun`; `python *words` the other.

    Yields the other, which ends with the block, as `torchrun` ends those that wait for one that has failed. PyTorch is
    imported once for it; `torchrun` itself and its two processes would do so three times. If the other one fails, this
    one waits for two minutes.
    """

    @contextlib.contextmanager
    def start(*words):
        with contextlib.ExitStack() as stack:
            ports = stack.enter_context(held_ports("127.0.0.1", {"MASTER_PORT": 0}))
            common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports["MASTER_PORT"]), "WORLD_SIZE": "2"}
            command, environment = [sys.executable, *map(str, words)], os.environ | common | {"RANK": "1"}
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            second = stack.enter_context(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
            )
            patch.setattr("carnelian_training.distributed._TIMEOUT", datetime.timedelta(minutes=2))
            for name, value in (common | {"RANK": "0"}).items():
                patch.setenv(name, value)
            try:
                yield second
            finally:
                second.kill()
                if distributed.is_initialized():  # a command that fails leaves the group to the end of its process
                    distributed.destroy_process_group()

    return start


@pytest.fixture
def run_steps(capsys):
    """Takes steps by `run_steps.py` in this process; returns what it finds for each configuration."""

    def run(count, paths):
        runpy.run_path(str(STEPS))["main"](count, list(map(str, paths)))
        return list(map(json.loads, capsys.readouterr().out.splitlines()))

    return run


@pytest.fixture
def run_evaluate(call):
    """Runs `carnelian-train evaluate`."""
    return functools.partial(call, main, "evaluate")


@pytest.fixture
def fit_until_killed(tmp_path):
    """The words after `python` of a run that waits for its end before its last step."""

    def words(config, folder):
        (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config_to_dict(config)))
        return [str(FIT_UNTIL_KILLED), "fit", str(tmp_path / "tiny.yaml"), "--out", str(folder)]

    return words


@pytest.fixture(scope="session")
def load_stage(tmp_path_factory):
    """A feature stage as Triton loads it: a copy of `module`'s file, with its settings beside it."""

    def load(module, **settings):
        folder = tmp_path_factory.mktemp("features")
        shutil.copy(module.__file__, folder / "dali.py")
        (folder / "features.json").write_text(json.dumps(settings))
        spec = importlib.util.spec_from_file_location(f"served_{module.__name__}", folder / "dali.py")
        served = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(served)
        pipeline = served.serve(batch_size=16, prefetch_queue_depth=1, exec_async=False, exec_pipelined=False)
        pipeline.build()

        def run(signals, lengths):
            pipeline.feed_input("SIGNAL", [np.asarray(signal, np.float32) for signal in signals])
            pipeline.feed_input("SIGNAL_LENGTH", [np.array([length], np.int32) for length in lengths])
            features, feature_lengths = pipeline.run()
            return [(np.array(features[i]), np.array(feature_lengths[i])) for i in range(len(signals))]

        return run

    return load


@pytest.fixture(scope="session")
def all_texts():
    """Log-probability of every text, spaces at its ends and repeated ones left out, summed over all alignments."""

    def add_up(clip, labels):
        found = {}
        for path in itertools.product(range(clip.shape[1]), repeat=len(clip)):
            spelled = [label for label, _ in itertools.groupby(path) if label != len(labels)]
            text = " ".join("".join(labels[label] for label in spelled).split())
            found[text] = np.logaddexp(found.get(text, -np.inf), sum(clip[t, label] for t, label in enumerate(path)))
        return found

    return add_up


@pytest.fixture(scope="session")
def random_clip():
    """Makes log-probabilities, [frames, labels]: of a space, two letters and the blank unless told otherwise."""

    def make(num_frames, seed=0, num_labels=4):
        scores = np.random.default_rng(seed).normal(scale=1.5, size=(num_frames, num_labels))
        return (scores - np.log(np.exp(scores).sum(1, keepdims=True))).astype(np.float32)

    return make


@pytest.fixture
def bad_clips(tmp_path):
    """One clip for each thing that can be wrong with a file; each file is named after it."""
    noise = np.random.default_rng(0).standard_normal(32000).astype(np.float32) * 0.1
    clips = {}

    def add(name, sound, duration, text="a clip", **extra):
        path = tmp_path / f"{name}.wav"
        clips[name] = Clip(path, duration, text, **extra)
        if sound is not None:
            soundfile.write(path, sound, 16000, subtype="FLOAT")

    add("missing", None, 2.0)
    add("text", None, 2.0)
    clips["text"].audio_filepath.write_text("this is no sound")
    add("pipe", None, 2.0)
    os.mkfifo(clips["pipe"].audio_filepath)
    add("truncated", None, 2.0)
    soundfile.write(tmp_path / "truncated.flac", noise, 16000)
    data = (tmp_path / "truncated.flac").read_bytes()
    clips["truncated"].audio_filepath.write_bytes(data[: len(data) // 2])
    add("empty", noise[:0], 2.0)
    add("silent", np.zeros_like(noise), 2.0)
    add("offset", np.full_like(noise, 0.5), 2.0)
    for name, value in (("nan", np.nan), ("infinite", np.inf)):
        add(name, np.where(np.arange(32000) == 5000, np.float32(value), noise), 2.0)
    add("longer", noise, 1.0)
    add("endless", np.tile(noise, 10), 1.0)
    add("dense", noise, 2.0, "as fast as nobody can speak " * 8)
    add("segment", noise, 2.0, offset=1.0)
    return clips


@pytest.fixture
def arpa(tmp_path):
    """A language model of the words `a` and `ab`."""
    path = tmp_path / "lm.arpa"
    path.write_text(ARPA)
    return path
