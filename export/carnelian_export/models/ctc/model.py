"""The `<model>_ctc` stage: turns log-probabilities into text, words with times and confidences, or an error.

In: LOG_PROBS [rows, frames, labels + 1] and LOG_PROB_LENGTH [rows, 1]. Out: TRANSCRIPT and RESULT (JSON),
[rows, 1]. The stages before this one let every input pass and send its true length along, so that one bad
clip fails alone: here. The model's parameters are the defaults of the decoder's options; a request's parameters
change them for this request only.
"""

import asyncio  # noqa: F401  Triton's stub imports it with the first answer, which then takes 50 ms more
import json
import math
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from . import ctc  # type: ignore[attr-defined]  # copied beside this file by carnelian-export
from .metrics import Metrics

SETTINGS_FILE = "ctc.json"  # {"labels", "frame_s", "max_audio_s"} and, above 1, "min_samples"
CALIBRATION_FILE = "calibration.json"  # optional: corrections of times and confidences
UNKNOWN_S = 134_217  # the seconds of audio_decode's UNKNOWN_LENGTH
MAX_LOG_PROB = 1e-2  # float16 may round a log-probability to a little above 0
LANGUAGE_MODELS = ("language_model", "neural_language_model")  # parameters that name files; the others are options
WRONG_OPTION = "wrong option"
MAX_ID_BYTES = 1024
MAX_PARAMETERS_BYTES = 5_000_000  # as JSON: those of the longest list of hot words, with every character escaped
_quote = json.encoder.encode_basestring


