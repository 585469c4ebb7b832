"""Export a language model as one ONNX file for rescoring: rows of tokens in, the log-probability of each sentence out.

The file describes itself: its `metadata_props` hold the format, the model's name, the tokenizer and the case of its
text. Weights are stored in float16; computation is in float32.
"""

import base64
import copy
import io
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import torch
from carnelian_training.ctc.rescoring import FORMAT
from carnelian_training.language_models.config import LanguageModelConfig
from carnelian_training.language_models.perplexity import score_sentences
from carnelian_training.language_models.tokens import END
from carnelian_training.models.transformer_xl import TransformerXl
from carnelian_training.replacement import replaced
from onnx import helper
from torch import Tensor, nn

from carnelian_export.graph.to_onnx import OPSET, store_as_float16
from carnelian_export.parity import SEED, Tolerance, open_graph

INPUTS = ("TOKENS", "TOKEN_LENGTH")
OUTPUT = "LOG_PROB"
TOLERANCE = Tolerance(0.02, 0.005)
"""How far the log-probability of a sentence may be from PyTorch's in float32, divided by the number of its tokens, its
end included. Weights in float16 keep 11 bits; a wrong mask or a wrong distance shows as 0.1 and more."""


class SentenceRater(nn.Module):
    """The language model with the input and output tensors of the ONNX file.

    Args:
        network: In evaluation mode.
    """

    def __init__(self, network: TransformerXl) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Rate sentences; a row's answer depends on its own tokens alone.

        Args:
            tokens: [rows, time] int64, without the end; the padding may have any values.
            lengths: [rows] int64, 0 for the empty sentence.

        Returns:
            [rows] float32: the natural log-probability of the tokens and the end. NaN for a row with an unknown token
            or a length beyond `time`.
        """
        inside = torch.arange(tokens.shape[1]) < lengths[:, None]
        known = (tokens >= 0) & (tokens < self.network.embedding.num_embeddings)
        tokens = torch.where(inside & known, tokens, END)
        end = torch.full_like(lengths, END)[:, None]
        log_probs, _ = self.network(torch.cat([end, tokens], dim=1), torch.cat([tokens, end], dim=1))
        counted = torch.arange(log_probs.shape[1]) <= lengths[:, None]
        total = torch.where(counted, log_probs, torch.zeros(())).sum(1)
        wrong = (inside & ~known).sum(1) + (lengths != inside.sum(1))
        return torch.where(wrong > 0, torch.full((), torch.nan), total)


def write_language_model(path: Path, name: str, config: LanguageModelConfig, network: TransformerXl) -> float:
    """Write a language model as an ONNX file, if the file agrees with PyTorch.

    Args:
        path: The file to write; an older one is replaced.
        name: The model's name, kept in the file's metadata.
        config: The network's configuration.
        network: In evaluation mode, in float32.

    Returns:
        The largest difference between a sentence's log-probabilities of the file and of PyTorch, per token.

    Raises:
        ParityError: The file and PyTorch disagree; nothing was written.
        WriteError: The disk has no room; nothing was written.
    """
    graph = export_language_model(network)
    case = "lower" if config.text.alphabet == config.text.alphabet.lower() else "upper"
    metadata = {"tokenizer": base64.b64encode(network.tokenizer).decode(), "case": case}
    helper.set_model_props(graph, {"format": FORMAT, "name": name, **metadata})
    with replaced(path) as partial:
        onnx.save(graph, partial, "protobuf")
        return check_parity(partial, name, network, config.text.segment)


def export_language_model(network: TransformerXl) -> onnx.ModelProto:
    """Export the graph of a language model, with :data:`INPUTS` and :data:`OUTPUT`; weights are rounded to float16."""
    rounded = copy.deepcopy(network).half().float().eval()
    inputs = (torch.full((2, 3), END), torch.tensor([3, 1]))
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the tracer, as in `to_onnx.trace`
        torch.onnx.export(
            SentenceRater(rounded),
            inputs,
            buffer,  # type: ignore[arg-type]
            input_names=list(INPUTS),
            output_names=[OUTPUT],
            dynamic_axes={INPUTS[0]: {0: "rows", 1: "time"}, INPUTS[1]: {0: "rows"}, OUTPUT: {0: "rows"}},
            opset_version=OPSET,
            dynamo=False,
        )
    model = onnx.load_from_string(buffer.getvalue())
    store_as_float16(model.graph)
    onnx.checker.check_model(model, full_check=True)
    return model


def check_parity(path: Path, name: str, network: TransformerXl, segment: int) -> float:
    """Compare the file in ONNX Runtime with the network in PyTorch on random sentences.

    Args:
        path: The ONNX file.
        name: The model's name, for the error message.
        network: In evaluation mode, in float32.
        segment: The number of tokens that the network reads at a time.

    Returns:
        The largest difference between a sentence's log-probabilities of the file and of PyTorch, per token.

    Raises:
        ParityError: The differences are over :data:`TOLERANCE`.
    """
    session = open_graph(path)
    vocabulary, memory = network.embedding.num_embeddings, network.config.memory
    rng = np.random.default_rng(SEED)
    lengths = [0, 1, 2, 40, 7, memory + 1, 2 * memory + 3, 0]
    rows = [rng.integers(END + 1, vocabulary, length).tolist() for length in lengths]
    expected = score_sentences(network, rows, segment).numpy()
    tokens = np.array(lengths) + 1
    together = run(session, rows, padding=vocabulary + 7)
    alone = np.concatenate([run(session, [row]) for row in rows])
    differences = np.abs(np.stack([together, alone]) - expected) / tokens
    return TOLERANCE.check(
        differences,
        f"{name} in ONNX Runtime: log-probabilities, by token,",
        f"alone and in a batch of {len(rows)} rows of random tokens",
    )


def run(
    session: onnxruntime.InferenceSession, rows: Sequence[Sequence[int]], padding: int = 0
) -> npt.NDArray[np.float32]:
    """Run the file in ONNX Runtime: return the log-probability of each row's sentence, [rows] float32."""
    tokens = np.full((len(rows), max(map(len, rows))), padding, np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    lengths = np.array([len(row) for row in rows], np.int64)
    found: npt.NDArray[np.float32] = session.run([OUTPUT], dict(zip(INPUTS, (tokens, lengths), strict=True)))[0]
    return found
