"""Check that an exported graph gives the network's log-probabilities, for clips alone and in a ragged batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import torch
from carnelian_training.models.network import CtcNetwork
from carnelian_training.models.wav2vec2 import Wav2Vec2

from carnelian_export.graph.gaps import LOUDEST
from carnelian_export.graph.to_onnx import OUTPUTS
from carnelian_export.profiles import SHAPED_INPUTS

ClipFeatures = npt.NDArray[np.float32]
"""The FEATURES of one clip: [num_mels, frames], or [samples] of a waveform; float32."""
Scores = tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]
"""LOG_PROBS [rows, frames, labels] float32 and LOG_PROB_LENGTH [rows, 1] int32 of a batch."""
Scorer = Callable[[list[ClipFeatures], list[int]], Scores]
"""A function that runs some form of the network on a batch: clips and their FEATURE_LENGTH -> scores."""


@dataclass(frozen=True)
class Tolerance:
    """How far the log-probabilities of an export may be from PyTorch's in float32."""

    worst: float
    """The largest allowed difference of any label in any frame."""
    mean: float
    """The largest allowed mean difference over all labels and frames."""

    def check(self, differences: npt.NDArray[np.float32], what: str, where: str, advice: str = "") -> float:
        """Return the largest difference, if all are within this tolerance.

        Args:
            differences: The absolute differences, of any shape.
            what: The name of what was compared, for the error message.
            where: The inputs on which it was compared, for the error message.
            advice: The end of the error message.

        Raises:
            ParityError: The differences are over this tolerance.
        """
        worst, mean = float(differences.max()), float(differences.mean())
        # "not <=", so that NaN is refused as well
        if not (worst <= self.worst and mean <= self.mean):
            raise ParityError(
                f"{what} must be within {self.worst:g} of PyTorch's, and {self.mean:g} in the mean, but differ by "
                f"{worst:.3g}, and {mean:.3g} in the mean ({where}){advice}"
            )
        return worst


TOLERANCES = {"fp32": Tolerance(1e-3, 1e-4), "fp16": Tolerance(0.2, 0.05), "bf16": Tolerance(2.0, 0.1)}
"""The tolerance of each precision. Kernels sum float32 in different orders: differences of 1e-5 were seen on trained
networks, where a wrong mask or a wrong weight shows as 0.1 and more, and 0.02 and more in the mean. float16 keeps 11
bits and bfloat16 8. On the demo model, for labels down to :data:`UNLIKELY`, differences in float16 were up to 0.09,
with a mean of 0.005, and in bfloat16 up to 1.1, with a mean of 0.05. Deeper networks differ more in float16: the mean
was 0.0131 for a QuartzNet of 19 blocks, and 0.0101 to 0.0254 for wav2vec 2.0 and HuBERT, as much as with `.half()` of
`transformers`, 0.0127 to 0.0262 on speech. There the best label was the same in 98.9 to 99.5 % of the frames, and
distributions were within 0.015, where int8 may have :data:`MEAN_DISTANCE`. So in float16 it is the largest difference,
not the mean, that shows a wrong mask (0.5 and more)."""

UNLIKELY = -50.0
"""The log-probability below which tolerances are relative, because the steps between floats grow with their size. On
speech the demo model gives some labels -447, where float16 was 0.55 off and bfloat16 5.8, with the best label the same
in every frame."""

MEAN_DISTANCE = 0.1
"""The limit for int8: absolute differences of the labels' probabilities, summed over a frame's labels, averaged over
frames. Log-probabilities are no measure here: those of unlikely labels differ by much and do not matter. 0.03 was seen
on the demo model, where the best label was the same in 98.5 % of the frames, and 0.7 with the head quantised too."""

# (frames, FEATURE_LENGTH): a single frame, no samples, a tensor longer than its clip, a length beyond its tensor, ...
SHAPES = ((1, 1), (40, 40), (3, 0), (250, 120), (60, 90), (333, 333))
LONG = 5
"""The position in :data:`SHAPES` of the clip that is also scored before and after a clip as loud as :data:`LOUDEST`."""
SEED = 1


class ParityError(ValueError):
    """The exported graph and the network disagree; the message has the numbers."""


