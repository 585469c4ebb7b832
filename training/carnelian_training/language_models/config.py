"""The configuration of a language model; :func:`carnelian_training.run_config.load_run` reads it."""

from dataclasses import dataclass, field
from pathlib import Path

from carnelian_training.checks import check_positive, check_probability
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
    """Which text, and how it is cut up."""

    tokens: TokenConfig
    sources: tuple[str, ...] | None = None
    """Packaged texts (austen, web, wordnet) and files; none: all packaged texts that are installed."""
    exclude: tuple[Path, ...] = ()
    """Manifests whose sentences must not be in the text."""
    labels: str | None = None
    """Those of the recogniser, in which the text is written; none: English."""
    streams: int = 32
    """The text is cut into so many equal streams, which are read side by side; over all processes together."""
    device_streams: int | None = None
    """Streams that a device reads at once. A process whose share is larger takes it in parts and adds up their
    gradients; none: no limit."""
    segment: int = 96
    """Tokens of each stream in one step."""
    context_share: float = 0.5
    """Of the sentences, drawn anew in each epoch, that see those before them; the others begin as if nothing had been
    said, which is how a transcript is rated."""

    def __post_init__(self) -> None:
        check_positive(self, "streams", "device_streams", "segment")
        check_probability(self, "context_share")
        least = len({*self.alphabet, " "}) + 3
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
        """The labels that the text is written in."""
        return LABEL_CHARACTERS if self.labels is None else self.labels

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return self.tokens.vocabulary(self.alphabet)


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """Everything that makes a language model. Written beside and into each checkpoint."""

    name: str
    """Also the name of the config file and the checkpoint."""
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
