"""The exhibits: published silent bugs, how each is planted, and the alarm that must name it."""

from __future__ import annotations

from dataclasses import dataclass

SHORT = ("num_steps=6", "eval_dataset.num_rows=16", "save_every_n_steps=100")
SYNCHRONOUS = ("max_staleness=0", "pull_every_m_rollouts=1")
TWO_RANKS = ("num_trainers=2",)
TURNS = (
    "environment._component_=grpo_components.rollout.multi_turn.MultiTurnEnvironment",
    "environment.max_turns=2",
    "environment.world._component_=grpo_components.rollout.tutor.Tutor",
    "generator.max_response_tokens=60",
)
LONG_PROMPT = (
    'dataset.prompt_template="Question: one and one? Answer: 2 Question: two and two? Answer: 4 '
    'Question: {question}\\nAnswer:\\n"',
    "dataset.max_prompt_tokens=160",
)
PROBE = r"pulled version (\d+), but "
AGREEMENT = r"step (\d+): trainer and generator disagree .*mismatch/fresh_kl is \S+"


@dataclass(frozen=True)
class Exhibit:
    """One bug, planted into one short run."""

    name: str
    """Name on the page; also that of the bug in `bugs.py`, unless the bug is in `overrides`."""
    was: str
    """What the published bug did."""
    thread: str
    """Address of a public thread about it."""
    alarm: str
    """Kind of the alarm: `start`, `run` or `audit`."""
    pattern: str
    """Regular expression of the alarm's line; its first group, if any, is the training step."""
    named: str
    """The alarm, in words, for the page."""
    overrides: tuple[str, ...] = ()
    """Overrides of the config that a clean run has, too."""
    planted: tuple[str, ...] = ()
    """Overrides that plant the bug, where it is a component of the config."""
    bug: str = ""
    """Name of the bug in `bugs.py`; empty if `planted` plants it."""
    resumes: bool = False
    """Whether the run is made in two parts: three steps, and a resume from their checkpoint."""


def _github(thread: str) -> str:
    repository, _, number = thread.partition("#")
    kind = "pull" if number.startswith("p") else "issues"
    return f"https://github.com/{repository}/{kind}/{number.lstrip('p')}"


def _swap(name: str, was: str, thread: str, found: str = "computes other logprobs") -> Exhibit:
    """Return an exhibit of a generator with other weights than it names."""
    named = "probe of the weights after each pull"
    return Exhibit(*(name, was, _github(thread), "run", PROBE + found, named), bug=name)


def _mismatch(name: str, was: str, thread: str, *overrides: str) -> Exhibit:
    """Return an exhibit whose trainer computes other logprobs than the generator recorded."""
    named = "bound of the mismatch on fresh tokens (`max_generator_kl`)"
    return Exhibit(
        *(name, was, _github(thread), "run", AGREEMENT, named), overrides=overrides, bug=name
    )


