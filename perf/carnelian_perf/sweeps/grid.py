"""The grid of a sweep: a YAML file, and the cells that it spans.

In: a YAML file of :class:`Grid`'s fields, strictly read. Out: :class:`Cell`, one for each run of perf_analyzer.
"""

import itertools
import re
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from carnelian_perf.clips import LIMIT_S, MOST_CUTS, SHORTEST_CUT_S, check_clips

HomePath = Annotated[Path, Field(strict=False), AfterValidator(Path.expanduser)]
"""A path. It is not strict because YAML has only strings."""
ModelName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
"""A model's name that can name a folder, because the folders of cells are named after models."""
Protocol = Literal["grpc", "http"]
SharedMemory = Literal["none", "system"]
Positive = Annotated[int, Field(gt=0)]
Cuts = Annotated[int, Field(gt=0, le=MOST_CUTS)]
Share = Annotated[float, Field(gt=0, le=1)]
Duration = Annotated[float, Field(ge=SHORTEST_CUT_S, le=LIMIT_S)]


_WORDS = {"extra_forbidden": "unknown key", "missing": "must be given"}
"""Kind of pydantic's mistake -> what must hold, in the words of `carnelian-train`."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class ModelUnderTest(_Strict):
    """A recogniser of the repository."""

    precision: str = Field(default="fp32", pattern=r"^[\w .+-]+$")
    """Precision of the network, in words: the server does not tell it. Folders of cells are named after it. One with
    random weights is exported in it."""
    random_weights: HomePath | None = None
    """A training YAML: its network is exported with random weights and served in place of `repository`. Its speed is
    that of a trained one; its transcripts mean nothing."""
    execution_provider: Literal["cuda", "tensorrt"] | None = None
    """As of `carnelian-export`, for random weights that a GPU serves; an ordinary export if None. It is the grid's
    choice, not the machine's, so that results of one grid are of one graph."""

    @model_validator(mode="after")
    def _check(self) -> "ModelUnderTest":
        if self.random_weights and self.precision not in ("fp32", "fp16"):
            raise ValueError(
                f"`precision` must be fp32 or fp16, in which `random_weights` are exported, but is {self.precision}"
            )
        if self.execution_provider and not self.random_weights:
            raise ValueError("`execution_provider` must come with `random_weights`: other models are exported already")
        return self


class Static(_Strict):
    """Batches of PCM through `<model>_pcm`, one request at a time: the published tables' kind of load."""

    batches: list[Cuts] = Field(default=[1, 2, 4, 8, 16], min_length=1)


class Files(_Strict):
    """One encoded file per request through `<model>`; the server forms the batches."""

    format: Literal["flac", "wav"] = "flac"
    concurrency: list[Positive] = Field(default=[1], min_length=1)
    """Closed loops: numbers of clients, each of which sends its next file once it has an answer."""
    poisson: list[Share] = []
    """Open loop: arrivals at these shares of the throughput that the highest concurrency reached."""


def _check_address(text: str) -> str:
    found = re.fullmatch(r"[^/]+:([0-9]{1,5})", text)
    # Connecting takes any number as a port, modulo 65536.
    if not found or not 1 <= int(found[1]) <= 65535:
        raise ValueError("must be host:port, with a port of 1 to 65535")
    return text


def _check_url(text: str) -> str:
    _check_address(text.removeprefix("http://"))
    return text


class Running(_Strict):
    """The addresses of a server that already runs."""

    grpc: Annotated[str, AfterValidator(_check_address)]
    http: Annotated[str, AfterValidator(_check_url)] | None = None


