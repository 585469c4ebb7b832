"""Ways in which batches could form from clips of mixed length, and a model repository for each of them.

Each candidate is the shipped repository with changes made by code: on the parsed configurations, on the acoustic
graph, and by a padding stage behind the shipped features.
"""

import json
import shutil
from pathlib import Path
from typing import Literal

import onnx
from tritonclient.grpc import model_config_pb2 as pb

from carnelian_perf.repository import copy_model, read_config, write_config
from carnelian_perf.traffic.graph import count_frames, pad_inside
from carnelian_perf.traffic.loops import PROCESSED_FRAMES

Candidate = Literal["buckets", "feature_batch", "ragged_padded", "ragged"]
"""What pads clips: the feature stage, to :data:`BUCKETS_S` or to the longest clip of its batch; the acoustic graph; or,
as shipped, nothing."""
BUCKETS_S = (4, 8, 16, 60)
"""Longest clip of each bucket in seconds; the last one is the longest clip that is served."""
FRAMES_PER_S = 100
VERSION = "1"
TITLES: dict[Candidate, str] = {
    "buckets": f"(a) buckets of {', '.join(map(str, BUCKETS_S))} s",
    "feature_batch": "(b) padded to the feature stage's batch",
    "ragged_padded": "(c) ragged, padded in the graph",
    "ragged": "(c) ragged, as shipped",
}
"""All candidates -> what tables call them."""


def build_variant(
    shipped: Path, target: Path, model: str, candidate: Candidate, queue_delay_ms: float, padded: onnx.ModelProto
) -> None:
    """Write a repository that forms batches as the candidate says.

    Args:
        shipped: The repository to start from.
        target: A folder to make.
        model: The recogniser; others are left out.
        candidate: What to change.
        queue_delay_ms: How long the acoustic stage waits for more requests, in milliseconds.
        padded: The network for padded batches: FEATURES [rows, num_mels, frames], FEATURE_LENGTH [rows, 1].
    """
    copy_model(shipped, target, model)
    ensemble = read_config(target / model)
    count_in_ensemble(ensemble, f"{model}_acoustic")
    write_config(target / model, ensemble)
    acoustic = target / f"{model}_acoustic"
    config = read_config(acoustic)
    change_acoustic(config, candidate, queue_delay_ms)
    write_config(acoustic, config)
    graph_path = acoustic / VERSION / "model.onnx"
    if candidate == "ragged":
        graph = onnx.load(graph_path)
    else:
        graph = pad_inside(padded) if candidate == "ragged_padded" else padded
    onnx.save(count_frames(graph), graph_path)
    if candidate in ("buckets", "feature_batch"):
        _pad_features(target / f"{model}_features", candidate)


def change_acoustic(config: pb.ModelConfig, candidate: Candidate, queue_delay_ms: float) -> None:
    """Change an acoustic stage's configuration for a candidate; it also answers :data:`PROCESSED_FRAMES`."""
    config.dynamic_batching.max_queue_delay_microseconds = round(1000 * queue_delay_ms)
    config.output.add(name=PROCESSED_FRAMES, data_type=pb.TYPE_FP32, dims=[1])
    if candidate in ("buckets", "feature_batch"):
        del config.batch_input[:]
        for tensor in config.input:
            tensor.allow_ragged_batch = False


def count_in_ensemble(config: pb.ModelConfig, acoustic: str) -> None:
    """Change an ensemble's configuration so that it also answers its acoustic stage's :data:`PROCESSED_FRAMES`."""
    config.output.add(name=PROCESSED_FRAMES, data_type=pb.TYPE_FP32, dims=[1])
    for step in config.ensemble_scheduling.step:
        if step.model_name == acoustic:
            step.output_map[PROCESSED_FRAMES] = PROCESSED_FRAMES


def _pad_features(stage: Path, candidate: Candidate) -> None:
    if candidate == "feature_batch":  # clips must meet there
        config = read_config(stage)
        config.dynamic_batching.ClearField("preferred_batch_size")
        write_config(stage, config)
    folder = stage / VERSION
    (folder / "dali.py").rename(folder / "shipped.py")
    shutil.copyfile(Path(__file__).with_name("padded_features.py"), folder / "dali.py")
    buckets = [seconds * FRAMES_PER_S + 1 for seconds in BUCKETS_S] if candidate == "buckets" else []
    (folder / "padding.json").write_text(json.dumps({"bucket_frames": buckets}))
