"""Makes a batch of rows from the requests of one `execute`, and one response for each request from its results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import triton_python_backend_utils as pb_utils

from carnelian_serving.backends.model_config import Array, ModelConfig

Rows = dict[str, list[Array]]
"""By tensor name, one array for each request, with the batch dimension first."""

RunBatch = Callable[[Rows], Rows]

MAX_ID_BYTES = 1024
MAX_PARAMETERS_BYTES = 5_000_000
"""The most bytes of a request's parameters, as JSON: those of the longest list of hot words that a `<model>_ctc` takes,
300,000 characters in 10,000 strings, with room to spare. One of Unicode's higher planes, escaped, has 14 bytes."""


class Batches:
    """Answers the requests of one model: those of an `execute` run as one batch, or as several.

    After an error each request runs by itself, so that it fails alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        run_batch: RunBatch,
        *,
        split: Callable[[Rows], Iterable[slice]] | None = None,
        error_code: str = "INTERNAL",
    ) -> None:
        """Describe how batches run.

        Args:
            config: The model's configuration.
            run_batch: Turns input arrays into output arrays, one of each for every request. Outputs may be views that
                the next call overwrites, because Triton has copied them by then.
            split: Divides the requests, by their input arrays, into consecutive parts that run together. The requests
                of a part are answered as soon as it has run.
            error_code: The code of the answer to a request that fails, as the native backend gives it: a name in
                `pb_utils.TritonError`.
        """
        self._config = config
        self._run_batch = run_batch
        self._split = split
        self._error_code = getattr(pb_utils.TritonError, error_code)
        self._has_answered = False

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return a response for each request, in their order; None for those that have been answered already."""
        inputs = [self._read_inputs(request) for request in requests]
        if len(requests) == 1:
            return list(self._answer(requests, inputs))
        # Each answer is sent by itself. If answers that are returned find no room in /dev/shm, all fail with the first;
        # and if some were sent before, Triton (2.51) frees what it has of those a second time, and crashes.
        responses: list[Any] = []
        for part in self._split(_transpose(inputs)) if self._split else [slice(0, len(requests))]:
            answers = self._answer(requests[part], inputs[part])
            responses += map(self._send, requests[part], answers)
        return responses

    def _read_inputs(self, request: Any) -> dict[str, Array]:
        found = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        return {tensor.name: found[tensor.name] for tensor in self._config.inputs}

    def _answer(self, requests: Sequence[Any], inputs: Sequence[dict[str, Array]]) -> Iterable[Any]:
        """Return a response for each request; after an error each is made when it is asked for, by a run of its own."""
        try:
            for request in requests:
                _check_size(request)
            return self._respond(requests, self._run_batch(_transpose(inputs)))
        except Exception as error:
            if len(requests) == 1:
                return [self._refuse(requests[0], error)]
        return chain.from_iterable(
            self._answer([request], [arrays]) for request, arrays in zip(requests, inputs, strict=True)
        )

    def _respond(self, requests: Sequence[Any], outputs: Rows) -> list[Any]:
        responses = []
        for index, request in enumerate(requests):
            wanted = set(request.requested_output_names())
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor(tensor.name, outputs[tensor.name][index])
                        for tensor in self._config.outputs
                        if tensor.name in wanted
                    ]
                )
            )
        self._has_answered = True
        return responses

    def _refuse(self, request: Any, error: Exception) -> Any:
        reason = f"[request id: {_id_of(request):.{MAX_ID_BYTES}}] {self._config.name!r} refuses: {error}"
        if self._has_answered:
            pb_utils.Logger.log_info(reason)
        else:
            # tritonserver 2.51 may crash when a warm-up fails, and then nothing else says why. Its logger would: that
            # hands lines to a thread, whose server may be gone before it takes this one.
            sys.stderr.write(f"error: {json.dumps(reason, ensure_ascii=False)[1:-1]}\n")
            sys.stderr.flush()
        code = pb_utils.TritonError.INVALID_ARG if isinstance(error, _TooLongError) else self._error_code
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))

    def _send(self, request: Any, answer: Any) -> Any:
        """Send a request its answer; return what `execute` has to return for it."""
        try:
            request.get_response_sender().send(answer, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception as error:  # an exception that left `execute` now would end the server
            pb_utils.Logger.log_error(f"an answer of {self._config.name!r} was not sent: {error}")
            # What is returned for a request that has its answer is thrown away, but makes Triton look for requests
            # that have none, and send them an error of its own.
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("not sent"))
        return None


def check_output(config: ModelConfig, position: int, row_shape: Sequence[int], dtype: Any) -> None:
    """Raise ValueError if an output of the model does not agree with the configuration.

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


class _TooLongError(ValueError):
    """A request has a longer id, or longer parameters, than any caller needs."""


def _check_size(request: Any) -> None:
    """Raise _TooLongError for a request that each later stage would copy to its shared memory, which keeps the room."""
    for field, read, most in (
        ("id", request.request_id, MAX_ID_BYTES),
        ("parameters", request.parameters, MAX_PARAMETERS_BYTES),
    ):
        try:
            text = read()
            num_bytes = len(text.encode()) if 4 * len(text) > most else 0  # a character has at most 4
        except UnicodeDecodeError as error:  # Triton's HTTP server lets such bytes pass
            num_bytes = len(error.object)
        if num_bytes > most:
            raise _TooLongError(
                f"wrong option: the `{field}` of a request must have at most {most:,} bytes, but this one has "
                f"{num_bytes:,}; send less"
            )


def _transpose(inputs: Sequence[dict[str, Array]]) -> Rows:
    return {name: [arrays[name] for arrays in inputs] for name in inputs[0]}


def _id_of(request: Any) -> str:
    try:
        return str(request.request_id())
    except UnicodeDecodeError:  # Triton's HTTP server lets such bytes pass
        return "not UTF-8"
