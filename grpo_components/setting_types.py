"""Types of config values: bounded numbers, schedules, and components with their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Generic, Literal, NotRequired, Required, TypeVar

from omegaconf import DictConfig, OmegaConf
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    Tag,
    WrapValidator,
    with_config,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import TypedDict

from grpo_components.errors import ConfigError, shown

SECTION = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_ARGUMENTS = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

# ---- kinds of values ----------------------------------------------------------------------------

_INT32 = 2**31 - 1
_AS_GIVEN = WrapValidator(lambda value, check: (check(value), value)[1])  # 1 does not become 1.0
_PATH = Field(json_schema_extra={"allowed": "a path"})
Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[Text, _PATH]
RayAddress = Annotated[
    str,
    Field(
        pattern=r"^(auto|[A-Za-z0-9._-]+:[0-9]{1,5}|\[[0-9A-Fa-f:]+\]:[0-9]{1,5})$",
        json_schema_extra={"allowed": "auto, host:port of a Ray cluster's head"},
    ),
]
DottedPath = Annotated[Text, Field(json_schema_extra={"allowed": "a dotted path"})]
TokenIds = Annotated[list[int], Field(json_schema_extra={"allowed": "a list of token ids"})]
Seed = Annotated[int, Field(ge=0, le=_INT32)]
Count = Annotated[int, Field(ge=1, le=_INT32)]  # number of steps, policy versions or groups
CountOrZero = Annotated[int, Field(ge=0, le=_INT32)]
Positions = Annotated[int, Field(ge=1, le=2**22)]  # no supported model has more
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


@with_config(SECTION)
class ConstantSchedule(TypedDict, Generic[Number]):
    """A number that is constant after a warm-up; see `objective/schedules.py`."""

    schedule: Literal["constant"]
    start: Annotated[Number, _AS_GIVEN]
    warmup_steps: NotRequired[CountOrZero]


@with_config(SECTION)
class ChangingSchedule(TypedDict, Generic[Number]):
    """A number that changes over training; see `objective/schedules.py`."""

    schedule: Literal["linear", "cosine"]
    start: Annotated[Number, _AS_GIVEN]
    end: Annotated[Number, _AS_GIVEN]
    num_steps: Count
    warmup_steps: NotRequired[CountOrZero]


Schedule = Annotated[
    ConstantSchedule[Number] | ChangingSchedule[Number], Field(discriminator="schedule")
]
Scheduled = Annotated[
    Annotated[Number, Tag("<number>")] | Annotated[Schedule[Number], Tag("<schedule>")],
    Discriminator(lambda value: "<schedule>" if isinstance(value, dict) else "<number>"),
]
FlagOrPath = Annotated[
    Annotated[bool, Tag("<flag>")] | Annotated[PathText, Tag("<path>")],
    Discriminator(lambda value: "<path>" if isinstance(value, str) else "<flag>"),
]

# ---- components: `_component_`, and the arguments that have bounds or that the recipe reads -----

HUGGING_FACE = "grpo_components.models.hugging_face"
"""The model builder that needs no checkpointer."""
REFUSED_MODEL_TYPES = {
    "QWEN3": f"torchtune 0.6.1 has no Qwen3, which model._component_={HUGGING_FACE} trains",
    "GEMMA2": "torchtune 0.6.1 swaps Gemma 2's norms and caps its hidden state, not its logits",
    "LLAMA3_VISION": "it is multimodal, and prompts and responses are text here",
    "CLIP_TEXT": "it is an encoder and generates no text",
    "T5_ENCODER": "it is an encoder and generates no text",
    "REWARD": "it gives scores and generates no text",
}


def _trainable(model_type: Any) -> Any:
    if isinstance(model_type, str) and (why := REFUSED_MODEL_TYPES.get(model_type)):
        raise PydanticCustomError("refused", "{why}", {"why": why})
    return model_type


ModelType = Literal[
    "LLAMA2", "LLAMA3", "LLAMA3_2", "MISTRAL", "GEMMA", "PHI3_MINI", "PHI4", "QWEN2"
]


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _each_once(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        problem = f"{shown(names)} given, with a name twice"
        raise ConfigError("lora.target_modules", problem, "each name once")
    return names


LoraTargets = Annotated[list[LoraTarget], Field(min_length=1), AfterValidator(_each_once)]


@with_config(_ARGUMENTS)
class AnyArguments(TypedDict):
    """Arguments of any component; its signature decides which ones are allowed."""

    _component_: DottedPath


@with_config(_ARGUMENTS)
class ModelArguments(TypedDict, total=False):
    """Arguments of a model builder."""

    _component_: Required[DottedPath]
    vocab_size: Annotated[float, Field(ge=1, le=2**22), _AS_GIVEN] | None
    num_layers: Annotated[float, Field(ge=1, le=1024), _AS_GIVEN] | None
    num_heads: Annotated[float, Field(ge=1, le=4096), _AS_GIVEN] | None
    num_kv_heads: Annotated[float, Field(ge=1, le=4096), _AS_GIVEN] | None
    head_dim: Annotated[float, Field(ge=1, le=2**16), _AS_GIVEN] | None
    embed_dim: Annotated[float, Field(ge=1, le=2**22), _AS_GIVEN] | None
    intermediate_dim: Annotated[float, Field(ge=1, le=2**22), _AS_GIVEN] | None
    max_seq_len: Annotated[float, Field(ge=1, le=2**22), _AS_GIVEN] | None
    attn_dropout: Annotated[float, Field(ge=0, le=1), _AS_GIVEN] | None
    norm_eps: Annotated[float, Field(ge=0, le=1), _AS_GIVEN] | None
    rope_base: Annotated[float, Field(ge=1, le=1e12), _AS_GIVEN] | None


@with_config(_ARGUMENTS)
class TokenizerArguments(TypedDict, total=False):
    """Arguments of a tokenizer, its files among them."""

    _component_: Required[DottedPath]
    path: PathText
    merges_file: PathText
    special_tokens_path: PathText | None
    max_seq_len: Positions | None


@with_config(_ARGUMENTS)
class CheckpointerArguments(TypedDict):
    """Arguments of the checkpointer, which reads and writes the policy."""

    _component_: DottedPath
    model_type: Annotated[ModelType, BeforeValidator(_trainable)]


@with_config(_ARGUMENTS)
class DatasetArguments(TypedDict, total=False):
    """Arguments of a data set of prompts."""

    _component_: Required[DottedPath]
    source: PathText
    max_prompt_tokens: Positions | None
    num_rows: Count | None


@with_config(_ARGUMENTS)
class EnvironmentArguments(TypedDict, total=False):
    """Arguments of the environment, which answers the policy turn by turn."""

    _component_: Required[DottedPath]
    max_turns: Positions


@with_config(_ARGUMENTS)
class RewardArguments(TypedDict):
    """Arguments of a reward, with its weight in the sum of rewards."""

    _component_: DottedPath
    weight: Weight
    is_success: bool


CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}
"""Default clip ranges of the recipe's own loss."""
PENALTIES: dict[str, Any] = {
    "kl_coeff": 0.0,
    "kl_estimator": "k3",
    "entropy_coeff": 0.0,
}
"""Defaults of the KL and entropy terms that are added to every loss."""
ClipLow = Scheduled[Annotated[float, Field(gt=0, le=1)]]
ClipHigh = Scheduled[Annotated[float, Field(gt=0, le=1e6)]]
KLEstimator = Literal["k1", "k2", "k3"]