class Grid(_Strict):
    """The settings of a sweep: what to measure, and how long."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    repository: HomePath = Path("model_repository")
    """Model repository that is served for the sweep, on free ports of 127.0.0.1."""
    server: Running | None = None
    """Running server to measure in place of `repository`."""
    models: dict[ModelName, ModelUnderTest] = Field(min_length=1)
    manifest: HomePath = Path("demo/clips/manifest.jsonl")
    """Manifest of speech with texts. Clips are cut to the durations, and used whole for the word error rate."""
    durations_s: list[Duration] = Field(default=[2, 7, 16.7], min_length=1)
    clips: Cuts = 16
    """Distinct clips of each duration."""
    protocols: list[Protocol] = Field(default=["grpc"], min_length=1)
    shared_memory: list[SharedMemory] = Field(default=["none"], min_length=1)
    static: Static | None = None
    files: Files | None = None
    rounds: Positive = 1
    """Runs of each cell; tables show the medians."""
    requests: Positive = 20
    """Least number of requests in a measurement window."""
    windows: int = Field(default=8, ge=3)
    """Number of windows that a cell may take until the last three agree."""
    stability_percent: float = Field(default=15, gt=0)
    """How far throughput and latency of the last three windows may lie apart."""
    timeout_s: float = Field(default=600, gt=0)
    """Seconds that perf_analyzer may take for a cell."""

    @model_validator(mode="after")
    def _check(self) -> "Grid":
        if self.static is None and self.files is None:
            raise ValueError("at least one of `static` and `files` must be there; `static: {}` takes the defaults")
        if self.server is not None and self.server.http is None and "http" in self.protocols:
            raise ValueError("`server.http` must be given where `protocols` has http")
        if len({tested.random_weights is None for tested in self.models.values()}) > 1:
            raise ValueError("either all of `models` or none must have `random_weights`: they are one repository")
        if self.server is not None and self.random_weights:
            raise ValueError("`server` must not be given where `models` have `random_weights`: those are served here")
        return self

    @property
    def random_weights(self) -> dict[str, Path]:
        """The training YAMLs of models that are exported for the sweep."""
        return {name: tested.random_weights for name, tested in self.models.items() if tested.random_weights}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a grid: one run of perf_analyzer."""

    model: str
    precision: str
    input: Literal["pcm", "file"]
    protocol: Protocol
    shared_memory: SharedMemory
    duration_s: float
    batch: int
    concurrency: int | None
    """Number of clients in a closed loop; None for an open loop."""
    poisson_share: float | None
    """Rate of arrivals in an open loop, as a share of the closed loop's highest throughput; None for a closed loop."""
    round: int

    @property
    def name(self) -> str:
        """The cell's name, distinct within a grid and fit for a folder."""
        load = f"c{self.concurrency}" if self.poisson_share is None else f"poisson{self.poisson_share:g}"
        memory = "" if self.shared_memory == "none" else "_shm"
        return (
            f"{self.model}_{self.precision}_{self.input}_{self.protocol}{memory}"
            f"_{self.duration_s:g}s_b{self.batch}_{load}_r{self.round}"
        )

    @property
    def served_model(self) -> str:
        """The name of the ensemble that is called."""
        return f"{self.model}_pcm" if self.input == "pcm" else self.model


class CellError(RuntimeError):
    """A cell cannot be measured, or an answer in it is wrong; the message says why."""


class GridError(ValueError):
    """The YAML file is no grid, or does not fit earlier results in the folder; the message names the key."""


