"""Defines every config key with type, default and bounds, in the order of the shipped configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Generic, Literal, Required, TypeVar, get_args

from omegaconf import DictConfig, OmegaConf
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    Tag,
    model_validator,
    with_config,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import TypedDict

from grpo_components.errors import ConfigError, shown
from grpo_components.time_limits import derived_limits

_SECTION = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_ARGUMENTS = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

# ---- kinds of values ----------------------------------------------------------------------------

_INT32 = 2**31 - 1
Text = Annotated[str, Field(min_length=1)]
TextOrNull = Text | None
RayAddress = Annotated[str, Field(pattern=r"^(auto|.+:[0-9]{1,5})$")]
Seed = Annotated[int, Field(ge=0, le=_INT32)]
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
Temperature = Annotated[float, Field(ge=0.01, le=2)]  # range in which vLLM samples
Penalty = Annotated[float, Field(ge=-2, le=2)]
Precision = Literal["fp32", "bf16"]
Number = TypeVar("Number")


@with_config(_SECTION)
class ScheduleKeys(TypedDict, Generic[Number], total=False):
    """A number that changes over training; `as_schedule` checks which keys its shape needs."""

    schedule: Required[Literal["constant", "linear", "cosine"]]
    start: Required[Number]
    end: Number
    num_steps: Count
    warmup_steps: CountOrZero


Scheduled = Annotated[
    Annotated[Number, Tag("<number>")] | Annotated[ScheduleKeys[Number], Tag("<schedule>")],
    Discriminator(lambda value: "<schedule>" if isinstance(value, dict) else "<number>"),
]
FlagOrPath = Annotated[
    Annotated[bool, Tag("<flag>")] | Annotated[Text, Tag("<path>")],
    Discriminator(lambda value: "<path>" if isinstance(value, str) else "<flag>"),
]

# ---- components: `_component_`, and the arguments that the recipe reads --------------------------

HUGGING_FACE = "grpo_components.models.hugging_face"
"""The model builder that needs no checkpointer."""
REFUSED_MODEL_TYPES = {
    "QWEN3": f"torchtune 0.6.1 has no Qwen3, which model._component_={HUGGING_FACE} trains",
    "GEMMA2": "torchtune 0.6.1 swaps Gemma 2's norms and caps its hidden state, not its logits",
    "LLAMA3_VISION": "it is multimodal, and prompts and responses are text here",
}
ModelType = Literal[
    "LLAMA2", "LLAMA3", "LLAMA3_2", "MISTRAL", "GEMMA", "PHI3_MINI", "PHI4", "QWEN2"
]


def _trainable(model_type: Any) -> Any:
    if isinstance(model_type, str) and (why := REFUSED_MODEL_TYPES.get(model_type)):
        raise ConfigError("", f"{model_type} given, but {why}", ", ".join(get_args(ModelType)))
    return model_type


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _each_once(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise ConfigError("", f"{shown(names)} given, with a name twice", "each name once")
    return names


LoraTargets = Annotated[list[LoraTarget], Field(min_length=1), AfterValidator(_each_once)]


CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}
"""Default clip ranges of the recipe's own loss."""
PENALTIES: dict[str, Any] = {
    "kl_coeff": 0.0,
    "kl_estimator": "k3",
    "entropy_coeff": 0.0,
}
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

    def read(given: Any, check: Callable[[Any], dict[str, Any] | None]) -> DictConfig | None:
        if isinstance(given, dict):
            given = _with_defaults(given, defaults)
            given = None if given.get("_component_", "") is None else given
        checked = check(given)
        return None if checked is None else OmegaConf.create({**given, **checked})

    return _as_dict_config(read, _node({"_component_": Required[Text], **(keys or {})}), null=null)


def _with_defaults(given: dict[Any, Any], defaults: dict[str, Any]) -> dict[Any, Any]:
    return {**given, **{name: defaults[name] for name in defaults if name not in given}}


