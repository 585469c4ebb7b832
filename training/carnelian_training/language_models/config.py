"""The configuration of a language model; :func:`carnelian_training.run_config.load_run` reads it."""

from dataclasses import dataclass, field

from carnelian_training.checks import GivenPath, check_positive, check_probability
from carnelian_training.language_models.tokens import TokenConfig
from carnelian_training.loop_config import (
    LOOP_OF_STACKS,
    InitConfig,
    LoopConfig,
    OptimizerConfig,
    check_name,
    check_stages,
)
from carnelian_training.models.transformer_xl import TransformerXlConfig
from carnelian_training.text import LABEL_CHARACTERS


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The text of a language model, and how it is cut into segments."""

    tokens: TokenConfig
    sources: tuple[str, ...] | None = None
    """The names of packaged texts (austen, web, wordnet) and files. None: all packaged texts that are installed."""
    exclude: tuple[GivenPath, ...] = ()
    """The manifests whose sentences are left out of the text."""
    labels: str | None = None
    """The recogniser's labels, in which the text is written. None: English."""
    streams: int = 32
    """The number of equal streams into which the text is cut, which are read side by side; over all processes
    together."""
    device_streams: int | None = None
    """The number of streams that a device processes at once. A process whose share is larger splits it into parts and
    adds up their gradients. None: no limit."""
    segment: int = 96
    """The number of tokens of each stream in one step."""
    context_share: float = 0.5
    """The share of sentences, drawn anew in each epoch, that see the sentences before them. The others are read without
    context, as transcripts are when they are scored."""

    def __post_init__(self) -> None:
        check_positive(self, "streams", "device_streams", "segment")
        check_probability(self, "context_share")
        if " " not in self.alphabet:
            raise ValueError(
                "`labels` must hold the space, as the search whose readings the model rates is of words, but are "
                f"{self.alphabet!r:.200}"
            )
        least = len(set(self.alphabet)) + 3
        if self.tokens.size is not None and self.tokens.size < least:
            raise ValueError(
                f"`tokens.size` must be at least {least}, which the labels alone take, but is {self.tokens.size}"
            )
        if self.alphabet not in (self.alphabet.lower(), self.alphabet.upper()):
            raise ValueError(
                "`labels` must be of one case, which rescoring puts transcripts into, but are of both: "
                f"{self.alphabet!r}"
            )

    @property
    def alphabet(self) -> str:
        """The labels in which the text is written, as one string."""
        return LABEL_CHARACTERS if self.labels is None else self.labels

    @property
    def vocabulary(self) -> int:
        """The number of different tokens."""
        return self.tokens.vocabulary(self.alphabet)


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """The whole configuration of a language model's run. It is written beside and into each checkpoint."""

    name: str
    """The name of the run, and of its config file and checkpoints."""
    model: TransformerXlConfig
    text: TextConfig
    init: InitConfig = field(default_factory=InitConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        check_name(self.name)
        check_stages(self.init, self.model.num_stages)
        if self.model.cutoffs and self.model.cutoffs[-1] >= self.text.vocabulary:
            raise ValueError(
                f"`model.cutoffs` must be below the {self.text.vocabulary} tokens, but end at {self.model.cutoffs[-1]}"
            )
        plain = LoopConfig()
        foreign = {f"loop.{name}" for name in LOOP_OF_STACKS if getattr(self.loop, name) != getattr(plain, name)}
        foreign |= {"optimizer.lr_batch_s"} if self.optimizer.lr_batch_s is not None else set()
        if foreign:
            raise ValueError(f"these are for recognisers and must not be set here: {', '.join(sorted(foreign))}")