class _StrictLoader(yaml.SafeLoader):
    """A loader that refuses repeated keys, of which PyYAML silently takes the last, and says where a value is wrong.

    It is much like that of `carnelian_training.strict_yaml`, whose distribution brings torch: a sweep can do without.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Not at construction, when merged keys (`<<`), which may be overridden, are already among the others.
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                found = f"a key must come once, but `{key.value}` does not"
                raise yaml.constructor.ConstructorError(None, None, found, key.start_mark)
            seen.add(key.value)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int):
                str(value)  # fails for very many digits, which Python refuses to read only in decimal
            return value
        except (ValueError, LookupError, AttributeError) as error:  # a month 99, `!!bool x`, `!!timestamp x`
            found = f"a value is no {node.tag.rpartition(':')[2]}: {error}"
            raise yaml.constructor.ConstructorError(None, None, found, node.start_mark) from error


def read_grid(path: Path) -> Grid:
    """Read a grid.

    Raises:
        GridError: the file is no YAML, or a key is unknown, missing, repeated or wrong.
    """
    try:
        fields = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    # ValueError: no UTF-8, or "\U00110000". OverflowError: "\UFFFFFFFF".
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise GridError(f"{path} must be YAML, but is not: {error}") from error
    try:
        return Grid.model_validate(fields)
    except ValidationError as error:
        found = [
            f"  {'.'.join(map(str, wrong['loc'])) or 'grid'}: "
            + _WORDS.get(wrong["type"], wrong["msg"].removeprefix("Value error, "))
            + ("" if isinstance(wrong["input"], dict) else f", found {reprlib.repr(wrong['input'])}")
            for wrong in error.errors()
        ]
        raise GridError("\n".join([f"{path} must be a grid (see perf/docs/sweeps.md), but:", *found])) from error


def check_files(grid: Grid) -> None:
    """Check that the files that a grid names exist, and the clips of its manifest.

    Raises:
        GridError: A file does not exist; the message names the key.
        ValueError: The manifest has no clips of at most 60 s, or one cannot be opened; the message names both.
    """
    files = {f"models.{name}.random_weights": path for name, path in grid.random_weights.items()}
    for key, path in {"manifest": grid.manifest, **files}.items():
        if not path.is_file():
            is_default = key == "manifest" not in grid.model_fields_set
            which = " (the default, found from the root of the repository); name one with `manifest:`" * is_default
            raise GridError(f"`{key}` of the grid must be a file, but there is none at {path.absolute()}{which}")
    if grid.server is None and not files and not grid.repository.is_dir():
        raise GridError(f"`repository` of the grid must be a folder, but there is none at {grid.repository.absolute()}")
    check_clips(grid.manifest)


def check_same_subject(grid: Grid, earlier: Grid) -> None:
    """Check that two grids name the same server and the same clips; loads and limits may differ.

    Raises:
        GridError: The grids differ; the message names the key.
    """
    before, now = (
        {
            **{key: getattr(one, key) for key in ("server", "manifest", "clips")},
            "repository": None if one.server or one.random_weights else one.repository,
            **{
                f"models.{name}.{key}": getattr(tested, key)
                for name, tested in one.models.items()
                for key in ("random_weights", "execution_provider")
            },
        }
        for one in (earlier, grid)
    )
    check_same(before, now, "`{}` of the grid")


def check_same(before: Mapping[str, object], now: Mapping[str, object], what: str = "{}", why: str = "") -> None:
    """Check that what is known on both sides is as it was for the results in a sweep's folder.

    Args:
        before: What the results are of.
        now: What is to be measured.
        what: Names a key in the message, in the place of `{}`.
        why: Explains in the message what is `now`.

    Raises:
        GridError: Something differs; the message names it.
    """
    for key in before:
        if key in now and before[key] != now[key]:
            raise GridError(
                f"{what.format(key)} must be as it was for the results that are there, {before[key]}, but is "
                f"{now[key]}{why}; name another folder (--out), or delete that one"
            )


def list_cells(grid: Grid) -> list[Cell]:
    """List all cells, rounds outermost, so that a disturbance of the machine does not fall on one cell alone.

    Raises:
        GridError: Two cells have the same name, so their results could not be told apart.
    """
    cells: list[Cell] = []
    for round_number, (model, tested), duration_s, protocol, memory in itertools.product(
        range(1, grid.rounds + 1), grid.models.items(), grid.durations_s, grid.protocols, grid.shared_memory
    ):
        make = partial(
            Cell,
            model=model,
            precision=tested.precision,
            protocol=protocol,
            shared_memory=memory,
            duration_s=duration_s,
            round=round_number,
        )
        if grid.static:
            batches = sorted(grid.static.batches)
            cells += [make(input="pcm", batch=batch, concurrency=1, poisson_share=None) for batch in batches]
        if grid.files:
            clients, shares = sorted(grid.files.concurrency), sorted(grid.files.poisson)
            cells += [make(input="file", batch=1, concurrency=number, poisson_share=None) for number in clients]
            cells += [make(input="file", batch=1, concurrency=None, poisson_share=share) for share in shares]
    named: dict[str, Cell] = {}
    for cell in cells:
        if (first := named.setdefault(cell.name, cell)) != cell:
            before, now = asdict(first), asdict(cell)
            differing = [f"`{key}` {before[key]} and {now[key]}" for key in before if before[key] != now[key]]
            raise GridError(
                f"cells of a grid must have names of their own, but {cell.name} is that of {', '.join(differing)}"
            )
    return list(named.values())