def open_graph(path: Path) -> onnxruntime.InferenceSession:
    """Open a graph in ONNX Runtime on the CPU, with as many threads as PyTorch has."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def check_parity(path: Path, network: CtcNetwork, precision: str = "fp32", name: str = "the graph") -> float:
    """Compare a graph, run by ONNX Runtime, with the network that it was exported from; see :func:`compare`.

    Args:
        path: The graph's file.
        network: The original, in float32.
        precision: The graph's precision.
        name: The graph's name in error messages, which outlive a temporary file.
    """
    session = open_graph(path)
    return compare(lambda clips, lengths: run(session, clips, lengths), network, precision, f"{name} in ONNX Runtime")


def check_distributions(
    path: Path, network: CtcNetwork, clips: Sequence[ClipFeatures], name: str = "the graph"
) -> float:
    """Compare an int8 graph, run by ONNX Runtime, with its network in PyTorch, on real clips.

    Args:
        path: The graph's file.
        network: The original, in float32.
        clips: The features of the clips.
        name: The graph's name in error messages.

    Returns:
        The mean distance between the distributions over the labels, 0 to 2.

    Raises:
        ParityError: The distance is over :data:`MEAN_DISTANCE`.
    """
    session = open_graph(path)
    distances = []
    for clip in clips:
        expected, end = score(network, clip, clip.shape[-1])
        found, _ = run(session, [clip], [clip.shape[-1]])
        distances.append(np.abs(np.exp(found[0, :end]) - np.exp(expected)).sum(1))
    distance = float(np.concatenate(distances).mean())
    if not distance <= MEAN_DISTANCE:
        raise ParityError(
            f"{name}: distributions over the labels of int8 must be within {MEAN_DISTANCE:g} of PyTorch's in the mean "
            f"over {len(clips)} clips, but differ by {distance:.3g}; give more or other clips, or export in fp32"
        )
    return distance


def compare(scorer: Scorer, network: CtcNetwork, precision: str, what: str) -> float:
    """Compare an exported network with the original, on random features.

    Args:
        scorer: The function that runs the exported network.
        network: The original, in float32.
        precision: The exported network's precision, which selects the tolerance.
        what: The exported network's name in error messages.

    Returns:
        The largest difference between log-probabilities, as it is compared with its limit: below :data:`UNLIKELY`,
        divided by as much as the limit grows.

    Raises:
        ParityError: Differences are over one of :data:`TOLERANCES`, or a length is wrong.
    """
    rng = np.random.default_rng(SEED)
    clips, lengths = [], []
    for frames, length in SHAPES:
        if isinstance(network, Wav2Vec2):  # as many samples as hops of 10 ms have, and those of a first output frame
            hop, more = network.config.stride // 2, network.config.window - network.config.stride // 2
            clips.append(rng.standard_normal(frames * hop + more, np.float32))
            lengths.append(length * hop + more if length else 0)
        else:
            clips.append(rng.standard_normal((network.config.feature_channels, frames), np.float32))
            lengths.append(length)
    batch, batch_lengths = scorer(clips, lengths)
    loud = LOUDEST * np.sign(rng.standard_normal(clips[LONG].shape, np.float32))
    # In pairs: the smallest TensorRT profile does not take three clips of this length.
    beside_loud = (
        scorer([clips[LONG], loud], [lengths[LONG]] * 2)[0][0],
        scorer([loud, clips[LONG]], [lengths[LONG]] * 2)[0][1],
    )
    differences = []
    for row, (clip, length) in enumerate(zip(clips, lengths, strict=True)):
        expected, end = score(network, clip, min(length, clip.shape[-1]))
        alone, alone_lengths = scorer([clip], [length])
        wanted = network.config.output_frames(length)
        for found in (int(batch_lengths[row, 0]), int(alone_lengths[0, 0])):
            if found != wanted:
                raise ParityError(f"{what}: {OUTPUTS[1]} must be {wanted} for {length} frames, but is {found}")
        for log_probs in (batch[row], alone[0], *(beside_loud if row == LONG else ())):
            differences.append((np.abs(log_probs[:end] - expected) / np.maximum(expected / UNLIKELY, 1)).ravel())
    return TOLERANCES[precision].check(
        np.concatenate(differences),
        f"{what}: log-probabilities of {precision}",
        f"alone, in a batch of {len(SHAPES)} clips of random features, and beside a very loud one; where PyTorch's x "
        f"is below {UNLIKELY:g}, times {UNLIKELY:g} / x",
        "" if precision == "fp32" else "; export in fp32",
    )


@torch.inference_mode()
def score(network: CtcNetwork, clip: ClipFeatures, length: int) -> tuple[npt.NDArray[np.float32], int]:
    """Score one clip alone in PyTorch: its FEATURES -> log-probabilities [frames', labels], and frames'."""
    if length == 0:
        return np.zeros((0, 1), np.float32), 0
    features = torch.from_numpy(clip).view(1, network.config.feature_channels, -1)
    log_probs, ends = network(features, torch.tensor([length]))
    end = int(ends[0])
    return log_probs[0, :end].numpy(), end


def run(session: onnxruntime.InferenceSession, clips: list[ClipFeatures], lengths: list[int]) -> Scores:
    """Run a ragged batch in ONNX Runtime: clips [num_mels, frames] or [samples] -> LOG_PROBS and LOG_PROB_LENGTH."""
    wanted = {tensor.name for tensor in session.get_inputs()}
    feeds = {name: value for name, value in make_inputs(clips, lengths).items() if name in wanted}
    log_probs, log_prob_lengths = session.run(list(OUTPUTS), feeds)
    return log_probs, log_prob_lengths


def make_inputs(clips: list[ClipFeatures], lengths: list[int]) -> dict[str, npt.NDArray[Any]]:
    """Make :data:`SHAPED_INPUTS` as Triton makes them of clips that come in one request each."""
    sizes = [clip.size for clip in clips]
    values = (
        np.concatenate([clip.ravel() for clip in clips]),
        np.array([clip.shape for clip in clips], np.int32),
        np.array(lengths, np.int32)[:, None],
        np.array(sizes, np.int32),
        np.zeros(max(sizes), np.float32),
    )
    return dict(zip(SHAPED_INPUTS, values, strict=True))
