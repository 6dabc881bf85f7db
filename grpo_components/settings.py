"""Defines every config key with type, default and bounds, in the order of the shipped configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Required, Self, TypeVar, get_args

from omegaconf import DictConfig, OmegaConf
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    Tag,
    model_validator,
    with_config,
)
from typing_extensions import TypedDict

from grpo_components.errors import ConfigError, fail, shown
from grpo_components.schedules import as_schedule

_SECTION = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
_ARGUMENTS = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

# ---- kinds of values ----------------------------------------------------------------------------

_INT32 = 2**31 - 1
Text = Annotated[str, Field(min_length=1)]
TextOrNull = Text | None
Count = Annotated[int, Field(ge=1, le=_INT32)]  # number of steps, policy versions or groups
CountOrNull = Count | None
CountOrZero = Annotated[int, Field(ge=0, le=_INT32)]
Positions = Annotated[int, Field(ge=1, le=2**22)]  # no supported model has more
PositionsOrNull = Positions | None
TokenBudget = Annotated[int, Field(ge=1, le=_INT32)]
Samples = Annotated[int, Field(ge=1, le=2**16)]  # per step; the driver holds them all
Processes = Annotated[int, Field(ge=1, le=1024)]
GpuShare = Annotated[float, Field(ge=0.001, le=1)]  # Ray counts shares in ten thousandths
Seconds = Annotated[float, Field(ge=0.1, le=2e6)]  # 24 days: time-outs are 32-bit milliseconds
Weight = Annotated[float, Field(ge=-1e6, le=1e6)]
Coefficient = Annotated[float, Field(ge=0, le=1e6)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Precision = Literal["fp32", "bf16"]
Number = TypeVar("Number")


@with_config(_SECTION)
class ScheduleKeys(TypedDict, Generic[Number], total=False):
    """Config keys of a number that changes over training; `as_schedule` checks them further."""

    schedule: Required[Literal["constant", "linear", "cosine"]]
    start: Required[Number]
    end: Number
    num_steps: Count
    warmup_steps: CountOrZero


def _whole_schedule(value: Any) -> Any:
    as_schedule("", value)
    return value


Scheduled = Annotated[
    Annotated[Number, Tag("<number>")] | Annotated[ScheduleKeys[Number], Tag("<schedule>")],
    Discriminator(lambda value: "<schedule>" if isinstance(value, dict) else "<number>"),
    AfterValidator(_whole_schedule),
]
FlagOrPath = Annotated[
    Annotated[bool, Tag("<flag>")] | Annotated[Text, Tag("<path>")],
    Discriminator(lambda value: "<path>" if isinstance(value, str) else "<flag>"),
]

# ---- components: `_component_`, and the arguments that the recipe reads --------------------------

HUGGING_FACE = "grpo_components.models.hugging_face"
"""The model builder that needs no checkpointer."""
ModelType = Literal[
    "LLAMA2", "LLAMA3", "LLAMA3_2", "MISTRAL", "GEMMA", "PHI3_MINI", "PHI4", "QWEN2"
]


def _trainable(model_type: Any) -> Any:
    if model_type == "QWEN3":
        problem = f"QWEN3 given, which torchtune has not, but model._component_={HUGGING_FACE}"
        raise ConfigError("", problem, ", ".join(get_args(ModelType)))
    return model_type


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_TARGETS = Field(min_length=1, strict=False)
_AS_LIST = PlainSerializer(list)  # as it is read again from a run's config.yaml

CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}
"""Default clip ranges of the recipe's own loss."""
PENALTIES: dict[str, Any] = {"kl_coeff": 0.0, "kl_estimator": "k3", "entropy_coeff": 0.0}
"""Defaults of the KL and entropy terms that are added to every loss."""

_CLIP_TYPES = {
    "clip_low": Scheduled[Annotated[float, Field(gt=0, le=1)]],
    "clip_high": Scheduled[Annotated[float, Field(gt=0, le=1e6)]],
}
_PENALTY_TYPES = {
    "kl_coeff": Scheduled[Coefficient],
    "kl_estimator": Literal["k1", "k2", "k3"],
    "entropy_coeff": Coefficient,
}


def _node(keys: Mapping[str, Any], config: ConfigDict = _ARGUMENTS) -> Any:
    """Return the type of a mapping with these keys, and by default any others."""
    make: Any = TypedDict
    return with_config(config)(make("Node", dict(keys), total=False))