class TritonPythonModel:
    """The model as Triton's Python backend runs it. It decodes all rows of all requests at once."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the settings beside this file, the model's parameters and the language models."""
        folder = Path(__file__).parent
        config = json.loads(args["model_config"])
        (num_log_probs,) = (tensor["dims"][-1] for tensor in config["input"] if tensor["name"] == "LOG_PROBS")
        try:
            settings = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
            labels = list(settings["labels"])
            self._frame_s = float(settings["frame_s"])
            self._max_audio_s = float(settings["max_audio_s"])
            self._min_samples = int(settings.get("min_samples", 1))
            for name, seconds in (("frame_s", self._frame_s), ("max_audio_s", self._max_audio_s)):
                if not 0 < seconds < math.inf:  # nor NaN
                    raise ValueError(f"`{name}` must be a finite number above 0, but is {seconds}")
            if len(labels) + 1 != num_log_probs:
                raise ValueError(
                    "`labels` must be one fewer than the last dimension of LOG_PROBS in config.pbtxt, "
                    f"{num_log_probs}, which also has the blank, but are {len(labels)}"
                )
            # The feature stage frames a clip of the longest length with one frame more than it has hops.
            self._max_frames = round(self._max_audio_s / self._frame_s) + 1
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:  # cut short, or another's
            found = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{folder / SETTINGS_FILE} must be as carnelian-export wrote it, but: {found}") from error
        self._name = args["model_name"].removesuffix("_ctc")
        self._version: str = args["model_version"]
        if config.get("response_cache", {}).get("enable"):
            raise ValueError(
                f"`response_cache` of {args['model_name']} must be off, for an answer depends on the request's options "
                "and id, which Triton does not compare; take it out of config.pbtxt"
            )
        parameters = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        models = {name: folder / parameters.pop(name) for name in LANGUAGE_MODELS if name in parameters}
        measured = folder / CALIBRATION_FILE
        calibration = ctc.Calibration.read(measured) if measured.exists() else None
        self._decoder = self._load(labels, calibration, models)
        self._defaults = self._decoder.change_options(parameters)
        self._warm_up(len(labels))
        self._metrics = Metrics(self._name)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request by itself: with an error if its options are wrong or all its rows fail."""
        # Triton takes shapes that begin with 0 for those of one row, and passes them on without this dimension.
        scores = [pb_utils.get_input_tensor_by_name(r, "LOG_PROBS").as_numpy() for r in requests]
        scores = [rows if rows.ndim == 3 else rows[np.newaxis] for rows in scores]
        lengths = [pb_utils.get_input_tensor_by_name(r, "LOG_PROB_LENGTH").as_numpy().reshape(-1) for r in requests]
        options = [[self._options(r)] * len(rows) for r, rows in zip(requests, lengths, strict=True)]
        results = self._decode(
            [row for rows in scores for row in rows], np.concatenate(lengths), [o for rows in options for o in rows]
        )
        self._metrics.count(results, scores, lengths)
        ends = np.cumsum([len(rows) for rows in lengths])
        return [
            self._respond(request, results[end - len(rows) : end])
            for request, rows, end in zip(requests, lengths, ends, strict=True)
        ]

    def finalize(self) -> None:
        """Stop the thread of the counters, because the interpreter ends next."""
        self._metrics.close()

    def _load(self, labels: list[str], calibration: Any, models: dict[str, Path]) -> Any:
        """Load the decoder, without the language models whose packages are not installed.

        NGC's image has none of these packages. `ngram` and `rescore` are then refused, even as a model's default.
        """
        while True:
            try:
                return ctc.Decoder(labels, self._frame_s, calibration=calibration, **models)
            except ctc.MissingPackage as error:
                pb_utils.Logger.log_warn(str(error))
                models = {name: path for name, path in models.items() if path != error.path}

    def _warm_up(self, num_labels: int) -> None:
        """Decode a silent second. Triton's `model_warmup` is not used, because it would be counted as a clip."""
        frames = max(1, round(1 / self._frame_s))
        silence = np.full((frames, num_labels + 1), -1.0, np.float32)
        self._decode([silence], np.array([frames], np.int32), [self._defaults])

    def _options(self, request: Any) -> Any:
        """Read the options of a request; return an OptionError in their place if they are wrong."""
        try:
            parameters = request.parameters() or "{}"
            _check_size(_id_of(request), parameters)
            return self._decoder.read_options(json.loads(parameters), self._defaults)
        except ctc.OptionError as error:
            return error
        except UnicodeDecodeError as error:  # Triton's HTTP server lets any bytes through
            return ctc.OptionError(f"options must be text in UTF-8, but are not: {error}")

    def _decode(
        self, rows: list[npt.NDArray[np.float32]], lengths: npt.NDArray[np.int32], options: list[Any]
    ) -> list[dict[str, Any]]:
        """Return RESULT of each row, without the request's id. Rows are [frames, labels + 1], of different lengths."""
        errors = [
            f"{WRONG_OPTION}: {wanted}" if isinstance(wanted, ctc.OptionError) else self._error(row, int(length))
            for row, length, wanted in zip(rows, lengths, options, strict=True)
        ]
        good = [i for i, error in enumerate(errors) if error is None]
        results: list[dict[str, Any]] = [{"error": error} for error in errors]
        if good:
            clips = [rows[i][: lengths[i]] for i in good]
            for i, hypothesis in zip(good, self._hear(clips, [options[i] for i in good]), strict=True):
                if isinstance(hypothesis, str):
                    results[i] = {"error": hypothesis}
                    continue
                results[i] = {
                    "text": hypothesis.text,
                    "words": hypothesis.words,
                    "confidence": hypothesis.confidence,
                    "alternatives": [vars(reading) for reading in hypothesis.alternatives],
                    "duration": round(int(lengths[i]) * self._frame_s, 3),  # in whole frames
                    "model": self._name,
                    "version": self._version,
                    "decoder": options[i].decoder,
                    "rescored": options[i].decoder != "greedy" and options[i].rescore,
                }
        return results

    def _hear(self, clips: list[npt.NDArray[np.float32]], options: list[Any]) -> list[Any]:
        """Decode clips: return a hypothesis for each, or an error message. An error in one does not fail the others."""
        try:
            return list(self._decoder.decode(clips, options))
        except Exception as error:
            if len(clips) == 1:
                places = "".join(traceback.format_tb(error.__traceback__))  # not its message, which may quote a caller
                pb_utils.Logger.log_error(f"decoding failed: {type(error).__name__}\n{places}")
                return ["not decoded: an error of the server, whose log says where"]
        return [self._hear([clip], [wanted])[0] for clip, wanted in zip(clips, options, strict=True)]

    def _error(self, row: npt.NDArray[np.float32], length: int) -> str | None:
        """Return why a row cannot have a transcript, or None if it can."""
        limit = f"a clip must be at most {self._max_audio_s:g} s long"
        if length <= 0 and self._min_samples > 1:
            return (
                f"too short: a clip must hold at least {self._min_samples} samples, which make a frame, but this one "
                "has fewer, or its SIGNAL_LENGTH is less"
            )
        if length <= 0:
            return "no samples: a clip must hold at least one sample, but this one has none: SIGNAL_LENGTH is 0 or less"
        seconds = length * self._frame_s
        if seconds > UNKNOWN_S:
            return (
                f"too long or of unknown length: {limit}, and a file say how long it is; MP3 and other files behind an "
                "ID3 tag, FLAC written to a pipe or cut in its header, and Ogg with several streams or a picture do "
                "not: send WAV, or FLAC that was written to a file"
            )
        if length > self._max_frames:
            return f"too long: {limit}, but this one has {seconds:.2f} s; send it in parts"
        # A frame of zeros is no distribution: the acoustic stage had no features there.
        if length > len(row) or (row[length - 1, -1] == 0 and not row[length - 1].any()):
            return (
                f"too long or too few samples: {limit}, to the sample, and a SIGNAL hold all that its SIGNAL_LENGTH "
                f"counts, but this clip of about {seconds:.2f} s is over the limit, its SIGNAL holds less, or "
                "its row is over the limit with its padding; send all its samples, in parts if they are more"
            )
        # The maximum is NaN if any value is, and above 0 if these are no log-probabilities. The sum in log-softmax
        # carries infinity to every label, so looking at one, the blank, is enough.
        if not (row[:length].max() <= MAX_LOG_PROB and row[:length, -1].min() > -np.inf):
            return (
                "not finite: all samples must be finite numbers, but this clip has NaN, infinity or huge ones; if "
                "every clip is refused so, the model is damaged"
            )
        return None

    def _respond(self, request: Any, results: list[dict[str, Any]]) -> Any:
        errors = [result["error"] for result in results if "error" in result]
        request_id = _id_of(request)
        if len(errors) == len(results):
            # The whole message about a wrong option would repeat its value, and hot words are private to the caller.
            reason = errors[0].partition(":")[0] if errors[0].startswith(WRONG_OPTION) else errors[0]
            shown = request_id[:MAX_ID_BYTES]
            pb_utils.Logger.log_info(f"[request id: {shown}] '{self._name}_ctc' refuses: {reason}")
            rows = f" (the first of {len(errors)} rows; all failed)" if len(errors) > 1 else ""
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(errors[0] + rows, pb_utils.TritonError.INVALID_ARG)
            )
        wanted = set(request.requested_output_names())
        columns = {
            "TRANSCRIPT": (result.get("text", "") for result in results),
            "RESULT": (_encode_result(result, request_id) for result in results),
        }
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor(name, np.array([[text.encode()] for text in texts], np.object_))
                for name, texts in columns.items()
                if name in wanted  # a fifth of the stage's time goes into RESULT
            ]
        )