@with_config(SECTION)
class DefaultLossArguments(TypedDict):
    """Keys of `loss` for the recipe's own loss."""

    clip_low: ClipLow
    clip_high: ClipHigh
    kl_coeff: Scheduled[Coefficient]
    kl_estimator: KLEstimator
    entropy_coeff: Coefficient


@with_config(_ARGUMENTS)
class LossArguments(TypedDict, total=False):
    """Keys of `loss` for another policy loss, which `_component_` names."""

    _component_: Required[DottedPath]
    clip_low: ClipLow
    clip_high: ClipHigh
    kl_coeff: Scheduled[Coefficient]
    kl_estimator: KLEstimator
    entropy_coeff: Coefficient


AnyLossArguments = Annotated[
    Annotated[DefaultLossArguments, Tag("<default>")] | Annotated[LossArguments, Tag("<named>")],
    Discriminator(lambda given: "<named>" if "_component_" in given else "<default>"),
]


@with_config(_ARGUMENTS)
class OptimizerArguments(TypedDict, total=False):
    """Arguments of an optimizer."""

    _component_: Required[DottedPath]
    lr: Scheduled[Annotated[float, Field(gt=0, le=1e3)]]
    weight_decay: Annotated[float, Field(ge=0, le=1e3), _AS_GIVEN] | None
    momentum: Annotated[float, Field(le=1e3), _AS_GIVEN] | None
    eps: Annotated[float, Field(ge=0, le=1e3), _AS_GIVEN] | None


@with_config(_ARGUMENTS)
class LrSchedulerArguments(TypedDict, total=False):
    """Arguments of a learning rate scheduler."""

    _component_: Required[DottedPath]
    num_warmup_steps: CountOrZero


@with_config(_ARGUMENTS)
class ProfilerArguments(TypedDict, total=False):
    """Arguments of a profiler of training steps."""

    _component_: Required[DottedPath]
    enabled: Required[bool]
    wait_steps: CountOrZero | None
    warmup_steps: CountOrZero | None
    active_steps: Count | None
    num_cycles: CountOrZero | None


@with_config(_ARGUMENTS)
class PtxArguments(TypedDict, total=False):
    """Arguments of a supervised loss that is added to the policy loss."""

    _component_: Required[DottedPath]
    coeff: Coefficient
    examples_per_update: Samples
    seed: Seed


def component(
    arguments: Any = AnyArguments, *, null: bool = False, **defaults: Any
) -> GetPydanticSchema:
    """Return the pydantic type of a `_component_` node: checks values and makes a DictConfig."""

    def read(given: Any, check: Callable[[Any], dict[str, Any] | None]) -> DictConfig | None:
        if isinstance(given, dict):
            given = {**given, **{name: defaults[name] for name in defaults if name not in given}}
            given = None if given.get("_component_", "") is None else given
        checked = check(given)
        return None if checked is None else OmegaConf.create({**given, **checked})

    return _as_dict_config(read, arguments, null=null)


def loss_section() -> GetPydanticSchema:
    """Return the pydantic type of the section `loss`: the recipe's own loss, or a component."""

    def read(given: Any, check: Callable[[Any], dict[str, Any]]) -> DictConfig:
        if not isinstance(given, dict):
            hint = "; a component stands in loss._component_" if isinstance(given, str) else ""
            raise PydanticCustomError("refused", "loss is a section{hint}", {"hint": hint})
        given = {
            name: given[name] for name in given if (name, given[name]) != ("_component_", None)
        }
        defaults = PENALTIES if "_component_" in given else CLIP | PENALTIES
        given = {**given, **{name: defaults[name] for name in defaults if name not in given}}
        return OmegaConf.create({**given, **check(given)})

    return _as_dict_config(read, AnyLossArguments)


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
Rewards = dict[str, Annotated[DictConfig, component(RewardArguments, weight=1.0, is_success=False)]]