def component(
    keys: Mapping[str, Any] | None = None, *, null: bool = False, **defaults: Any
) -> GetPydanticSchema:
    """Return the pydantic type of a `_component_` node: checks values and makes a DictConfig.

    Args:
        keys: types of the arguments that the recipe reads.
        null: whether the node may be null.
        defaults: values of keys that are not given.
    """

    def filled(given: Any) -> Any:
        given = {**defaults, **given} if isinstance(given, dict) else given
        if isinstance(given, dict) and given.get("_component_", "") is None:
            given = None
        if given is None and not null:
            raise ConfigError("", "null given", "`_component_` and its arguments")
        return given

    node = _node({"_component_": Required[Text], **(keys or {})})
    return _as_dict_config(filled, node | None if null else node)


def loss_section() -> GetPydanticSchema:
    """Return the pydantic type of the section `loss`: the recipe's own loss, or a component."""

    def filled(given: Any) -> Any:
        if not isinstance(given, dict):
            raise ConfigError("", f"{shown(given)} given", "a section; loss._component_ names one")
        if given.get("_component_", "") is None:
            given = {name: given[name] for name in given if name != "_component_"}
        return {**({} if "_component_" in given else CLIP), **PENALTIES, **given}

    default: Any = Annotated[_node({**_CLIP_TYPES, **_PENALTY_TYPES}, _SECTION), Tag("<default>")]
    keys = {"_component_": Required[Text], **_PENALTY_TYPES}
    named: Any = Annotated[_node(keys), Tag("<named>")]
    is_named = Discriminator(lambda given: "<named>" if "_component_" in given else "<default>")
    return _as_dict_config(filled, Annotated[default | named, is_named])


def free_section() -> GetPydanticSchema:
    """Return the pydantic type of the section `user`: any keys and values, passed through."""
    return _as_dict_config(lambda given: {} if given is None else given, dict[Any, Any], _user)


def _user(values: dict[str, Any]) -> DictConfig:
    """Make the section `user`, whose errors name the whole key."""
    return OmegaConf.create({"user": values}).user


def _as_dict_config(
    filled: Callable[[Any], Any], plain: Any, create: Callable[..., Any] = OmegaConf.create
) -> GetPydanticSchema:
    """Return the pydantic type of a DictConfig: `filled` adds defaults, `plain` checks values."""

    def made(checked: dict[str, Any] | None) -> DictConfig | None:
        return None if checked is None else create(checked)

    back = PlainSerializer(OmegaConf.to_container, when_used="unless-none")
    typed = Annotated[plain, BeforeValidator(filled), AfterValidator(made), back]
    return GetPydanticSchema(lambda _, handler: handler.generate_schema(typed))


Component = Annotated[DictConfig, component()]
_REWARD = {"weight": Weight, "is_success": bool}
Rewards = dict[str, Annotated[DictConfig, component(_REWARD, weight=1.0, is_success=False)]]
_TOKENIZER = {"path": Text, "merges_file": Text, "special_tokens_path": TextOrNull}
_CHECKPOINTER = {"model_type": Required[Annotated[ModelType, BeforeValidator(_trainable)]]}
_DATASET = {"source": Text, "max_prompt_tokens": PositionsOrNull, "num_rows": CountOrNull}
_LEARNING_RATE = Scheduled[Annotated[float, Field(gt=0, le=1e3)]]

# ---- sections ------------------------------------------------------------------------------------


class RewardShapingSettings(BaseModel):
    """Penalties subtracted from the rewards."""

    model_config = _SECTION
    kl_coeff: Scheduled[Coefficient] = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    overlong_tokens: Annotated[int, Field(ge=0, le=2**22)] = 0
    overlong_penalty: Coefficient = 1.0


class LoraSettings(BaseModel):
    """Low-rank adapters, the only trained weights; names of layers are Hugging Face's."""

    model_config = _SECTION
    rank: Annotated[int, Field(ge=1, le=512)]  # the largest that vLLM takes
    alpha: Annotated[float, Field(gt=0, le=1e6)]
    target_modules: Annotated[tuple[LoraTarget, ...], _TARGETS, _AS_LIST] = get_args(LoraTarget)
    dropout: Annotated[float, Field(ge=0, le=0.99)] = 0.0  # of the inputs, in training passes
    save_merged: bool = False  # whether checkpoints also hold the whole model

    @property
    def scale(self) -> float:
        """Factor of an adapter's product B A when it is added to the layer's weight."""
        return self.alpha / self.rank

    def fused_targets(self, model_type: str | None) -> list[str]:
        """Return the targets that a family's Hugging Face models hold in a fused layer.

        Neither peft nor vLLM has an adapter for one part of such a layer.
        """
        apart = ("o_proj", "down_proj")
        fuses = model_type in ("PHI3_MINI", "PHI4")
        return [name for name in self.target_modules if fuses and name not in apart]