def _check_size(request_id: str, parameters: str) -> None:
    """Raise OptionError for more than any caller needs: RESULT repeats the id, and parameters are read whole."""
    for field, text, most in (("id", request_id, MAX_ID_BYTES), ("parameters", parameters, MAX_PARAMETERS_BYTES)):
        if (found := len(text.encode())) > most:
            raise ctc.OptionError(
                f"the `{field}` of a request must have at most {most:,} bytes, but this one has {found:,}; send less"
            )


def _id_of(request: Any) -> str:
    """Return a request's id, or an empty string if it is not UTF-8, which Triton's HTTP server does not check."""
    try:
        return str(request.request_id())
    except UnicodeDecodeError:
        return ""


class _Spelled(dict[float, str]):
    """A cache of numbers as JSON. There are few: times are whole frames, and confidences have four digits."""

    def __missing__(self, number: float) -> str:
        self[number] = text = repr(number)
        return text


_spelled = _Spelled()


def _encode_result(result: dict[str, Any], request_id: str) -> str:
    """Encode RESULT as JSON. The words, thousands in a batch, are formatted here: json takes six times as long."""
    result = {**result, "request_id": request_id}
    words = result.pop("words", None)
    others = json.dumps(result, ensure_ascii=False)
    if words is None:  # a failure
        return others
    encoded = [
        f'{{"word": {_quote(word)}, "start": {_spelled[start]}, "end": {_spelled[end]}, '
        f'"confidence": {_spelled[confidence]}}}'
        for word, start, end, confidence in words
    ]
    return f'{{"words": [{", ".join(encoded)}], {others[1:]}'