EXHIBITS = (
    Exhibit(
        "ratio_is_one",
        "the ratio is the policy over itself: stale tokens are not corrected, nothing is clipped",
        _github("meta-pytorch/torchforge#p571"),
        "start",
        r"warning: loss: .*the ratio",
        "trial of the loss",
        planted=("loss._component_=planted_bugs.losses.RatioIsOne",),
    ),
    Exhibit(
        "clipped_weight_in_gradient",
        "the clipped weight is not detached: tokens outside the bounds get no gradient at all",
        _github("areal-project/AReaL#1421"),
        "start",
        r"warning: loss: .*no gradient",
        "trial of the loss",
        planted=("loss._component_=planted_bugs.losses.ClippedWeightInGradient",),
    ),
    Exhibit(
        "clipping_off",
        "a loss without its settings clips at bounds that never bind, and reports the usual ones",
        _github("GMISWE/tinker-cloud#p75"),
        "start",
        r"warning: loss: .*unbounded",
        "trial of the loss",
        planted=("loss._component_=planted_bugs.losses.ClippingOff",),
    ),
    Exhibit(
        "kl_over_padding",
        "the KL is a mean over padded positions: short responses dilute it",
        _github("allenai/open-instruct#p535"),
        "start",
        r"warning: loss: .*other responses",
        "trial of the loss",
        overrides=("loss.kl_coeff=0.05",),
        bug="kl_over_padding",
    ),
    Exhibit(
        "wrong_axis",
        "advantages are normalised over prompts, not over the responses to one",
        _github("XU-YIJIE/grpo-flat#2"),
        "start",
        r"warning: advantages: ",
        "trial of the advantages",
        bug="wrong_axis",
    ),
    _swap(
        "weights_not_loaded",
        "the engine goes on with the base weights after each push",
        "huggingface/trl#5312",
    ),
    Exhibit(
        "half_loaded",
        "a reload takes a part of the parameters, and only none at all is an error",
        _github("sgl-project/sglang#p9663"),
        "run",
        r"vLLM.s reload does not see the parameters",
        "every parameter must be loaded",
        bug="half_loaded",
    ),
    _swap(
        "one_push_behind",
        "a reload returns cached weights, those of the push before",
        "vllm-project/vllm#32718",
    ),
    _swap(
        "half_stale",
        "a part of the parameters keeps what an earlier reload left there",
        "vllm-project/vllm#48312",
    ),
    _swap(
        "wrong_layer",
        "after a weight sync, tensors are in places of others",
        "NovaSky-AI/SkyRL#1680",
    ),
    _swap(
        "tied_head_stale",
        "the embedding is updated, the tied head keeps a copy of the former one",
        "PrimeIntellect-ai/prime-rl#p2823",
    ),
    _swap(
        "prefix_cache_stale",
        "after a pull, new requests read keys and values of the former weights",
        "NVIDIA-NeMo/RL#p4018",
        r"read \d+ tokens of a probe from its prefix cache",
    ),
    _swap(
        "swap_mislabelled",
        "tokens get the number of weights that did not sample them",
        "areal-project/AReaL#p1569",
        "labels what it samples now with version",
    ),
    Exhibit(
        "retokenised",
        "responses are decoded and encoded again: other tokens than those sampled are trained",
        _github("huggingface/trl#5224"),
        "run",
        r"warning: step (\d+): mismatch/generator_kl",
        "jump of the mismatch over all tokens",
        bug="retokenised",
    ),
    _mismatch(
        "mask_shifted",
        "the mask of trained tokens is shifted by one against the logprobs",
        "modelscope/ms-swift#p8427",
        *TURNS,
    ),
    _mismatch(
        "temperature_ignored",
        "the trainer's logprobs are not divided by the sampling temperature",
        "huggingface/trl#4159",
        "generator.temperature=0.7",
    ),
    Exhibit(
        "failure_as_zero",
        "a reward that fails counts as reward 0",
        _github("NVIDIA-NeMo/RL#431"),
        "start",
        r"rewards: a reward that raises",
        "each reward process first scores a reward that raises",
        overrides=(
            "rewards.correctness._component_=planted_bugs.rewards.Flaky",
            "~rewards.correctness.answer_format",
            "max_failed_samples=1",
        ),
        bug="failure_as_zero",
    ),
    Exhibit(
        "normalised_per_rank",
        "each rank divides by its own number of tokens",
        _github("allenai/open-instruct#p1161"),
        "run",
        r"warning: step (\d+): loss/total",
        "balance of the loss",
        overrides=TWO_RANKS,
        bug="normalised_per_rank",
    ),
    Exhibit(
        "cursor_pinned",
        "the saved position stays where a group was dropped: later prompts are trained again",
        _github("huggingface/trl#7274"),
        "audit",
        r"prompts",
        "audit rule `prompts`",
        overrides=("max_staleness=1",),
        bug="cursor_pinned",
        resumes=True,
    ),
    Exhibit(
        "trained_twice",
        "a resume generates groups again that had been trained",
        _github("hiyouga/EasyR1#57"),
        "audit",
        r"prompts",
        "audit rule `prompts`",
        overrides=("max_staleness=1",),
        bug="trained_twice",
        resumes=True,
    ),
    Exhibit(
        "long_ones_dropped",
        "groups with long responses are dropped more often, so the policy learns to be short",
        _github("thinking-machines-lab/tinker-cookbook#p822"),
        "run",
        r"warning: dropped groups are longer",
        "lengths of dropped and trained groups",
        overrides=("num_steps=12",),
        bug="long_ones_dropped",
    ),
    Exhibit(
        "moving_evaluation",
        "weights change while an evaluation runs: it measures no policy",
        _github("radixark/miles#p1740"),
        "run",
        r"evaluation: several policy versions",
        "an evaluation has one version",
        bug="moving_evaluation",
    ),
    Exhibit(
        "nan_by_multiplication",
        "a token far off the policy is masked by a factor 0, and 0 times infinity is NaN",
        _github("PrimeIntellect-ai/prime-rl#p2084"),
        "run",
        r"step (\d+) is skipped: loss/total is nan",
        "a step whose loss is not finite is skipped",
        planted=("loss._component_=planted_bugs.losses.MaskedByMultiplication",),
        bug="nan_by_multiplication",
    ),
    Exhibit(
        "seeds_reused",
        "all engines sample with the same seeds",
        _github("modelscope/ms-swift#p7858"),
        "run",
        r"warning: groups \d+ and \d+ have samples of the same seed",
        "seeds of the groups",
        overrides=("num_generators=2",),
        bug="seeds_reused",
    ),
)
"""The exhibits, in the order of the page."""

