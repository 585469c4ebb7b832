"""Transformer-XL: a language model with a memory of earlier segments (Dai et al. 2019, arXiv:1901.02860).

Input: [rows, time] tokens, and the memory, the layers' inputs for the tokens before them. Output: the log-probability
of each next token. A text is read in segments; each layer attends to its own input and to that of earlier segments,
through which no gradient flows (section 3.2). Attention uses distances, not positions: a score is the sum of query
times key and query times distance; in each, a learnt bias replaces the query's position (section 3.3, appendix B).

As with `same_length` of the released code, every token sees the same number of tokens before it, `memory`, however the
text is cut into segments. So reading a text in segments gives the same result as reading it at once, and evaluation
meets no distance that training did not.
"""

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carnelian_training.checks import check_at_least_one, check_below_one
from carnelian_training.models.dropout import dropout


@dataclass(frozen=True, kw_only=True)
class TransformerXlConfig:
    """The configuration of any Transformer-XL; by default the paper's standard model for WikiText-103 (table 1)."""

    name: Literal["transformer_xl"] = "transformer_xl"
    width: int = 410
    layers: int = 16
    heads: int = 10
    feed_forward: int = 2100
    memory: int = 150
    """The number of tokens before itself that each token sees."""
    norm_first: bool = False
    """Whether each layer normalises its input, and a final norm the last layer's result (`pre_lnorm` of the released
    code has no final norm). If False, each layer normalises its result, as published."""
    cutoffs: tuple[int, ...] = ()
    """The first token of each group but the first in an adaptive softmax (Grave et al. 2017, arXiv:1609.04309); tokens
    are ordered from the most frequent. All groups but the first are scored in two steps. Empty: one plain softmax."""
    dropout: float = 0.1
    """The probability of dropout on embeddings, distance encodings, feed-forward layers, the output of each sub-layer
    and the result."""
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        check_at_least_one(self, "width", "layers", "heads", "feed_forward", "memory")
        if self.width % self.heads or self.width % 2:
            raise ValueError(f"`width` must be even and a multiple of `heads`, {self.heads}, but is {self.width}")
        if list(self.cutoffs) != sorted({cutoff for cutoff in self.cutoffs if cutoff > 0}):
            raise ValueError(f"`cutoffs` must be positive and rise, but are {list(self.cutoffs)}")
        check_below_one(self, "dropout", "attention_dropout")

    @property
    def num_stages(self) -> int:
        """The number of stages, each of which can be frozen or have its own learning rate: embedding (0) and layers."""
        return 1 + self.layers

    def stage_of(self, name: str) -> int:
        """Return the stage of the parameter `name`; parameters that score tokens are one past the last stage."""
        if match := re.match(r"layers\.(\d+)\.", name):
            return 1 + int(match[1])
        return 0 if name.startswith("embedding.") else self.num_stages


