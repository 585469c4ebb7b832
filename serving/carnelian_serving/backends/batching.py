"""From the requests of one `execute` to a batch of rows, and back to one response each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from carnelian_serving.backends.model_config import Array, ModelConfig

Rows = dict[str, list[Array]]
"""Tensor name -> one array for each request, batch dimension first."""

RunBatch = Callable[[Rows], Rows]

_answered: set[str] = set()
"""The model of this process, once it has answered a request."""


def execute(
    config: ModelConfig,
    requests: Sequence[Any],
    run_batch: RunBatch,
    split: Callable[[Rows], Iterable[slice]] | None = None,
    error_code: str = "INTERNAL",
) -> list[Any]:
    """Run all requests as one batch, or as several; after an error each one by itself, so that it fails alone.

    Args:
        config: The model's configuration.
        requests: What Triton's batcher put together.
        run_batch: From input arrays to output arrays, request by request. Those may be views that the next
            call overwrites: Triton has copied them by then, but for the single runs.
        split: From the input arrays to consecutive requests that run together. They are answered as soon as they
            have run.
        error_code: Of the answer to a request that fails, the native backend's; a name in `pb_utils.TritonError`.

    Returns:
        For each request, in their order, a response, or None where it has been answered.
    """
    inputs = [_read_inputs(config, request) for request in requests]
    if len(requests) == 1:
        return _answer(config, requests, inputs, run_batch, error_code)
    # Each answer is sent by itself. Of returned ones that find no room in /dev/shm, all fail with the first, and after
    # some were sent, Triton (2.51) frees what it has of those for the second time, and crashes.
    responses: list[Any] = []
    for part in split(_transpose(inputs)) if split else [slice(0, len(requests))]:
        answers = _answer(config, requests[part], inputs[part], run_batch, error_code)
        for request, answer in zip(requests[part], answers, strict=True):
            responses.append(_send(config, request, answer))
    return responses


def _send(config: ModelConfig, request: Any, answer: Any) -> Any:
    """Answer a request; return what `execute` has to return for it."""
    try:
        request.get_response_sender().send(answer, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    except Exception as error:  # any that left `execute` now would end the server
        pb_utils.Logger.log_error(f"an answer of {config.name!r} was not sent: {error}")
        # What comes back for a request that has been sent an answer is thrown away, but makes Triton look for those
        # that have none, and send them an error of its own.
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("not sent"))
    return None


def check_output(config: ModelConfig, position: int, row_shape: Sequence[int], dtype: Any) -> None:
    """Raise ValueError where an output of the model does not agree with the configuration.

    Args:
        config: The model's configuration.
        position: The output's place in the configuration.
        row_shape: Its shape without the batch dimension.
        dtype: Its element type.
    """
    want = config.outputs[position]
    if want.accepts(row_shape) and dtype == want.dtype:
        return
    advice = "; reshape a scalar to [1] in the model" if len(row_shape) == 0 else ""
    raise ValueError(
        f"output {want.name!r} of {config.name!r} (number {position}) must be {want.dtype} "
        f"{list(want.dims)}, but the model gave {dtype} {list(row_shape)}{advice}"
    )


def _answer(
    config: ModelConfig,
    requests: Sequence[Any],
    inputs: Sequence[dict[str, Array]],
    run_batch: RunBatch,
    error_code: str,
) -> list[Any]:
    try:
        return _respond(config, requests, run_batch(_transpose(inputs)))
    except Exception as error:
        if len(requests) == 1:
            return [_refuse(config, requests[0], error, error_code)]
    responses = []
    for request, arrays in zip(requests, inputs, strict=True):
        try:
            outputs = run_batch(_transpose([arrays]))
            copies = {name: [np.copy(array) for array in rows] for name, rows in outputs.items()}
            responses += _respond(config, [request], copies)
        except Exception as error:
            responses.append(_refuse(config, request, error, error_code))
    return responses


def _read_inputs(config: ModelConfig, request: Any) -> dict[str, Array]:
    found = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    return {tensor.name: found[tensor.name] for tensor in config.inputs}


def _transpose(inputs: Sequence[dict[str, Array]]) -> Rows:
    return {name: [arrays[name] for arrays in inputs] for name in inputs[0]}


def _respond(config: ModelConfig, requests: Sequence[Any], outputs: Rows) -> list[Any]:
    responses = []
    for index, request in enumerate(requests):
        wanted = set(request.requested_output_names())
        responses.append(
            pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor(tensor.name, outputs[tensor.name][index])
                    for tensor in config.outputs
                    if tensor.name in wanted
                ]
            )
        )
    _answered.add(config.name)
    return responses


def _refuse(config: ModelConfig, request: Any, error: Exception, error_code: str) -> Any:
    # tritonserver 2.51 may crash where a warm-up fails: then nothing else says why.
    log = pb_utils.Logger.log_info if config.name in _answered else pb_utils.Logger.log_error
    log(f"[request id: {_id_of(request)}] {config.name!r} refuses: {error}")
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), getattr(pb_utils.TritonError, error_code)))


def _id_of(request: Any) -> str:
    try:
        return str(request.request_id())
    except UnicodeDecodeError:  # which Triton's HTTP server lets pass
        return "not UTF-8"
