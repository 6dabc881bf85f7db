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


@dataclass(frozen=True)
class Exhibit:
    """One bug, planted into one short run."""

    name: str
    """Name on the page; that of the bug in `bugs.py`, unless it is a component of the config."""
    was: str
    """What the published bug did."""
    published: str
    """A public thread about it: repository#issue, or repository#p and the pull request."""
    alarm: str
    """The alarm, in words, for the page."""
    pattern: str
    """Regular expression of the alarm's line; its first group, if any, is the training step."""
    overrides: tuple[str, ...] = ()
    """Of the config."""
    resumes: bool = False
    """Whether the run is made in two parts: three steps, and a resume from their checkpoint."""

    @property
    def thread(self) -> str:
        """Address of the public thread."""
        repository, _, number = self.published.partition("#")
        kind = "pull" if number.startswith("p") else "issues"
        return f"https://github.com/{repository}/{kind}/{number.lstrip('p')}"


LOSS_TRIAL, ADVANTAGE_TRIAL = "trial of the loss", "trial of the advantages"
FAILURE_TRIAL = "each reward process first scores a reward that raises"
AT_START = (LOSS_TRIAL, ADVANTAGE_TRIAL, FAILURE_TRIAL)
AUDIT = "audit rule `prompts`"
PROBE = "probe of the weights after each pull"
OTHER_LOGPROBS = r"pulled version (\d+), but computes other logprobs"
MISMATCH = "bound of the mismatch on fresh tokens (`max_generator_kl`)"
DISAGREE = r"step (\d+): trainer and generator disagree .*mismatch/fresh_kl is \S+"

