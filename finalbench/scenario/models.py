"""A scenario: which model, which arms, which axes, how much traffic.

Knows nothing of servers, clocks or results. Reading it from YAML, and errors that name the file,
the line and the nearest key, are in `scenario.source`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from finalbench.scenario.base import Frozen, Name, PositiveInt, digest
from finalbench.scenario.workload import Workload

# Q4_1: blocks of 32 weights at 4 bits, with a scale and a minimum of 2 bytes each.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "q4_1": 0.625}


class Sampling(Frozen):
    """Every sampler field, always sent: a server's own defaults must never fill a gap."""

    name: Name
    temperature: Annotated[float, Field(ge=0, le=5)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def fields(self) -> dict[str, float | int]:
        """The sampler fields as they go into a request body."""
        return self.model_dump(exclude={"name"})


class DraftSetting(Frozen):
    """How tokens are drafted; `acceptance` is set only for synthetic acceptance."""

    method: Literal["none", "mtp", "ngram", "oracle"] = "none"
    k: Annotated[int, Field(ge=0, le=8)] | Literal["auto"] = 0
    head_rows: PositiveInt | None = None
    acceptance: Annotated[float, Field(ge=0, le=1)] | None = None

    @model_validator(mode="after")
    def _k_fits_method(self) -> DraftSetting:
        if self.method == "none" and self.k != 0:
            raise ValueError("k: must be 0 when method is none")
        if self.method != "none" and self.k == 0:
            raise ValueError(f"k: method {self.method} needs k of 1 to 8, or auto")
        return self

    @property
    def label(self) -> str:
        """`none`, `mtp3`, `ngram3`, `mtp3@0.8`: unique among the settings of one scenario."""
        if self.method == "none":
            return "none"
        rows = f"-head{self.head_rows}" if self.head_rows else ""
        chance = f"@{self.acceptance:g}" if self.acceptance is not None else ""
        return f"{self.method}{self.k}{rows}{chance}"


class ModelFacts(Frozen):
    """Sizes the physics bound rests on; from the model's published shape, never from a server."""

    params_total: PositiveInt
    params_per_token: PositiveInt  # read for one decoded token, lm_head included
    params_per_draft: Annotated[int, Field(ge=0)] = 0  # one MTP step, its head included
    layers: PositiveInt
    moe_layers: Annotated[int, Field(ge=0)] = 0
    experts: Annotated[int, Field(ge=0)] = 0
    experts_per_token: Annotated[int, Field(ge=0)] = 0
    params_per_expert: Annotated[int, Field(ge=0)] = 0
    kv_elements_per_token: Annotated[int, Field(ge=0)] = 0  # all attention layers, K and V
    state_bytes_per_sequence: Annotated[int, Field(ge=0)] = 0  # fp32 recurrent state


class ModelSpec(Frozen):
    """The model under test and what it takes to hold it."""

    name: Name
    source: str  # "bundled", or the repository the weights come from
    shape_of: str | None = None  # whose shape it has, where that is a reading, not a config
    family: str
    kind: Literal["moe", "dense"]
    dtype: Literal["float32", "bfloat16", "float16", "float8", "q4_1"]
    context: PositiveInt
    mtp: Literal["present", "absent", "unknown"]
    facts: ModelFacts
    note: str | None = None
    path: str | None = None  # folder of a checkpoint; where it lies is not part of the identity

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes one decoded token must read at batch 1."""
        return int(self.facts.params_per_token * DTYPE_BYTES[self.dtype])

    @property
    def bytes_per_draft(self) -> int:
        """Weight bytes one MTP draft step must read."""
        return int(self.facts.params_per_draft * DTYPE_BYTES[self.dtype])


class Hardware(Frozen):
    """What the scenario needs."""

    device: Literal["cpu", "cuda"]
    devices: PositiveInt = 1
    memory_gb: Annotated[float, Field(gt=0)]  # per scenario, all devices together, GB = 1e9 bytes
    disk_gb: Annotated[float, Field(ge=0)] = 0.0


# What a prompt finds in the server's prefix cache: nothing; all of itself, for it was sent before;
# or so many percent of itself, which all prompts of the cell share.
CacheState = Annotated[str, Field(pattern=r"^(cold|warm|prefix-[1-9][0-9]?)$")]


def cached_share(state: str) -> float:
    """Share of each prompt that a cache holds by plan: 0 cold, 1 warm, 0.5 for `prefix-50`."""
    if state == "warm":
        return 1.0
    return int(state.removeprefix("prefix-")) / 100 if state != "cold" else 0.0


class Point(Frozen):
    """One coordinate in the grid, by the names used in `axes`."""

    seq_len: PositiveInt
    output_len: PositiveInt
    sampling: Name
    draft: Name
    concurrency: PositiveInt = 1
    cache: CacheState = "cold"


class Axes(Frozen):
    """The values each axis takes; drafts and samplings by name."""

    seq_len: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    output_len: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    sampling: Annotated[tuple[Name, ...], Field(min_length=1)]
    draft: Annotated[tuple[Name, ...], Field(min_length=1)]
    concurrency: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1,)
    cache: Annotated[tuple[CacheState, ...], Field(min_length=1)] = ("cold",)


class Measure(Frozen):
    """How often and in which order; the unit of replication is a fresh server process."""

    blocks: Annotated[int, Field(gt=0, le=100)] = 3
    order: Literal["abba", "shuffled"] = "abba"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    request_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    start_timeout_s: Annotated[float, Field(gt=0)] = 180.0
    bare_loop: bool = True  # time the baseline's own generate loop without HTTP, too
    client_ceiling: bool = True  # time the client against a toy server, once a run


class Serving(Frozen):
    """Settings both arms share, so that neither is favoured."""

    threads: Annotated[int, Field(gt=0, le=1024)] | None = None  # None: the machine's cores
    max_sequences: PositiveInt = 4
    weights: Annotated[str, Field(pattern=r"^(auto|random:[0-9]+)$")] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    vk_profile: Literal["vkae", "vkue"] = "vkae"


class Estimate(Frozen):
    """Rough costs per arm, only for the time shown by `plan`."""

    start_s: Annotated[float, Field(ge=0)] = 8.0
    ms_per_token: Annotated[float, Field(gt=0)] = 15.0
    prefill_us_per_token: Annotated[float, Field(ge=0)] = 200.0


class Scenario(Frozen):
    """A whole scenario, resolved: what `plan` expands and `run.json` stores."""

    schema_version: Literal[1] = 1
    name: Name
    title: str
    model: ModelSpec
    hardware: Hardware
    arms: Annotated[tuple[Name, ...], Field(min_length=1)] = ("vk", "stock")
    baseline: Name | None = "stock"
    serving: Serving = Serving()
    grid: Literal["full", "star"] = "star"
    samplings: Annotated[dict[Name, Sampling], Field(min_length=1)]
    drafts: Annotated[dict[Name, DraftSetting], Field(min_length=1)]
    axes: Axes
    base: Point
    #: Longest output of an arm's cells, for a baseline that would need hours for the long ones: it
    #: is compared where both arms have a cell.
    output_limits: dict[Name, PositiveInt] = Field(default_factory=dict)
    workload: Workload
    measure: Measure = Measure()
    estimates: dict[Name, Estimate] = Field(default_factory=dict)

    def hash(self) -> str:
        """Identity of what is measured: sha256 over all but estimates, prose and places."""
        excluded: Any = {"estimates": True, "title": True, "model": {"path", "note"}}
        body = self.model_dump(mode="json", exclude=excluded)
        if self.axes.cache == ("cold",):  # the axis came later: what it leaves alone keeps its hash
            del body["axes"]["cache"], body["base"]["cache"]
        if not self.output_limits:  # so did this
            del body["output_limits"]
        return digest(body | {"workload": self.workload.identity()})

    @model_validator(mode="after")
    def _names_resolve(self) -> Scenario:
        _check_unique("arms", self.arms)
        if self.baseline is not None and self.baseline not in self.arms:
            raise ValueError(f"baseline: {self.baseline} is not among arms {list(self.arms)}")
        for key, sampling in self.samplings.items():
            if sampling.name != key:
                raise ValueError(f"samplings.{key}.name: must be {key}")
        known: dict[str, Any] = {
            "sampling": list(self.samplings),
            "draft": list(self.drafts),
        }
        for axis in ("seq_len", "output_len", "sampling", "draft", "concurrency", "cache"):
            values = getattr(self.axes, axis)
            _check_unique(f"axes.{axis}", values)
            for value in values:
                if axis in known and value not in known[axis]:
                    raise ValueError(
                        f"axes.{axis}: {value!r} is not defined; defined are {known[axis]}"
                    )
            if getattr(self.base, axis) not in values:
                raise ValueError(
                    f"base.{axis}: {getattr(self.base, axis)!r} is not in axes.{axis} "
                    f"{list(values)}; set both"
                )
        for arm, limit in self.output_limits.items():
            if arm not in self.arms:
                raise ValueError(f"output_limits: {arm} is not among arms {list(self.arms)}")
            if limit < min(self.axes.output_len):
                raise ValueError(
                    f"output_limits.{arm}: no cell is left; axes.output_len has "
                    f"{list(self.axes.output_len)}, so add {limit} or less to it"
                )
        longest = max(self.axes.seq_len) + max(self.axes.output_len)
        if longest > self.model.context:
            raise ValueError(
                f"axes.seq_len: {longest} tokens of prompt and output exceed the model's context "
                f"of {self.model.context}"
            )
        if max(self.axes.concurrency) > self.serving.max_sequences:
            raise ValueError("axes.concurrency: exceeds serving.max_sequences")
        if self.axes.cache != ("cold",) and not self.workload.warmup_requests:
            raise ValueError(
                "axes.cache: a prefix is put into the cache by a warm-up; set "
                "workload.warmup_requests to 1 or more"
            )
        if self.model.mtp == "absent" and any(
            self.drafts[d].method == "mtp" for d in self.axes.draft
        ):
            raise ValueError("axes.draft: the model has no MTP layer, so mtp drafts cannot run")
        return self


def _check_unique(where: str, values: Any) -> None:
    if len(set(values)) != len(values):
        raise ValueError(f"{where}: values repeat in {list(values)}")