_AGENTS = (
    "environment._component_=grpo_components.agents.environment.AgentEnvironment",
    "environment.agent=grpo_components.examples.arithmetic_agent.run",
    "environment.chat_template=plain",
    "rewards.correctness._component_=grpo_components.agents.rewards.AgentReward",
    "~rewards.correctness.answer_format",
    "generator.max_response_tokens=48",
)
_LOSSES = "loss._component_=grpo_components.objective.losses."
_TRUNCATED = "off_policy._component_=grpo_components.objective.off_policy.TokenTIS"
CLEAN: dict[str, tuple[str, ...]] = {
    "asynchronous": (),
    "synchronous": SYNCHRONOUS,
    "two generators": ("num_generators=2",),
    "two trainer ranks, reference": (*TWO_RANKS, "loss.kl_coeff=0.05"),
    "resumed": ("max_staleness=1",),
    "conversations": TURNS,
    "long prompt, synchronous": (*SYNCHRONOUS, *LONG_PROMPT),
    "temperature 0.7": ("generator.temperature=0.7",),
    "agents": _AGENTS,
    "adapters": ("lora={rank: 4, alpha: 8}",),
    "deltas, a step of slack": ("push=delta", "max_staleness=1"),
    "tokens masked as too old": ("stale_tokens=mask", "max_staleness=1"),
    "GSPO": (
        f"{_LOSSES}GSPOLoss",
        "aggregation._component_=grpo_components.objective.aggregation.SequenceMean",
    ),
    "CISPO": (f"{_LOSSES}CISPOLoss",),
    "decoupled PPO": (f"{_LOSSES}DecoupledPPOLoss",),
    "truncated importance, entropy": (_TRUNCATED, "loss.entropy_coeff=0.01"),
    "two epochs of two updates": ("ppo_epochs=2", "updates_per_batch=2"),
    "dynamic sampling": ("dynamic_sampling.enabled=true",),
    "a high learning rate": ("optimizer.lr=1e-3",),
}
"""Runs without a bug, in which no alarm may be given: name -> overrides of the tiny config."""