class CurriculumSettings(BaseModel):
    """Sampling weights of prompts by success rate: 1 from `low` to `high`, `floor` at 0 and 1."""

    model_config = _SECTION
    low: Annotated[float, Field(ge=0, le=1)] = 0.2
    high: Annotated[float, Field(ge=0, le=1)] = 0.8
    floor: Annotated[float, Field(ge=1e-3, le=1)] = 0.1
    decay: Annotated[float, Field(ge=0.01, le=1)] = 0.95

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.low > self.high:
            problem = f"{shown(self.low)} given, and curriculum.high is {self.high:g}"
            fail("low", problem, f"at most {self.high:g}")
        return self


def reused_per_step(share: float, groups_per_step: int) -> int:
    """Return how many groups of a step may be reused groups: `share` of them, rounded down."""
    return int(share * groups_per_step + 1e-9)  # 0.29 * 100 is just below 29


class ReplayGenerationSettings(BaseModel):
    """Groups that a step trains again, chosen by the spread of their rewards and their age."""

    model_config = _SECTION
    share: Annotated[float, Field(gt=0, le=0.9)] = 0.25
    max_uses: Annotated[int, Field(ge=2, le=10**4)] = 2


class DynamicSamplingSettings(BaseModel):
    """Replacement of groups whose rewards are all equal."""

    model_config = _SECTION
    enabled: bool = False
    max_discarded: Count = 256


TRUNCATION: dict[str, float] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
TRUNCATION |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""Sampler settings that change the sampling distribution, each with the value that turns it off."""

_LARGE_BYTES = 2**28
"""Size of a checkpoint above which vLLM samples on a CPU. The demo's policy (8 MB) takes as long in
both backends, and one of 2 GB takes half the CPU seconds in vLLM."""


class GeneratorSettings(BaseModel):
    """Settings of sampling and of the engine; sampler settings have vLLM's names."""

    model_config = _SECTION
    backend: Literal["vllm", "transformers"] | None = None  # null: see `Settings.default_backend`
    max_response_tokens: Positions
    temperature: Scheduled[Annotated[float, Field(ge=0.01, le=2)]]  # in which vLLM samples
    tensor_parallel_size: Processes = 1
    stop_token_ids: list[int] | None = None
    max_model_len: Annotated[int, Field(ge=2, le=2**22)] | None = None  # null: what prompts need
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 256
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    kv_cache_gib: Annotated[float, Field(ge=1e-3, le=2**20)] | None = None  # null: 1 on cpu
    enforce_eager: bool | None = None  # null: true on cpu, false on cuda
    top_p: Annotated[float, Field(ge=1e-6, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=_INT32), AfterValidator(lambda k: max(k, 0))] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    allow_biased_sampling: bool = False

    @property
    def truncation(self) -> dict[str, float]:
        """The sampler settings named in `TRUNCATION`, which the trainer's logprobs ignore."""
        return {name: getattr(self, name) for name in TRUNCATION}

    @property
    def biasing(self) -> list[str]:
        """Names of the sampler settings that change the sampling distribution."""
        return [name for name, value in self.truncation.items() if value != TRUNCATION[name]]

    @model_validator(mode="after")
    def _check_distribution(self) -> Self:
        for name in self.biasing if not self.allow_biased_sampling else ():
            problem = f"{shown(getattr(self, name))} given, by which ratios are wrong: the trainer "
            problem += "computes another distribution"
            allowed = f"{TRUNCATION[name]:g}, or generator.allow_biased_sampling: true"
            fail(name, problem, allowed)
        return self


MAX_GENERATOR_KL = {"fp32": 1e-4, "bf16": 0.05}
"""Default upper bound of the KL (estimator k3) between trainer and generator, by `dtype`.

In nats per token, over responses sampled entirely by the policy version that trains on them;
docs/training.md has the reasons."""
TENSOR_PARALLEL_FAMILIES = ("LLAMA3", "LLAMA3_2", "QWEN2")
"""torchtune's model families with a plan of the trainer's tensor parallelism."""


def needs_reference(section: Mapping[Any, Any], key: str = "kl_coeff") -> bool:
    """Whether a section needs the reference: its `kl_coeff` (number or schedule) ever exceeds 0."""
    return as_schedule(key, section.get("kl_coeff", 0)).highest > 0


