"""The exhibits: published silent bugs, how each is planted, and the alarm that must name it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from planted_bugs import losses
from planted_bugs.bugs import BUGS

SHORT = ("num_steps=6", "eval_dataset.num_rows=16", "save_every_n_steps=100")
SYNCHRONOUS = ("max_staleness=0", "pull_every_m_rollouts=1")
TWO_RANKS = ("num_trainers=2",)
TURNS = (
    "environment._component_=grpo_components.rollout.multi_turn.MultiTurnEnvironment",
    "environment.max_turns=2",
    "environment.world._component_=grpo_components.rollout.tutor.Tutor",
    "generator.max_response_tokens=60",
)


class Alarm(NamedTuple):
    """The alarm that must name a bug."""

    words: str
    """The alarm's name on the page."""
    pattern: str
    """Regular expression of the alarm's line; its first group, if any, is the training step."""


@dataclass(frozen=True)
class Exhibit:
    """One bug, planted into one short run."""

    name: str
    """Name on the page; that of the bug in `bugs.py`, unless it is a component of the config."""
    alarm: Alarm
    overrides: tuple[str, ...] = ()
    """Overrides of the run's config."""
    resumes: bool = False
    """Whether the run is made in two parts: three steps, and a resume from their checkpoint."""
    component: Any = None
    """The class with the bug, if it is a component; else the bug is in `bugs.py`."""

    @property
    def was(self) -> str:
        return f"{(self.component or BUGS[self.name].fault).__doc__}"

    @property
    def thread(self) -> str:
        published = (self.component or BUGS[self.name]).published
        repository, _, number = published.partition("#")
        kind = "pull" if number.startswith("p") else "issues"
        return f"https://github.com/{repository}/{kind}/{number.lstrip('p')}"


def _loss_trial(said: str) -> Alarm:
    return Alarm(LOSS_TRIAL, rf"warning: loss: .*{said}")


def _loss(name: str, component: type, alarm: Alarm) -> Exhibit:
    """Return the exhibit of a loss that has the bug."""
    path = f"loss._component_={component.__module__}.{component.__name__}"
    return Exhibit(name, alarm, (path,), component=component)


LOSS_TRIAL, ADVANTAGE_TRIAL = "trial of the loss", "trial of the advantages"
FAILURE_TRIAL = "each reward process first scores a reward that raises"
AT_START = (LOSS_TRIAL, ADVANTAGE_TRIAL, FAILURE_TRIAL)
AUDIT = Alarm("audit rule `prompts`", "prompts")
PROBE = "probe of the weights after each pull"
OTHER_LOGPROBS = Alarm(PROBE, r"pulled version (\d+), but computes other logprobs")
MISMATCH = Alarm(
    "bound of the mismatch on fresh tokens (`max_generator_kl`)",
    r"step (\d+): trainer and generator disagree .*mismatch/fresh_kl is \S+",
)

EXHIBITS = (
    _loss("ratio_is_one", losses.RatioIsOne, _loss_trial("the ratio")),
    _loss("clipped_weight_in_gradient", losses.ClippedWeightInGradient, _loss_trial("no gradient")),
    _loss("clipping_off", losses.ClippingOff, _loss_trial("unbounded")),
    Exhibit("kl_over_padding", _loss_trial("other responses"), ("loss.kl_coeff=0.05",)),
    Exhibit("wrong_axis", Alarm(ADVANTAGE_TRIAL, "warning: advantages: ")),
    Exhibit("weights_not_loaded", OTHER_LOGPROBS),
    Exhibit(
        "half_loaded",
        Alarm("every parameter must be loaded", "vLLM.s reload does not see the parameters"),
    ),
    Exhibit("one_push_behind", OTHER_LOGPROBS),
    Exhibit("half_stale", OTHER_LOGPROBS),
    Exhibit("wrong_layer", OTHER_LOGPROBS),
    Exhibit("tied_head_stale", OTHER_LOGPROBS),
    Exhibit(
        "prefix_cache_stale",
        Alarm(PROBE, r"pulled version (\d+), but read \d+ tokens of a probe from its prefix cache"),
    ),
    Exhibit(
        "swap_mislabelled",
        Alarm(PROBE, r"pulled version (\d+), but labels what it samples now with version"),
    ),
    Exhibit(
        "retokenised",
        Alarm(
            "jump of the mismatch over all tokens", r"warning: step (\d+): mismatch/generator_kl"
        ),
        ("num_steps=12", "generator.temperature=1.15"),
    ),
    Exhibit("mask_shifted", MISMATCH, TURNS),
    Exhibit("temperature_ignored", MISMATCH, ("generator.temperature=0.7",)),
    Exhibit(
        "failure_as_zero",
        Alarm(FAILURE_TRIAL, "a reward that raises gives"),
        (
            "rewards.correctness._component_=planted_bugs.rewards.Flaky",
            "~rewards.correctness.answer_format",
            "max_failed_samples=1",
        ),
    ),
    Exhibit(
        "normalised_per_rank",
        Alarm("balance of the loss", r"warning: step (\d+): loss/total"),
        TWO_RANKS,
    ),
    Exhibit("cursor_pinned", AUDIT, ("max_staleness=1",), resumes=True),
    Exhibit("trained_twice", AUDIT, ("max_staleness=1",), resumes=True),
    Exhibit(
        "long_ones_dropped",
        Alarm("the diagnosis of the run", "looks ill: long responses are dropped: "),
        ("num_steps=12",),
    ),
    Exhibit(
        "moving_evaluation",
        Alarm("an evaluation has one version", "evaluation: several policy versions"),
    ),
    Exhibit(
        "nan_by_multiplication",
        Alarm(
            "a step whose loss is not finite is skipped",
            r"step (\d+) is skipped: loss/total is nan",
        ),
        ("loss._component_=planted_bugs.losses.MaskedByMultiplication",),
    ),
    Exhibit(
        "seeds_reused",
        Alarm("seeds of the groups", r"warning: groups \d+ and \d+ have samples of the same seed"),
        ("num_generators=2",),
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
_LONG_PROMPT = (
    'dataset.prompt_template="Question: one and one? Answer: 2 Question: two and two? Answer: 4 '
    'Question: {question}\\nAnswer:\\n"',
    "dataset.max_prompt_tokens=160",
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
    "long prompt, synchronous": (*SYNCHRONOUS, *_LONG_PROMPT),
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