class RelativeAttention(nn.Module):
    """Multi-head attention of each token to itself and the tokens before it, by content and by distance."""

    def __init__(self, config: TransformerXlConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.attention_dropout
        self.scale = 1 / math.sqrt(config.width // config.heads)
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key_value = nn.Linear(config.width, 2 * config.width, bias=False)
        self.distance = nn.Linear(config.width, config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, seen: Tensor, distances: Tensor, hidden: Tensor, biases: Tensor) -> Tensor:
        """Compute the attention of the tokens `x` over the tokens `seen`.

        Args:
            x: [rows, time, width], the tokens that attend.
            seen: [rows, keys, width], the remembered tokens and then `x`.
            distances: [keys, width], encodings of the distances keys - 1 to 0.
            hidden: [rows or 1, 1, time, keys] bool, True where a token does not see a key.
            biases: [2, heads, 1, width / heads], added to queries: [0] for contents, [1] for distances.

        Returns:
            [rows, time, width].
        """
        # [B, T, D] -> [B, H, T, D / H]; distances: [K, D] -> [H, K, D / H]
        query = self._split(self.query(x))
        key, value = map(self._split, self.key_value(seen).chunk(2, dim=2))
        distance = self._split(self.distance(distances)[None])[0]
        by_content = ((query + biases[0]) * self.scale) @ key.transpose(2, 3)
        by_distance = relative_shift(((query + biases[1]) * self.scale) @ distance.transpose(1, 2))
        scores = (by_content + by_distance).masked_fill(hidden, -torch.inf)
        weights = dropout(scores.softmax(3), self.dropout, self.training)
        # [B, H, T, D / H] -> [B, T, D]
        mixed: Tensor = self.output((weights.to(value.dtype) @ value).transpose(1, 2).flatten(2))
        return mixed

    def _split(self, x: Tensor) -> Tensor:
        # Not `unflatten`: the ONNX exporter would make its sizes constants.
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)


def relative_shift(scores: Tensor) -> Tensor:
    """Turn scores by distance into scores by key (appendix B of the paper).

    Args:
        scores: [rows, heads, time, keys], the scores of each query for the distances keys - 1 to 0.

    Returns:
        The same shape: for query i and key j, the score of their distance, i + keys - time - j. Entries of keys after
        the query are meaningless and must be masked.
    """
    rows, heads, time, keys = scores.shape
    # With one more column, each row begins one place later in memory than the row before it.
    padded = torch.cat([scores[..., :1], scores], dim=3).reshape(rows, heads, keys + 1, time)
    return padded[:, :, 1:].reshape(rows, heads, time, keys)


class Layer(nn.Module):
    """Attention and feed-forward, each added to its input, with layer norm after (as published) or before."""

    def __init__(self, config: TransformerXlConfig) -> None:
        super().__init__()
        self.norm_first, self.dropout = config.norm_first, config.dropout
        self.attention = RelativeAttention(config)
        self.attention_norm = nn.LayerNorm(config.width)
        self.widen = nn.Linear(config.width, config.feed_forward)
        self.narrow = nn.Linear(config.feed_forward, config.width)
        self.output_norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, seen: Tensor, distances: Tensor, hidden: Tensor, biases: Tensor) -> Tensor:
        """Transform `x` [rows, time, width] into the same shape; arguments as in :meth:`RelativeAttention.forward`."""
        if self.norm_first:
            own = self.attention_norm(seen)
            x = x + self._dropped(self.attention(own[:, -x.shape[1] :], own, distances, hidden, biases))
            return x + self._feed_forward(self.output_norm(x))
        x = self.attention_norm(x + self._dropped(self.attention(x, seen, distances, hidden, biases)))
        normalised: Tensor = self.output_norm(x + self._feed_forward(x))
        return normalised

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self._dropped(self.narrow(self._dropped(F.relu(self.widen(x)))))

    def _dropped(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)