def loss_section() -> GetPydanticSchema:
    """Return the pydantic type of the section `loss`: the recipe's own loss, or a component."""

    def read(given: Any, check: Callable[[Any], dict[str, Any]]) -> DictConfig:
        if not isinstance(given, dict):
            raise ConfigError("", f"{shown(given)} given", "a section; loss._component_ names one")
        if given.get("_component_", "") is None:
            given = {name: given[name] for name in given if name != "_component_"}
        defaults = PENALTIES if "_component_" in given else CLIP | PENALTIES
        given = _with_defaults(given, defaults)
        return OmegaConf.create({**given, **check(given)})

    default: Any = Annotated[_node({**_CLIP_TYPES, **_PENALTY_TYPES}, _SECTION), Tag("<default>")]
    keys = {"_component_": Required[Text], **_PENALTY_TYPES}
    named: Any = Annotated[_node(keys), Tag("<named>")]
    is_named = Discriminator(lambda given: "<named>" if "_component_" in given else "<default>")
    return _as_dict_config(read, Annotated[default | named, is_named])


def free_section() -> GetPydanticSchema:
    """Return the pydantic type of the section `user`: any keys and values, passed through."""

    def read(given: Any, check: Callable[[Any], dict[str, Any]]) -> DictConfig:
        return OmegaConf.create(check({} if given is None else given))

    return _as_dict_config(read, dict[Any, Any])


