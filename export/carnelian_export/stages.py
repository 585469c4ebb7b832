"""Write a recogniser's folders, without the acoustic model: two ensembles, three stages, the shared audio_decode."""

import json
import logging
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from carnelian_training import ctc, front_end
from carnelian_training.config import Config
from carnelian_training.ctc.language_model import is_kenlm_binary
from carnelian_training.evaluation.evaluate import frame_duration_s
from carnelian_training.models.wav2vec2_config import Wav2Vec2Config
from carnelian_training.waveform import WaveformSettings

from carnelian_export.model_configs import (
    AUDIO_DECODE,
    SOURCES,
    STAGES,
    TensorSizes,
    build_configs,
    read_config,
    to_text,
    warmup_lengths,
)
from carnelian_export.profiles import MAX_AUDIO_S
from carnelian_export.target import Target
from carnelian_export.tuning import apply_tuning

logger = logging.getLogger(__name__)

MAX_BATCH_SIZE = 32
MAX_ATTENDING = 8
"""The largest number of rows in a batch of wav2vec 2.0: attention over a clip of 60 s holds 9 million numbers for each
head."""

VERSION = "1"
CALIBRATION = "calibration.json"
_ENSEMBLE_README = (
    "An ensemble has no files. Git drops empty folders, so this file keeps this one, which Triton needs.\n"
)


class RepositoryError(ValueError):
    """The model must not be written into this repository under this name; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How a served model decodes unless a request says otherwise."""

    language_model: Path | None = None
    """An n-gram model, ARPA or KenLM binary; it is copied beside the decoder."""
    options: Mapping[str, object] = field(default_factory=dict)
    """The fields of `ctc.Options` that differ from its defaults; `dataclasses.asdict(options)` gives all."""
    calibration: Path | None = None
    """The calibration of confidences that `carnelian-perf words` wrote for this network."""
    neural_language_model: Path | None = None
    """The rescoring model in ONNX, as `carnelian-export --out` writes it; it is copied beside the decoder."""

    def parameters(self, labels: Sequence[str]) -> dict[str, str]:
        """Return the parameters of the `_ctc` stage's configuration: every option, and the language models' file names.

        Raises:
            RepositoryError: The n-grams are damaged.
            LanguageModelError, NeuralLanguageModelError: A language model does not fit the labels.
            OptionError: An option does not exist, or must not have this value.
        """
        if self.language_model:
            _check_undamaged(self.language_model)
        decoder = ctc.Decoder(
            labels, 1.0, language_model=self.language_model, neural_language_model=self.neural_language_model
        )
        options = decoder.change_options(self.options)
        parameters = {key: str(value).lower() for key, value in asdict(options).items() if key != "hotwords"}
        if options.hotwords:
            parameters["hotwords"] = json.dumps(options.hotwords)
        return parameters | {key: path.name for key, path in self.language_models.items()}

    @property
    def language_models(self) -> dict[str, Path]:
        """The given language models, by the names of the decoder's arguments."""
        models = {"language_model": self.language_model, "neural_language_model": self.neural_language_model}
        return {name: path for name, path in models.items() if path}


_OF_DAMAGE = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


def _check_undamaged(path: Path) -> None:
    """Load a binary of KenLM in another process first: if the file is damaged, reading it can end the process."""
    with suppress(OSError):  # the decoder reports a file that does not exist
        if not is_kenlm_binary(path):
            return
    load = "import os, sys, kenlm; kenlm.Model(os.fsencode(sys.argv[1]))"
    ended = subprocess.run([sys.executable, "-c", load, path], capture_output=True, check=False).returncode
    if -ended in _OF_DAMAGE:  # not SIGKILL, which comes of too little memory
        raise RepositoryError(
            f"{path} is damaged: KenLM ended with {signal.Signals(-ended).name} as it loaded it; make it anew"
        )


