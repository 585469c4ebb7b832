"""What an open loop makes of the answers of a real gRPC server, which says the same of every clip."""

import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from carnelian_perf.clips import WavClip
from carnelian_perf.traffic.loops import PROCESSED_FRAMES, drive_open
from tritonclient.grpc import InferenceServerClient, service_pb2, service_pb2_grpc

CLIP = WavClip(wav=b"RIFF", duration_s=1.0, frames=1)
OUTPUTS = {
    "TRANSCRIPT": ("BYTES", struct.pack("<I", 5) + b"a few"),
    PROCESSED_FRAMES: ("FP32", struct.pack("<f", 2.0)),
}


class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self) -> None:
        self.outputs = OUTPUTS

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802  (as in the protocol)
        answer = service_pb2.ModelInferResponse(model_name=request.model_name)
        for name, (datatype, content) in self.outputs.items():
            answer.outputs.add(name=name, datatype=datatype, shape=[1, 1])
            answer.raw_output_contents.append(content)
        return answer


@pytest.fixture
def triton() -> Triton:
    return Triton()


@pytest.fixture
def client(triton):
    server = grpc.server(ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with InferenceServerClient(f"127.0.0.1:{port}") as client:
        yield client
    server.stop(None).wait()


def test_latencies_are_from_when_a_clip_was_due_and_none_is_sent_before(client):
    outcome = drive_open(client, "model", [CLIP], [0, 0], [-100.0, 0.5])  # the first is sent late, the other in time
    assert [(answer.transcript, answer.processed_frames) for answer in outcome.answers] == [("a few", 2.0)] * 2
    in_time, late = sorted(answer.latency_s for answer in outcome.answers)
    assert 0 < in_time < 100 < late


def test_an_answer_that_cannot_be_read_is_an_error_and_not_waited_for(client, triton):
    triton.outputs = {}
    outcome = drive_open(client, "model", [CLIP], [0, 0], [0.0, 0.0])
    assert not outcome.answers
    assert len(outcome.errors) == 2
    assert outcome.errors[0].startswith("clip 0: AttributeError(")