def _as_dict_config(
    read: Callable[..., DictConfig | None], plain: Any, *, null: bool = False
) -> GetPydanticSchema:
    """Return the pydantic type of a DictConfig."""

    def schema(_: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        serialization = core_schema.plain_serializer_function_ser_schema(
            OmegaConf.to_container, when_used="unless-none"
        )
        inner = handler.generate_schema(plain)
        inner = core_schema.nullable_schema(inner) if null else inner
        return core_schema.no_info_wrap_validator_function(read, inner, serialization=serialization)

    return GetPydanticSchema(schema)


Component = Annotated[DictConfig, component()]
_REWARD = {"weight": Weight, "is_success": bool}
Rewards = dict[str, Annotated[DictConfig, component(_REWARD, weight=1.0, is_success=False)]]
_TOKENIZER = {"path": Text, "merges_file": Text, "special_tokens_path": TextOrNull}
_CHECKPOINTER = {"model_type": Required[Annotated[ModelType, BeforeValidator(_trainable)]]}
_DATASET = {"source": Text, "max_prompt_tokens": PositionsOrNull, "num_rows": CountOrNull}
_LEARNING_RATE = Scheduled[Annotated[float, Field(gt=0, le=1e3)]]

# ---- sections ------------------------------------------------------------------------------------


class RewardShapingSettings(BaseModel):
    """Penalties that are subtracted from the rewards."""

    model_config = _SECTION
    kl_coeff: Scheduled[Coefficient] = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    overlong_tokens: Annotated[int, Field(ge=0, le=2**22)] = 0
    overlong_penalty: Coefficient = 1.0


class LoraSettings(BaseModel):
    """Low-rank adapters, which alone are trained; the names of layers are Hugging Face's."""

    model_config = _SECTION
    rank: Annotated[int, Field(ge=1, le=512)]  # the largest that vLLM takes
    alpha: Annotated[float, Field(gt=0, le=1e6)]
    target_modules: LoraTargets = Field(default_factory=lambda: list(get_args(LoraTarget)))
    dropout: Annotated[float, Field(ge=0, le=0.99)] = 0.0
    save_merged: bool = False


class CurriculumSettings(BaseModel):
    """Draws of prompts by their success rate; the weight is 1 from `low` to `high`."""

    model_config = _SECTION
    low: Annotated[float, Field(ge=0, le=1)] = 0.2
    high: Annotated[float, Field(ge=0, le=1)] = 0.8
    floor: Annotated[float, Field(ge=1e-3, le=1)] = 0.1
    decay: Annotated[float, Field(ge=0.01, le=1)] = 0.95


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


class GeneratorSettings(BaseModel):
    """Settings of sampling and of the vLLM engine; sampler settings have vLLM's names."""

    model_config = _SECTION
    max_response_tokens: Positions
    temperature: Scheduled[Temperature]
    tensor_parallel_size: Processes = 1
    stop_token_ids: list[int] | None = None
    max_model_len: Annotated[int, Field(ge=2, le=2**22)] | None = None
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 256
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    kv_cache_gib: Annotated[float, Field(ge=1e-3, le=2**20)] | None = None  # null: 1 on cpu
    enforce_eager: bool | None = None  # null: true on cpu, false on cuda
    top_p: Annotated[float, Field(ge=1e-6, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    allow_biased_sampling: bool = False


TRUNCATION: dict[str, float] = {
    name: GeneratorSettings.model_fields[name].default
    for name in (
        *("top_p", "top_k", "min_p"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    )
}
"""Sampler settings that change the sampling distribution, each with the value that turns it off."""


def biasing(generator: GeneratorSettings) -> list[str]:
    """Return the names of the sampler settings that change the sampling distribution."""
    off = {"top_k": (0, -1)}  # in vLLM, either value turns it off
    return [
        name
        for name, neutral in TRUNCATION.items()
        if getattr(generator, name) not in off.get(name, (neutral,))
    ]


def _greedy_or_warm(temperature: float) -> float:
    if 0 < temperature < 0.01:
        raise PydanticCustomError("refused", "vLLM samples at 0, or at 0.01 to 2")
    return temperature


class EvalSettings(BaseModel):
    """How held-out prompts are answered in evaluations."""

    model_config = _SECTION
    samples_per_prompt: Annotated[int, Field(ge=1, le=2**14)] = 1
    temperature: (
        Annotated[
            float,
            Field(ge=0, le=2),
            AfterValidator(_greedy_or_warm),
        ]
        | None
    ) = None  # null: generator.temperature
    allow_other_prompts: bool = False
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


_FROM_LENGTHS: Any = None


class Timeouts(BaseModel):
    """How long the driver and the roles wait, in seconds; null: the default.

    Where the default depends on lengths, `time_limits.py` derives it once the whole config is read.
    """

    model_config = _SECTION
    startup_s: Seconds = 600.0
    rollout_s: Seconds = _FROM_LENGTHS
    batch_s: Seconds = _FROM_LENGTHS
    train_step_s: Seconds = _FROM_LENGTHS
    weights_s: Seconds = 300.0
    reward_s: Seconds = 10.0
    collective_s: Seconds = _FROM_LENGTHS
    shutdown_s: Seconds = 20.0
    heartbeat_s: Seconds = 60.0

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        return (
            {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given
        )


class CpuThreads(BaseModel):
    """Threads that torch may use in each process of a role; null: the cores over the roles."""

    model_config = _SECTION
    trainer: Processes | None = None
    generator: Processes | None = None
    reference: Processes | None = None
    reward_model: Processes | None = None
    teacher: Processes | None = None


class RaySettings(BaseModel):
    """Where the processes of a run are started."""

    model_config = _SECTION
    address: RayAddress | None = None  # null: a Ray of the run's own, on this machine


class Settings(BaseModel):
    """A whole config; `config/reading.py` builds it, `config/preflight.py` checks it further."""

    model_config = _SECTION
    output_dir: Text
    base_model_path: Text
    seed: Seed
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
    keep_last_n: Count | None = None
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
    user: Annotated[DictConfig, free_section()] = Field(default_factory=OmegaConf.create)

    @property
    def evaluates(self) -> bool:
        """Whether held-out prompts are answered."""
        return not (self.eval_dataset is None or self.rollout_only or self.train_from)

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

    @model_validator(mode="after")
    def _keep_one_copy(self) -> Settings:
        """Start no reference beside adapters: without them, the policy is the reference."""
        if self.lora is not None:
            self.num_references = 0
        return self

    @model_validator(mode="after")
    def _derive_timeouts(self) -> Settings:
        parts = max(self.num_trainers // self.tensor_parallel_dim, 1)
        derived = derived_limits(
            prompt_tokens=self.dataset.get("max_prompt_tokens") or 0,
            response_tokens=self.generator.max_response_tokens,
            samples_per_rank=self.groups_per_step * self.group_size / parts,
            tokens_per_micro_batch=self.tokens_per_micro_batch,
            passes=self.ppo_epochs,
        )
        missing = {k: v for k, v in derived.items() if getattr(self.timeouts, k) is None}
        self.timeouts = self.timeouts.model_copy(update=missing)
        return self

    @model_validator(mode="before")
    @classmethod
    def _drop_null_sections(cls, given: Any) -> Any:
        """Read `section: null` as the defaults of the section."""
        fields = cls.model_fields.items()
        sections = {name for name, field in fields if isinstance(field.default, BaseModel)}
        return {k: v for k, v in given.items() if v is not None or k not in sections}


def teachers_of(settings: Settings) -> int:
    """Return the number of teachers that a run starts: none if nothing is trained."""
    trains = not (settings.eval_only or settings.rollout_only)
    return settings.num_teachers if settings.teacher is not None and trains else 0