def write_stages(folder: Path, name: str, config: Config, decoding: Decoding, target: Target) -> None:
    """Write a recogniser's folders into the empty folder `folder`, without the file of the acoustic stage.

    Raises:
        RepositoryError: A language model's file is damaged, has the name of another file of the model, or has a name
            that is not ASCII.
        LanguageModelError, NeuralLanguageModelError, OptionError: The decoding does not fit the labels.
        TuningError: A stage has no such setting, or must not have this value.
    """
    rows = () if isinstance(config.features, WaveformSettings) else (config.features.num_mels,)
    sizes = TensorSizes(
        features=(*rows, -1),
        hop_samples=config.features.hop_samples,
        max_batch_size=MAX_ATTENDING if isinstance(config.model, Wav2Vec2Config) else MAX_BATCH_SIZE,
        vocabulary=len(config.labels) + 1,
    )
    for model, message in build_configs(name, sizes, decoding.parameters(config.labels), target).items():
        (folder / model / VERSION).mkdir(parents=True)
        (folder / model / "config.pbtxt").write_text(to_text(message))
    for ensemble in (name, f"{name}_pcm"):
        (folder / ensemble / VERSION / "README.md").write_text(_ENSEMBLE_README)
    features, acoustic, decoder = (folder / f"{name}_{stage}" / VERSION for stage in STAGES)
    _fill_features(features, config)
    for stage, hop_samples in ((features, 1), (acoustic, sizes.hop_samples)):
        warmup = stage.parent / "warmup"
        warmup.mkdir()
        for file, length in warmup_lengths(hop_samples).items():
            (warmup / file).write_bytes(struct.pack("<i", length))
    _fill_decoder(decoder, name, config, decoding)
    _write_audio_decode(folder / AUDIO_DECODE, target)


def _fill_features(version: Path, config: Config) -> None:
    features = front_end.served_by(config.features)
    shutil.copyfile(str(features.__file__), version / "dali.py")
    _write_json(version / features.SETTINGS_FILE, {"max_audio_s": MAX_AUDIO_S, **asdict(config.features)})


def _fill_decoder(version: Path, name: str, config: Config, decoding: Decoding) -> None:
    for source in ("model.py", "metrics.py"):
        shutil.copyfile(SOURCES / "ctc" / source, version / source)
    shutil.copytree(Path(ctc.__file__).parent, version / "ctc", ignore=shutil.ignore_patterns("__pycache__"))
    if decoding.calibration:
        measured = ctc.Calibration.read(decoding.calibration)
        if measured.model not in ("", config.name):
            logger.warning(
                "the corrections in %s were measured on %s, not on %s",
                decoding.calibration,
                measured.model,
                config.name,
            )
        (version / CALIBRATION).write_text(measured.to_json())
    settings: dict[str, object] = {
        "labels": list(config.labels),
        "frame_s": frame_duration_s(config),
        "max_audio_s": MAX_AUDIO_S,
    }
    if isinstance(config.model, Wav2Vec2Config):
        settings["min_samples"] = config.model.window
    _write_json(version / "ctc.json", settings)
    for path in decoding.language_models.values():
        if not path.name.isascii():  # Python in Triton's stub opens no other name, whatever the locale
            raise RepositoryError(f"a language model's file must have a name in ASCII: rename {path}")
        if (version / path.name).exists():
            raise RepositoryError(
                f"a language model's file must have a name of its own beside the other files of {name}_ctc, but there "
                f"is a {path.name} already: rename {path}"
            )
        shutil.copyfile(path, version / path.name)


def _write_audio_decode(decode: Path, target: Target) -> None:
    (decode / VERSION).mkdir(parents=True)
    shutil.copyfile(SOURCES / AUDIO_DECODE / "config.pbtxt", decode / "config.pbtxt")
    if "decode" in target.tuning:
        tuned = read_config(decode / "config.pbtxt")
        apply_tuning(tuned, target.tuning["decode"])
        (decode / "config.pbtxt").write_text(to_text(tuned))
    shutil.copyfile(SOURCES / AUDIO_DECODE / "dali.py", decode / VERSION / "dali.py")
    shutil.copytree(SOURCES / AUDIO_DECODE / "warmup", decode / "warmup")


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