class EvalSettings(BaseModel):
    """How held-out prompts are answered in evaluations."""

    model_config = _SECTION
    samples_per_prompt: Annotated[int, Field(ge=1, le=2**14)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None  # null: generator.temperature
    prompts_logged: CountOrZero = 16  # spread evenly over eval_dataset


class RewardModelSettings(BaseModel):
    """A learned reward; `path: null` turns it off."""

    model_config = _SECTION
    path: Text | None = None
    weight: Weight = 1.0
    chat_template: bool = False
    tokens_per_micro_batch: TokenBudget = 8192


class TeacherSettings(BaseModel):
    """A model that the policy is distilled from, with the weight of its term in the advantages."""

    model_config = _SECTION
    path: Text
    coeff: Annotated[float, Field(gt=0, le=1e6)] = 1.0


_DERIVED: Any = None


class Timeouts(BaseModel):
    """How long the driver and the roles wait, in seconds; null: the default.

    Where the default depends on lengths or the model, it is set once the whole config is read.
    """

    model_config = _SECTION
    startup_s: Seconds = _DERIVED
    rollout_s: Seconds = _DERIVED
    batch_s: Seconds = _DERIVED
    train_step_s: Seconds = _DERIVED
    weights_s: Seconds = _DERIVED
    reward_s: Seconds = 10.0
    collective_s: Seconds = _DERIVED
    shutdown_s: Seconds = 20.0
    heartbeat_s: Seconds = 60.0

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {k: v for k, v in given.items() if v is not None or k not in cls.model_fields}


class CpuThreads(BaseModel):
    """Threads that torch may use in each process of a role; null: the cores, split among roles."""

    model_config = _SECTION
    trainer: Processes | None = None
    generator: Processes | None = None
    reference: Processes | None = None
    reward_model: Processes | None = None
    teacher: Processes | None = None


class RaySettings(BaseModel):
    """Where the processes of a run are started."""

    model_config = _SECTION
    # null: a Ray of the run's own, on this machine
    address: Annotated[str, Field(pattern=r"^(auto|.+:[0-9]{1,5})$")] | None = None


def _without_nulls(section: Any, **values: Any) -> Any:
    """Return a section with its nulls replaced by these values."""
    return section.model_copy(
        update={key: value for key, value in values.items() if getattr(section, key) is None}
    )


class Settings(BaseModel):
    """A whole config; `config/reading.py` builds it, `config/preflight.py` checks it further."""

    model_config = _SECTION
    output_dir: Text
    base_model_path: Text
    seed: Annotated[int, Field(ge=0, le=_INT32)]
    device: Literal["cpu", "cuda"]
    dtype: Precision
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"]
    dry_run: bool = False

    model: Annotated[DictConfig, component({"max_seq_len": PositionsOrNull})]
    lora: LoraSettings | None = None
    tokenizer: Annotated[DictConfig, component(_TOKENIZER)]
    checkpointer: Annotated[DictConfig | None, component(_CHECKPOINTER, null=True)]
    resume_from_checkpoint: FlagOrPath
    dataset: Annotated[DictConfig, component(_DATASET)]
    eval_dataset: Annotated[DictConfig | None, component(_DATASET, null=True)]
    shuffle: bool
    curriculum: CurriculumSettings | None = None
    environment: Annotated[DictConfig, component({"max_turns": Positions})]
    rewards: Annotated[Rewards, Field(min_length=1)]
    reward_workers: Processes = 1  # of each generator

    ray: RaySettings = RaySettings()
    num_generators: Processes
    num_trainers: Processes
    num_references: Annotated[int, Field(ge=0, le=1024)]
    colocate: bool = False
    gpus_per_generator: GpuShare = 1.0
    gpus_per_trainer: GpuShare = 1.0
    gpus_per_reference: GpuShare = 1.0
    cpu_threads: CpuThreads = CpuThreads()
    rollouts_in_flight: Annotated[int, Field(ge=1, le=2**14)]  # groups
    weights: Literal["object_store", "nccl"] = "object_store"
    push_every_n_steps: Count
    push: Literal["whole", "delta"] = "whole"
    pull_every_m_rollouts: Count
    max_staleness: Annotated[int, Field(ge=0, le=10**6)]
    stale_groups: Literal["drop", "wait"]
    stale_tokens: Literal["drop", "mask"] = "drop"
    replay_generation: ReplayGenerationSettings | None = None
    recompute_kv_after_pull: bool

    num_steps: Count
    groups_per_step: Samples
    group_size: Annotated[int, Field(ge=2, le=2**16)]
    ppo_epochs: Annotated[int, Field(ge=1, le=10**4)]
    updates_per_batch: Samples
    tokens_per_micro_batch: TokenBudget
    loss: Annotated[DictConfig, loss_section()]
    advantages: Component
    aggregation: Component
    off_policy: Component
    teacher: TeacherSettings | None = None
    reward_shaping: RewardShapingSettings = RewardShapingSettings()
    mask_overlong: bool = False
    dynamic_sampling: DynamicSamplingSettings = DynamicSamplingSettings()
    optimizer: Annotated[DictConfig, component({"lr": _LEARNING_RATE})]
    lr_scheduler: Annotated[DictConfig | None, component(null=True)] = None
    clip_grad_norm: Annotated[float, Field(gt=0, le=1e30)] | None
    enable_activation_checkpointing: bool
    compile: bool

    generator: GeneratorSettings

    save_every_n_steps: Count
    async_checkpoint: bool = False
    eval_every_n_steps: Count
    metric_logger: Component
    log_every_n_steps: Count
    log_peak_memory_stats: bool
    profiler: Annotated[DictConfig, component({"enabled": bool}, enabled=False)]

    ptx: Annotated[DictConfig | None, component(null=True)] = None
    eval: EvalSettings = EvalSettings()
    eval_only: FlagOrPath = False
    rollout_only: bool = False
    train_from: Text | None = None  # trajectories.jsonl of a rollout_only run
    max_restarts: CountOrZero = 8  # of all roles together, within restart_window_s
    restart_window_s: Annotated[float, Field(gt=0, le=1e9)] = 3600.0
    min_generators: Processes | None = None  # null: num_generators
    replay_events: Text | None = None
    replay_until: Count | None = None  # last step that is repeated; null: replay all
    reward_model: RewardModelSettings = RewardModelSettings()
    gpus_per_reward_model: GpuShare = 1.0
    num_teachers: Processes = 1  # where there is a teacher
    gpus_per_teacher: GpuShare = 1.0
    max_failed_samples: Annotated[float, Field(ge=0, le=1)] = 0.5  # share, from step to step
    object_store_memory: Annotated[int, Field(ge=75 * 2**20, le=2**50)] | None = None  # bytes
    max_skipped_steps: Count = 10  # in a row
    max_generator_kl: Annotated[float, Field(gt=0, le=1e3)] | None = None  # null: depends on dtype
    keep_last_n: Count | None = 2  # null: all
    keep_best: Text | None = None  # a metric: eval/success_rate, eval/pass_at_4, ...
    checkpoint_failure: Literal["error", "warn"] = "error"
    rollouts_logged_per_step: CountOrZero = 1
    log_token_logprobs: bool = False  # in the logged rollouts
    logprob_chunk_tokens: TokenBudget = 1024
    data_parallel_replicate_dim: Processes = 1
    tensor_parallel_dim: Processes = 1
    reduce_dtype: Precision = "fp32"
    enable_activation_offloading: bool = False
    fsdp_cpu_offload: bool = False
    timeouts: Timeouts = Timeouts()
    user: Annotated[DictConfig, free_section()] = Field(default_factory=lambda: _user({}))

    @property
    def evaluates(self) -> bool:
        """Whether held-out prompts are answered."""
        return not (self.eval_dataset is None or self.rollout_only or self.train_from)

    @property
    def is_synchronous(self) -> bool:
        """Whether every token is trained by the policy version that sampled it."""
        return self.max_staleness == 0

    @property
    def is_hugging_face(self) -> bool:
        """Whether the policy is a model of transformers, which needs no checkpointer."""
        return self.model["_component_"] == HUGGING_FACE

    @property
    def model_type(self) -> str | None:
        """torchtune's name of the policy's family; None for a model of transformers."""
        if self.is_hugging_face or self.checkpointer is None:
            return None
        return self.checkpointer["model_type"]

    @property
    def default_bound(self) -> float | None:
        """Default of `max_generator_kl`."""
        drops = self.lora is not None and self.lora.dropout > 0
        return None if drops or self.generator.biasing else MAX_GENERATOR_KL[self.dtype]

    @property
    def probe_kl(self) -> float | None:
        """Upper bound of the KL on the fixed tokens by which each pull of weights is checked."""
        share = 0.01 if (self.device, self.dtype) == ("cpu", "fp32") else 1.0
        return None if self.max_generator_kl is None else share * self.max_generator_kl

    @property
    def publish_s(self) -> float:
        """Longest time between two pushes of weights, in seconds: for batches, steps and saves."""
        limits = self.timeouts
        step_s = limits.batch_s + 2 * limits.train_step_s
        return self.push_every_n_steps * step_s + limits.weights_s

    @property
    def default_backend(self) -> Literal["vllm", "transformers"]:
        """Default of `generator.backend`: vLLM on GPUs, for large models, or if only it will do."""
        generator = self.generator
        alone = generator.tensor_parallel_size > 1 or self.lora is not None or generator.biasing
        is_large = self._checkpoint_bytes > _LARGE_BYTES
        wants_vllm = self.device == "cuda" or is_large or alone or self.weights != "object_store"
        return "vllm" if wants_vllm and find_spec("vllm") else "transformers"

    @property
    def _checkpoint_bytes(self) -> int:
        files = Path(self.base_model_path).glob("*.safetensors")
        return sum(file.stat().st_size for file in files)

    @property
    def kl_sections(self) -> dict[str, Mapping[Any, Any]]:
        """The sections that may have a `kl_coeff`, by key."""
        shaping = self.reward_shaping.model_dump()
        return {"loss": self.loss, "reward_shaping": shaping, "advantages": self.advantages}

    @property
    def trains(self) -> bool:
        """Whether a policy is trained."""
        return not (self.eval_only or self.rollout_only)

    @model_validator(mode="before")
    @classmethod
    def _drop_null_sections(cls, given: Any) -> Any:
        """Read `section: null` as the defaults of the section."""
        fields = cls.model_fields.items()
        sections = {name for name, field in fields if isinstance(field.default, BaseModel)}
        return {k: v for k, v in given.items() if v is not None or k not in sections}

    @model_validator(mode="after")
    def _fill_in(self) -> Self:
        """Replace null by the defaults that depend on other keys."""
        is_cuda = self.device == "cuda"
        cache = {} if is_cuda else {"kv_cache_gib": 1.0}
        filled: dict[str, Any] = {
            "timeouts": _without_nulls(self.timeouts, **self._time_limits()),
            "generator": _without_nulls(
                self.generator,
                backend=self.default_backend,
                enforce_eager=not is_cuda,
                **cache,
            ),
        }
        if self.lora is not None:  # without the adapters, the policy is the reference
            filled["num_references"] = 0
        if self.max_generator_kl is None:
            filled["max_generator_kl"] = self.default_bound
        if self.profiler.enabled:
            profile = {"output_dir": f"{self.output_dir}/profile", "xpu": False, "cuda": is_cuda}
            filled["profiler"] = OmegaConf.create({**profile, **self.profiler})
        vars(self).update(filled)  # frozen for everybody else
        return self

    def _time_limits(self) -> dict[str, float]:
        """Return the time-outs that depend on lengths, or on the model's size, in seconds."""
        response, micro_batch = self.generator.max_response_tokens, self.tokens_per_micro_batch
        longest = (self.dataset.get("max_prompt_tokens") or 0) + response
        ranks = max(self.num_trainers // self.tensor_parallel_dim, 1)
        trained = self.groups_per_step * self.group_size / ranks * longest * self.ppo_epochs
        weights_s = self._checkpoint_bytes * 1e-8  # a slow disk or network
        rollout_s = max(600.0, response * 0.15)  # a token of one response in a full batch
        limits = {
            "startup_s": max(600.0, 2 * weights_s),
            "weights_s": max(300.0, weights_s),
            "rollout_s": rollout_s,
            "batch_s": max(1200.0, 2 * rollout_s),
            "train_step_s": max(1800.0, trained * 0.01),  # a token of a slow trainer rank
            "collective_s": max(600.0, micro_batch * 0.01),
        }
        return {name: min(limit_s, 1e6) for name, limit_s in limits.items()}

    # ---- values that contradict each other ------------------------------------------------------

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        self._check_asynchrony()
        self._check_colocated()
        self._check_objective()
        self._check_lengths()
        self._check_ranks()
        self._check_optimizer()
        self._check_lora()
        self._check_backend()
        self._check_keep_best()
        self._check_transfer()
        self._check_prompts()
        self._check_rewards()
        if self.log_token_logprobs and self.rollouts_logged_per_step == 0:
            self._refuse("log_token_logprobs", "and rollouts_logged_per_step is 0", "false")
        return self

    def _value(self, key: str) -> Any:
        section, _, name = key.rpartition(".")
        holder: Any = getattr(self, section) if section else self
        return holder.get(name) if OmegaConf.is_dict(holder) else getattr(holder, name)

    def _refuse(self, key: str, why: str, allowed: str) -> None:
        fail(key, f"{shown(self._value(key))} given, {why}", allowed)

    def _require(self, given: str, why: str, required: Mapping[str, Any], instead: str) -> None:
        """Refuse keys whose value is not the one that the setting `given` requires."""
        for key, value in required.items():
            if self._value(key) != value:
                self._refuse(key, f"and with {given}, {why}", f"{shown(value)}, or {instead}")

    def _check_asynchrony(self) -> None:
        if self.push_every_n_steps > (most := self.max_staleness + 1):
            why = "which would deadlock: rollouts wait for a push, and it for them"
            self._refuse("push_every_n_steps", why, f"at most max_staleness + 1 = {most}")
        if (self.min_generators or 1) > self.num_generators:
            why = f"and num_generators is {self.num_generators}"
            self._refuse("min_generators", why, "at most num_generators, or null for all of them")

    def _check_colocated(self) -> None:
        if not self.colocate:
            return
        workers, is_cuda = self.generator.tensor_parallel_size, self.device == "cuda"
        required = {"eval_only": False, "rollout_only": False, "train_from": None}
        required |= {"max_staleness": 0, "push_every_n_steps": 1, "pull_every_m_rollouts": 1}
        required |= {"num_trainers": self.num_generators * workers}
        required |= {"gpus_per_generator": 1} if is_cuda else {}
        required |= {"gpus_per_trainer": 1} if is_cuda and workers > 1 else {}
        why = "generators take turns with the trainers on their GPUs"
        self._require("colocate: true", why, required, "colocate: false")
        if is_cuda and self.generator.kv_cache_gib is None:
            why = "and what vLLM finds free beside a trainer that starts is chance"
            self._refuse("generator.kv_cache_gib", why, "a number, with colocate: true")

    def _check_objective(self) -> None:
        has_reference = self.num_references > 0 or self.lora is not None
        for name, section in self.kl_sections.items():
            key = f"{name}.kl_coeff"
            if needs_reference(section, key) and not has_reference:
                why = f"and {key} is {shown(section['kl_coeff'])}"
                self._refuse("num_references", why, f"at least 1, or {key}: 0")
        if OmegaConf.is_dict(self.optimizer.get("lr")) and self.lr_scheduler:
            problem = "given beside a schedule for optimizer.lr"
            fail("lr_scheduler", problem, "null, or a number there")
        correction = self.off_policy["_component_"]
        weighs = correction.rpartition(".")[2] in ("TokenTIS", "SequenceTIS", "MaskedIS")
        if weighs and self.loss.get("_component_", "").endswith(".DecoupledPPOLoss"):
            problem = f"{correction} given, and DecoupledPPOLoss has such weights already"
            fail("off_policy", problem, "NoCorrection, GeometricMask or OffPolicySequenceMask")

    def _check_lengths(self) -> None:
        response = self.generator.max_response_tokens
        for key in ("environment.max_turns", "reward_shaping.overlong_tokens"):
            if (self._value(key) or 0) > response:
                why = f"and a response has up to {response} tokens"
                self._refuse(key, why, f"at most generator.max_response_tokens = {response}")
        prompt = self.dataset.get("max_prompt_tokens") or 1
        for key in ("tokens_per_micro_batch", "generator.max_model_len"):
            limit = self._value(key)
            if limit is not None and limit < prompt + response:
                why = f"less than a prompt ({prompt}) and the longest response ({response})"
                self._refuse(key, why, f"at least {prompt + response}")

    def _check_ranks(self) -> None:
        ranks, tensor = self.num_trainers, self.tensor_parallel_dim
        families = TENSOR_PARALLEL_FAMILIES
        if tensor > 1 and self.model_type not in (None, *families):
            why = f"and there is no tensor-parallel plan for {self.model_type}"
            self._refuse("tensor_parallel_dim", why, f"1, or one of {', '.join(families)}")
        if ranks % tensor:
            why, allowed = f"and num_trainers is {ranks}", "a divisor of num_trainers"
            self._refuse("tensor_parallel_dim", why, allowed)
        parts = ranks // tensor
        if parts % self.data_parallel_replicate_dim:
            why = f"and num_trainers / tensor_parallel_dim is {parts}"
            self._refuse("data_parallel_replicate_dim", why, f"a divisor of {parts}")
        samples = self.groups_per_step * self.group_size
        if parts * self.updates_per_batch > samples:
            allowed = f"num_trainers / tensor_parallel_dim x updates_per_batch at most {samples}"
            key = "num_trainers" if parts > samples else "updates_per_batch"
            self._refuse(key, f"and a step has {samples} samples", allowed)
        if tensor > 1:
            why = "torch.compile fails on layers that are split over ranks"
            given = f"tensor_parallel_dim: {tensor}"
            self._require(given, why, {"compile": False}, "tensor_parallel_dim: 1")

    def _check_optimizer(self) -> None:
        path = self.optimizer["_component_"]
        if path.endswith(".CPUOffloadOptimizer"):
            problem = f"{path} given, which takes gradients away before they are clipped and "
            problem += "checked"
            fail("optimizer", problem, "an optimizer on CUDA with fsdp_cpu_offload: true")
        if path.startswith("torchao.") and self.optimizer.get("eps") is None:
            problem = f"{path} given without eps: 8 bits round small second moments to 0, and "
            problem += "with the default of 1e-8 such parameters then move many times too far"
            fail("optimizer", problem, "optimizer.eps not small against your gradients (1e-5, say)")
        if self.enable_activation_offloading and not self.enable_activation_checkpointing:
            why = "and without checkpointing, every intermediate value would be copied"
            allowed = "false, or enable_activation_checkpointing: true"
            self._refuse("enable_activation_offloading", why, allowed)

    def _check_lora(self) -> None:
        if self.lora is None:
            return
        if fused := self.lora.fused_targets(self.model_type):
            problem = f"{', '.join(fused)} given, which {self.model_type} has in a fused layer"
            fail("lora.target_modules", problem, "o_proj, down_proj")
        required = {"weights": "object_store", "tensor_parallel_dim": 1}
        why = "adapters are neither sent over NCCL nor split over ranks"
        self._require("lora", why, required, "lora: null")
        if needs_reference(self.reward_shaping.model_dump()):
            why = "and with lora, the reference's logprobs are computed after the rewards were "
            why += "shaped"
            allowed = "0; loss.kl_coeff or advantages.kl_coeff instead"
            self._refuse("reward_shaping.kl_coeff", why, allowed)

    def _check_backend(self) -> None:
        if self.generator.backend == "vllm" and find_spec("vllm") is None:
            self._refuse("generator.backend", "which is not installed", "transformers, or null")
        if self.generator.backend != "vllm":
            required = {"generator.tensor_parallel_size": 1, "lora": None}
            required |= {"weights": "object_store"}
            required |= {"colocate": False} if self.device == "cuda" else {}
            required |= {f"generator.{name}": TRUNCATION[name] for name in self.generator.biasing}
            why = "there is no such thing"
            self._require(
                "generator.backend: transformers", why, required, "generator.backend: vllm"
            )

    def _check_transfer(self) -> None:
        """Refuse what `weights: nccl` cannot serve: devices, or the placement of roles."""
        if self.weights == "object_store":
            return
        required = {"push": "whole", "device": "cuda", "train_from": None, "colocate": False}
        why = "trainers send whole weights to vLLM, from GPU to GPU"
        self._require(f"weights: {self.weights}", why, required, "weights: object_store")
        if self.gpus_per_trainer + self.gpus_per_generator <= 1:
            why = "and NCCL lets no two roles share a GPU"
            self._refuse("weights", why, "object_store, or GPU shares of more than 1 together")

    def _check_prompts(self) -> None:
        if self.curriculum is not None:
            required, why = {"shuffle": True, "train_from": None}, "prompts are drawn at random"
            self._require("a curriculum", why, required, "curriculum: null")
        rule, batch = self.replay_generation, self.groups_per_step
        if rule is None:
            return
        required, why = {"train_from": None, "rollout_only": False}, "groups are trained again"
        self._require("replay_generation", why, required, "replay_generation: null")
        if self.max_staleness == 0:
            problem = "given with max_staleness: 0, by which no trained group is fresh enough again"
            fail("replay_generation", problem, "null, or max_staleness: 1 or more")
        if not reused_per_step(rule.share, batch):
            why = f"and of groups_per_step: {batch}, that is less than one group"
            allowed = f"at least {1 / batch:.4g}" if batch > 1 else "groups_per_step: 2 or more"
            self._refuse("replay_generation.share", why, allowed)

    def _check_rewards(self) -> None:
        if self.reward_model.path is not None and "reward_model" in self.rewards:
            problem = "given beside reward_model.path, whose scores have this name"
            fail("rewards.reward_model", problem, "another name")
        marked = [name for name, node in self.rewards.items() if node.is_success]
        if len(marked) != 1:
            problem = f"is_success: true on {' and '.join(marked) or 'none'}"
            fail("rewards", problem, "exactly one reward with is_success: true")

    def _check_keep_best(self) -> None:
        metric, samples = self.keep_best, self.eval.samples_per_prompt
        for key in ("eval_only", "keep_best") if self.eval_dataset is None else ():
            if value := getattr(self, key):
                fail(key, f"{shown(value)} given with eval_dataset: null", "a data set there")
        allowed = ["eval/success_rate", "eval/reward_mean"]
        allowed += [f"eval/pass_at_{2**i}" for i in range(1, samples.bit_length())]
        if metric is not None and metric not in allowed:
            fail("keep_best", f"{shown(metric)} given", f"null | {' | '.join(allowed)}")
        save, evaluate = self.save_every_n_steps, self.eval_every_n_steps
        if metric is not None and save % evaluate:
            problem = f"{save} given with keep_best, which ranks checkpoints by their evaluation"
            fail("save_every_n_steps", problem, f"a multiple of eval_every_n_steps: {evaluate}")


def processes_of(settings: Settings, needs_reference: bool) -> dict[str, int]:
    """Count the processes of each role, including stand-ins in partial runs (partial_runs.py)."""
    has_groups = not settings.eval_only
    return {
        "trainer": settings.num_trainers,
        "reference": settings.num_references if needs_reference and has_groups else 0,
        "teacher": settings.num_teachers if settings.teacher and settings.trains else 0,
        "reward_model": int(settings.reward_model.path is not None and has_groups),
        "generator": settings.num_generators,
    }