class TransformerXl(nn.Module):
    """A Transformer-XL network. The embedding matrix also scores the tokens.

    It has 151 million parameters with the defaults and WikiText-103's 267,735 words, divided into four groups; with 12
    layers of width 512 and 204 characters, 41 million (tables 1 and 2 of the paper). `vocabulary` is the number of
    different tokens.
    """

    def __init__(self, config: TransformerXlConfig, vocabulary: int) -> None:
        super().__init__()
        self.config = config
        self.tokenizer = b""
        """The tokenizer that makes tokens of text, as bytes; it is saved with the weights."""
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width) if config.norm_first else None
        # The layers share these biases, as in the released code by default.
        self.biases = nn.Parameter(torch.zeros(2, config.heads, 1, config.width // config.heads))
        self.token_bias = nn.Parameter(torch.zeros(vocabulary))
        groups = len(config.cutoffs)
        self.group_weight = nn.Parameter(torch.zeros(groups, config.width)) if groups else None
        self.group_bias = nn.Parameter(torch.zeros(groups)) if groups else None
        self.apply(initialise)

    def forward(
        self, tokens: Tensor, targets: Tensor, reach: Tensor | None = None, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Read one segment of each row.

        Args:
            tokens: [rows, time] int64.
            targets: [rows, time] int64, the token that follows each of `tokens`.
            reach: [rows, time] int64, how many tokens before itself each token sees, at most `config.memory`; None:
                `config.memory`.
            memory: [layers, rows, remembered, width], the memory that the segment before returned; None for the first.

        Returns:
            [rows, time] float32 log-probabilities of the targets, and the memory for the next segment, [layers, rows,
            remembered', width], of at most `config.memory` tokens.
        """
        # [B, T] -> [B, T, D]
        x = dropout(self.embedding(tokens) * math.sqrt(self.config.width), self.config.dropout, self.training)
        remembered = 0 if memory is None else memory.shape[2]
        time = tokens.shape[1]
        distances, hidden = self._geometry(time, remembered, reach, tokens.device)
        inputs = []
        for i, layer in enumerate(self.layers):
            seen = x if memory is None else torch.cat([memory[i].to(x.dtype), x], dim=1)
            inputs.append(seen[:, -self.config.memory :].detach())
            x = layer(x, seen, distances, hidden, self.biases)
        if self.norm is not None:
            x = self.norm(x)
        x = dropout(x, self.config.dropout, self.training)
        log_probs = self.score(x.flatten(0, 1), targets.flatten()).view_as(targets)
        return log_probs, torch.stack(inputs)

    def score(self, x: Tensor, targets: Tensor) -> Tensor:
        """Compute the log-probability of each target: [n, width], [n] int64 -> [n] float32."""
        if self.group_weight is None or self.group_bias is None:
            return _log_probs(x, self.embedding.weight, self.token_bias, targets)
        ends = [*self.config.cutoffs, self.embedding.num_embeddings]
        weight = torch.cat([self.embedding.weight[: ends[0]], self.group_weight])
        bias = torch.cat([self.token_bias[: ends[0]], self.group_bias])
        group = torch.stack([targets >= end for end in ends[:-1]]).sum(0)  # group 0 needs one step only
        first = torch.where(targets < ends[0], targets, ends[0] - 1 + group)
        log_probs = _log_probs(x, weight, bias, first)
        for i, (start, end) in enumerate(pairwise(ends), start=1):
            rows = (group == i).nonzero()[:, 0]
            weight, bias = self.embedding.weight[start:end], self.token_bias[start:end]
            log_probs = log_probs.scatter_add(0, rows, _log_probs(x[rows], weight, bias, targets[rows] - start))
        return log_probs

    def get_extra_state(self) -> Tensor:
        """Return the tokenizer as the state dictionary holds it: [bytes] uint8."""
        return torch.tensor(list(self.tokenizer), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Set the tokenizer from the state dictionary's entry, [bytes] uint8."""
        self.tokenizer = bytes(state.tolist())

    def _geometry(
        self, time: int, remembered: int, reach: Tensor | None, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return encodings of all distances, [keys, width], and the attention mask, [rows or 1, 1, time, keys] bool.

        The mask is True where a token does not see a key.
        """
        keys = remembered + time
        distance = keys - 1 - torch.arange(keys, device=device, dtype=torch.float32)
        rates = torch.arange(0, self.config.width, 2, device=device, dtype=torch.float32)
        angles = distance[:, None] * torch.exp(rates * (-math.log(10000.0) / self.config.width))
        encodings = dropout(torch.cat([angles.sin(), angles.cos()], dim=1), self.config.dropout, self.training)
        query = torch.arange(remembered, keys, device=device)[:, None]
        apart = query - torch.arange(keys, device=device)  # [time, keys], negative after the query
        farthest = torch.full_like(query, self.config.memory)[None] if reach is None else reach[:, :, None]
        hidden = (apart < 0) | (apart > farthest.clamp(max=self.config.memory))
        return encodings, hidden[:, None]


def _log_probs(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """Return the log-softmax of each target: [n, width], [classes, width], [classes], [n] int64 -> [n] float32."""
    log_probs = F.log_softmax(F.linear(x, weight, bias).float(), dim=1)
    return log_probs.gather(1, targets[:, None])[:, 0]


def initialise(module: nn.Module) -> None:
    """Initialise linear layers and embeddings with the released code's standard deviation, 0.02; biases with 0."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
