"""Makes, with NVIDIA's NeMo itself, what the tests hold the import of `.nemo` files to. Needs no Carnelian.

    pip install torch==2.13.0 "nemo_toolkit[asr]==3.0.0"     # an environment of its own: 2.2 GB
    python nemo_models.py make .                             # quartznet.nemo, jasper.nemo, their .npz
    python nemo_models.py make DIRECTORY --full              # the same of QuartzNet 15x5, 76 MB: not checked in
    python nemo_models.py say FILE.nemo FILE.npz             # what NeMo says with any file, one of ours too

Weights are random, the statistics of the batch norms too, so that every tensor matters. An `.npz` holds, for each clip
of `signals()`, the features and the log-probabilities of the clip in a ragged batch: `features_0`, `log_probs_0`, ...
"""

import argparse
import tarfile
from pathlib import Path

import numpy as np
import torch
from nemo.collections.asr.models import EncDecCTCModel
from omegaconf import DictConfig

SECONDS = (0.503, 1.1, 0.26)  # the second is a whole number of hops: frame counts differ there between versions
LABELS = {"quartznet": list(" abcdefghijklmnopqrstuvwxyz'"), "jasper": list(" abäöüßłżąéñж中文字")}


def signals() -> list[np.ndarray]:
    """Noise with the slope and the rhythm of speech, 16 kHz."""
    rng = np.random.default_rng(1)
    clips = []
    for seconds in SECONDS:
        noise = rng.standard_normal(round(seconds * 16_000) + 1)
        rhythm = 1 + np.sin(np.arange(len(noise) - 1) / 900)
        clips.append((0.05 * (noise[1:] + noise[:-1]) * rhythm).astype(np.float32))
    return clips


def block(filters: int, kernel: int, repeat: int = 1, stride: int = 1, dilation: int = 1, **others) -> dict:
    """One entry of `encoder.jasper`."""
    sizes = {"kernel": [kernel], "stride": [stride], "dilation": [dilation]}
    return {"filters": filters, "repeat": repeat, **sizes, "dropout": 0.1, "residual": False, **others}


def tiny_blocks(name: str) -> list[dict]:
    """Every kind of layer that the published models have."""
    if name == "jasper":
        dense = {"residual": True, "residual_dense": True}
        body = [block(8, 5, 2, **dense), block(8, 5, 2, **dense), block(10, 7, 2, **dense)]
        return [block(8, 5, stride=2), *body, block(10, 5, dilation=2), block(12, 1)]
    body = [block(16, 9, 2, residual=True, separable=True) for _ in range(2)]
    body.append(block(24, 13, 3, residual=True, separable=True))
    return [block(16, 11, stride=2, separable=True), *body, block(24, 15, dilation=2, separable=True), block(32, 1)]


def full_blocks() -> list[dict]:
    """QuartzNet 15x5."""
    body = [(256, 33), (256, 39), (512, 51), (512, 63), (512, 75)]
    stem = block(256, 33, stride=2, separable=True)
    middle = [block(*sizes, 5, residual=True, separable=True) for sizes in body for _ in range(3)]
    return [stem, *middle, block(512, 87, dilation=2, separable=True), block(1024, 1)]


def build(name: str, blocks: list[dict]) -> EncDecCTCModel:
    """A model of random weights."""
    modules = "nemo.collections.asr.modules"
    preprocessor = {"normalize": "per_feature", "window_size": 0.02, "window_stride": 0.01, "window": "hann"}
    preprocessor |= {"features": 64, "n_fft": 512, "frame_splicing": 1, "dither": 1e-5, "sample_rate": 16_000}
    labels = LABELS[name]
    decoder = {"feat_in": blocks[-1]["filters"], "num_classes": len(labels), "vocabulary": labels}
    config = {
        "sample_rate": 16_000,
        "labels": labels,
        "preprocessor": {"_target_": f"{modules}.AudioToMelSpectrogramPreprocessor", **preprocessor},
        "encoder": {
            "_target_": f"{modules}.ConvASREncoder",
            "feat_in": 64,
            "activation": "relu",
            "conv_mask": True,
            "jasper": blocks,
        },
        "decoder": {"_target_": f"{modules}.ConvASRDecoder", **decoder},
    }
    torch.manual_seed(1)
    model = EncDecCTCModel(cfg=DictConfig(config))
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.bias, std=0.2)
    torch.nn.init.normal_(model.decoder.decoder_layers[0].weight, std=0.5)
    model.train()  # the norms see some speech-like noise, so that nothing fades on its way through the blocks
    with torch.no_grad():
        for _ in range(30):
            hear(model)
    return model


def hear(model: EncDecCTCModel) -> tuple[torch.Tensor, ...]:
    """Features, their lengths, log-probabilities and theirs of `signals()` in one ragged batch."""
    clips = [torch.from_numpy(clip) for clip in signals()]
    batch = torch.nn.utils.rnn.pad_sequence(clips, batch_first=True)
    features, lengths = model.preprocessor(input_signal=batch, length=torch.tensor([len(clip) for clip in clips]))
    encoded, ends = model.encoder(audio_signal=features, length=lengths)
    return features, lengths, model.decoder(encoder_output=encoded), ends


@torch.no_grad()
def say(model: EncDecCTCModel) -> dict[str, np.ndarray]:
    """Features and log-probabilities of `signals()` in one ragged batch, each cut to its own length."""
    features, lengths, log_probs, ends = hear(model.eval())
    return {
        **{f"features_{i}": features[i, :, : lengths[i]].numpy() for i in range(len(SECONDS))},
        **{f"log_probs_{i}": log_probs[i, : ends[i]].numpy() for i in range(len(SECONDS))},
    }


def make(directory: Path, is_full: bool) -> None:
    """Write models and what they say."""
    for name in ["quartznet"] if is_full else ["quartznet", "jasper"]:
        model = build(name, full_blocks() if is_full else tiny_blocks(name))
        path = directory / f"{name}.nemo"
        model.save_to(str(path))
        # Compressed, as NeMo 1.0 wrote its files and today's does not: so both kinds are there.
        if name == "quartznet":
            with tarfile.open(path) as plain:
                parts = [(member, plain.extractfile(member).read()) for member in plain if member.isfile()]
            with tarfile.open(path, "w:gz") as compressed:
                for member, content in parts:
                    (directory / "part").write_bytes(content)
                    compressed.add(directory / "part", arcname=member.name)
            (directory / "part").unlink()
        said = say(model)
        if name == "jasper":  # whose features are the same
            said = {key: array for key, array in said.items() if key.startswith("log_probs")}
        np.savez_compressed(path.with_suffix(".npz"), **said)


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make")
    maker.add_argument("directory", type=Path)
    maker.add_argument("--full", action="store_true")
    sayer = commands.add_parser("say")
    sayer.add_argument("model", type=Path)
    sayer.add_argument("target", type=Path)
    options = parser.parse_args()
    if options.command == "make":
        make(options.directory, options.full)
    else:
        np.savez_compressed(options.target, **say(EncDecCTCModel.restore_from(str(options.model), map_location="cpu")))


if __name__ == "__main__":
    main()