EXHIBITS = (
    Exhibit(
        "ratio_is_one",
        "the ratio is the policy over itself: stale tokens are not corrected, nothing is clipped",
        "meta-pytorch/torchforge#p571",
        LOSS_TRIAL,
        r"warning: loss: .*the ratio",
        ("loss._component_=planted_bugs.losses.RatioIsOne",),
    ),
    Exhibit(
        "clipped_weight_in_gradient",
        "the clipped weight is not detached: tokens outside the bounds get no gradient at all",
        "areal-project/AReaL#1421",
        LOSS_TRIAL,
        r"warning: loss: .*no gradient",
        ("loss._component_=planted_bugs.losses.ClippedWeightInGradient",),
    ),
    Exhibit(
        "clipping_off",
        "a loss without its settings clips at bounds that never bind, and reports the usual ones",
        "GMISWE/tinker-cloud#p75",
        LOSS_TRIAL,
        r"warning: loss: .*unbounded",
        ("loss._component_=planted_bugs.losses.ClippingOff",),
    ),
    Exhibit(
        "kl_over_padding",
        "the KL is a mean over padded positions: short responses dilute it",
        "allenai/open-instruct#p535",
        LOSS_TRIAL,
        r"warning: loss: .*other responses",
        ("loss.kl_coeff=0.05",),
    ),
    Exhibit(
        "wrong_axis",
        "advantages are normalised over prompts, not over the responses to one",
        "XU-YIJIE/grpo-flat#2",
        ADVANTAGE_TRIAL,
        r"warning: advantages: ",
    ),
    Exhibit(
        "weights_not_loaded",
        "the engine goes on with the base weights after each push",
        "huggingface/trl#5312",
        PROBE,
        OTHER_LOGPROBS,
    ),
    Exhibit(
        "half_loaded",
        "a reload takes a part of the parameters, and only none at all is an error",
        "sgl-project/sglang#p9663",
        "every parameter must be loaded",
        r"vLLM.s reload does not see the parameters",
    ),
    Exhibit(
        "one_push_behind",
        "a reload returns cached weights, those of the push before",
        "vllm-project/vllm#32718",
        PROBE,
        OTHER_LOGPROBS,
    ),
    Exhibit(
        "half_stale",
        "a part of the parameters keeps what an earlier reload left there",
        "vllm-project/vllm#48312",
        PROBE,
        OTHER_LOGPROBS,
    ),
    Exhibit(
        "wrong_layer",
        "after a weight sync, tensors are in places of others",
        "NovaSky-AI/SkyRL#1680",
        PROBE,
        OTHER_LOGPROBS,
    ),
    Exhibit(
        "tied_head_stale",
        "the embedding is updated, the tied head keeps a copy of the former one",
        "PrimeIntellect-ai/prime-rl#p2823",
        PROBE,
        OTHER_LOGPROBS,
    ),
    Exhibit(
        "prefix_cache_stale",
        "after a pull, new requests read keys and values of the former weights",
        "NVIDIA-NeMo/RL#p4018",
        PROBE,
        r"pulled version (\d+), but read \d+ tokens of a probe from its prefix cache",
    ),
    Exhibit(
        "swap_mislabelled",
        "tokens get the number of weights that did not sample them",
        "areal-project/AReaL#p1569",
        PROBE,
        r"pulled version (\d+), but labels what it samples now with version",
    ),
    Exhibit(
        "retokenised",
        "responses are decoded and encoded again: other tokens than those sampled are trained",
        "huggingface/trl#5224",
        "jump of the mismatch over all tokens",
        r"warning: step (\d+): mismatch/generator_kl",
    ),
    Exhibit(
        "mask_shifted",
        "the mask of trained tokens is shifted by one against the logprobs",
        "modelscope/ms-swift#p8427",
        MISMATCH,
        DISAGREE,
        TURNS,
    ),
    Exhibit(
        "temperature_ignored",
        "the trainer's logprobs are not divided by the sampling temperature",
        "huggingface/trl#4159",
        MISMATCH,
        DISAGREE,
        ("generator.temperature=0.7",),
    ),
    Exhibit(
        "failure_as_zero",
        "a reward that fails counts as reward 0",
        "NVIDIA-NeMo/RL#431",
        FAILURE_TRIAL,
        r"rewards: a reward that raises",
        (
            "rewards.correctness._component_=planted_bugs.rewards.Flaky",
            "~rewards.correctness.answer_format",
            "max_failed_samples=1",
        ),
    ),
    Exhibit(
        "normalised_per_rank",
        "each rank divides by its own number of tokens",
        "allenai/open-instruct#p1161",
        "balance of the loss",
        r"warning: step (\d+): loss/total",
        TWO_RANKS,
    ),
    Exhibit(
        "cursor_pinned",
        "the saved position stays where a group was dropped: later prompts are trained again",
        "huggingface/trl#7274",
        AUDIT,
        r"prompts",
        ("max_staleness=1",),
        resumes=True,
    ),
    Exhibit(
        "trained_twice",
        "a resume generates groups again that had been trained",
        "hiyouga/EasyR1#57",
        AUDIT,
        r"prompts",
        ("max_staleness=1",),
        resumes=True,
    ),
    Exhibit(
        "long_ones_dropped",
        "groups with long responses are dropped more often, so the policy learns to be short",
        "thinking-machines-lab/tinker-cookbook#p822",
        "lengths of dropped and trained groups",
        r"warning: dropped groups are longer",
        ("num_steps=12",),
    ),
    Exhibit(
        "moving_evaluation",
        "weights change while an evaluation runs: it measures no policy",
        "radixark/miles#p1740",
        "an evaluation has one version",
        r"evaluation: several policy versions",
    ),
    Exhibit(
        "nan_by_multiplication",
        "a token far off the policy is masked by a factor 0, and 0 times infinity is NaN",
        "PrimeIntellect-ai/prime-rl#p2084",
        "a step whose loss is not finite is skipped",
        r"step (\d+) is skipped: loss/total is nan",
        ("loss._component_=planted_bugs.losses.MaskedByMultiplication",),
    ),
    Exhibit(
        "seeds_reused",
        "all engines sample with the same seeds",
        "modelscope/ms-swift#p7858",
        "seeds of the groups",
        r"warning: groups \d+ and \d+ have samples of the same seed",
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
