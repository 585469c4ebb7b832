"""The demo model on a GPU, through the server: with onnxruntime-gpu, where CUDA_VISIBLE_DEVICES names a GPU."""

import os
from pathlib import Path

import onnxruntime
import pytest
from carnelian_client import CarnelianClient
from carnelian_export.repository import write_model
from carnelian_export.target import Target
from carnelian_serving.backends.onnxruntime.providers import prepares_each_shape
from carnelian_training.checkpoint import load_model
from google.protobuf import text_format
from tritonclient import grpc
from tritonclient.grpc import model_config_pb2 as pb

ROOT = Path(__file__).parents[2]
CLIPS = sorted(path for path in (ROOT / "demo/clips").iterdir() if path.suffix != ".jsonl")

pytestmark = pytest.mark.skipif(
    not os.environ["CUDA_VISIBLE_DEVICES"] or "CUDAExecutionProvider" not in onnxruntime.get_available_providers(),
    reason="needs an NVIDIA GPU, CUDA_VISIBLE_DEVICES=0 and onnxruntime-gpu",
)


@pytest.mark.parametrize("provider", [None, "cuda"])
def test_the_acoustic_stage_runs_on_the_gpu_and_hears_what_it_hears_on_the_cpu(tmp_path, provider, make_server):
    config, network = load_model(ROOT / "demo/quartznet_demo.pt")
    write_model(tmp_path / "models", "quartznet_demo", config, network, target=Target(provider=provider))
    path = tmp_path / "models/quartznet_demo_acoustic/config.pbtxt"
    heard = {}
    for kind in ("as exported", "KIND_CPU"):
        if kind != "as exported":
            config = text_format.Parse(path.read_text(), pb.ModelConfig())
            config.instance_group[0].kind = pb.ModelInstanceGroup.Kind.Value(kind)
            path.write_text(text_format.MessageToString(config))
        with make_server(tmp_path / "models") as server:
            with grpc.InferenceServerClient(server.grpc_url) as triton:
                config = triton.get_model_config("quartznet_demo_acoustic").config
            with CarnelianClient(server.grpc_url) as client:
                alone = [client.transcribe(clip) for clip in CLIPS]
                together = list(client.transcribe_many(CLIPS * 4, concurrency=16))
        warned = any("prepares convolutions anew whenever a batch has another shape" in line for line in server.log)
        prepares = kind == "as exported" and prepares_each_shape(onnxruntime.__version__)
        assert warned == (prepares and provider is None)  # else the graph has few shapes
        heard[pb.ModelInstanceGroup.Kind.Name(config.instance_group[0].kind)] = alone
        assert [result.text for result in together] == [result.text for result in alone] * 4
    assert list(heard) == ["KIND_GPU", "KIND_CPU"]
    for on_gpu, on_cpu in zip(*heard.values(), strict=True):
        assert on_gpu.text == on_cpu.text
        assert on_gpu.confidence == pytest.approx(on_cpu.confidence, abs=0.01)
