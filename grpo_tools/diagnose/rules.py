"""Rules that find what is wrong with a run, each for one fault; add yours to `RULES`."""

from __future__ import annotations

import math
import shutil
import statistics
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from grpo_components.plain_text import one_line, shortened
from grpo_components.records.checkpoint_folder import saved_steps
from grpo_components.rollout.engine_use import NO_GROUP, NO_REWARD
from grpo_tools.diagnose.evidence import FEWEST_OF_TREND, Run, read
from grpo_tools.report.curves import values_of
from grpo_tools.report.run_files import DAMAGED

_REWARD, _SUCCESS, _KL = "rollout/reward_mean", "rollout/success_rate", "mismatch/generator_kl"
_HELD_OUT = "eval/reward_mean"
_ENDED, _SMALL_TEST = "the run ended with an error", "the evaluation is too small"
_AWAY, _LONG = "the policy runs away", "length grows with the reward"
_CUT, _FLAT = "responses are cut off", "the reward is flat"
_LARGER = "a larger generator.max_response_tokens"
_ERROR_CHARS = 160
_WARNED = {
    "seeds": (93, "samples share seeds", "generators begin alike", "a seed for each sample"),
    "loss": (
        *(93, "tokens weigh differently", "each rank divides by its own number of tokens"),
        "a division by the tokens of the whole batch",
    ),
    "mismatch": (
        *(57, "the mismatch jumps", "trained tokens were not sampled, or the policy has jumped"),
        "token ids in place of text, a lower optimizer.lr",
    ),
}
"""Kind of a warning in logs/warnings.jsonl -> severity, what is wrong, cause, advice."""


class Finding(NamedTuple):
    """One line of a diagnosis."""

    severity: float
    """From 0 to 100; the worst are shown first."""
    what: str
    figure: str
    cause: str
    advice: str

    def __str__(self) -> str:
        line = f"{self.what}: {self.figure}. Likely cause: {self.cause}. Try: {self.advice}"
        return one_line(line)


def _try(run: Run, *advice: str) -> str:
    """Join pieces of advice; leave out each `key=value`, or key, that the config already has."""
    return ", ".join(each for each in advice if not run.has(each))


def _rate(run: Run) -> str:
    """Return the key of the learning rate, with its value if the config has one."""
    rate = run.setting("optimizer.lr")
    return "optimizer.lr" if rate is None else f"optimizer.lr (now {rate})"


def _warned(run: Run) -> Finding | None:
    for kind, (severity, what, cause, advice) in _WARNED.items():
        if warning := run.warnings.get(kind):
            figure = warning.removeprefix("warning: ").rpartition(": ")[0]
            return Finding(severity, what, figure, cause, advice)
    return None


def _samples_fail(run: Run) -> Finding | None:
    failed, ended = run.failed_samples, sum(size for _, size in run.history.lengths.values())
    share = failed.total() / max(1, failed.total(), ended)
    if failed.total() < 3 or share < 0.01:
        return None
    kinds = Counter[str]()
    for error, number in failed.items():
        kinds[error.partition("): ")[0]] += number  # up to file and line: messages have values
    kind, count = kinds.most_common(1)[0]
    error = next(error for error, _ in failed.most_common() if error.startswith(kind))
    evaluated = run.failed_in_evaluations
    trained = failed.total() - evaluated
    figure = f"{trained:,} of {max(trained, ended):,} in training, "
    figure += f"{evaluated:,} in evaluations, " if evaluated else ""
    figure += f"{count:,} like {shortened(error, _ERROR_CHARS)}"
    advice, cause = "mend what logs/failed_samples.jsonl names", "a reward or environment"
    longer, noise = _longer(run, run.failed_groups, run.history.lengths.keys() - run.failed_groups)
    figure += f"; in groups of {longer:+.3g} tokens a response" if longer > 4 * noise else ""
    return Finding(70 + 30 * share, "samples fail", figure, cause, advice)


def _ends_with_an_error(run: Run) -> Finding | None:
    figure = shortened(run.error.partition("\n")[0], _ERROR_CHARS)
    advice = "logs/failures.jsonl has all of it, logs/ROLE.log what a role wrote"
    finding = Finding(75, _ENDED, figure, "what it says", advice)
    return finding if run.error else None


def _steps_skipped(run: Run) -> Finding | None:
    each, steps = run.values("skipped_steps"), len(run.steps)
    skipped = max(each, default=0)
    figure = f"{skipped:.0f} of {steps} steps"
    cause = "loss or gradient is not finite: the learning rate is too high, or a loss divides by 0"
    advice = _try(run, f"a lower {_rate(run)}", "dtype=fp32")
    first = run.steps[0] if each else {}
    if each and each[0] == first["step"] and first.get("rollout/trained_tokens"):
        cause = "the loss, or the advantages, are NaN before any update was made"
        advice = "look for a division by 0 in the loss (is an advantage 0?), or for null among the "
        advice += "advantages in logs/rollouts.jsonl"
        log_all = f"rollouts_logged_per_step={run.setting('groups_per_step', 8)}"
        advice += "" if run.has(log_all) else f" ({log_all} logs all groups)"
    severity = 60 + 40 * skipped / max(1, steps)
    return Finding(severity, "gradients are skipped", figure, cause, advice) if skipped else None


def _roles_disagree(run: Run) -> Finding | None:
    kl, each = run.trend("mismatch/fresh_kl"), run.values("mismatch/fresh_kl")
    usual = statistics.median(each) if each else math.nan  # an asynchronous run has few
    bound = run.setting("max_generator_kl", 1e-4 if run.setting("dtype") == "fp32" else 0.05)
    drifts = kl.sigmas > 3 and kl.after > 5 * kl.before and kl.after > bound / 100
    what = f"generator and trainer {'drift apart' if drifts else 'disagree'}"
    figure = f"mismatch/fresh_kl is {usual:.2g} nats a token" + (f", from {kl}" if drifts else "")
    cause = "weights, or settings of sampling or model, that only one side has"
    ways = "generator.top_p=1", "generator.top_k=0", "`model` as in config.json", "dtype=fp32"
    ill = drifts or usual > bound / 4 or "trainer and generator disagree" in run.error
    return Finding(92, what, figure, cause, _try(run, *ways)) if ill else None


def _runs_away(run: Run) -> Finding | None:
    high, reward = [kl for kl in run.values(_KL) if kl > 0.1], run.trend(_REWARD)
    reference, (before, after, noise) = run.trend("loss/kl_reference"), _evaluated(run, _HELD_OUT)
    fell = reward.sigmas < -4 and reward.after < 0.9 * reward.before
    fell |= before - after > max(noise, 0.1 * before)
    far = run.late("loss/kl_reference") > 1 and reference.after > 2 * reference.before
    figure = f"KL to the generator above 0.1 nats a token in {len(high)} steps, "
    figure = f"{figure}{max(high):.2g} at most; " if high else ""
    figure += f"KL to the reference {reference}; " * far
    figure += f"reward {reward}, " * (not math.isnan(reward.before))
    figure += f"held-out {before:.2g} to {after:.2g}"
    smaller = f"a tenth of {_rate(run)}"
    later = run.values(_KL)[10:]  # an optimizer's first steps are large without a warm-up
    stays = len(high) >= 3 and (len(later) < 10 or max(later) > 0.1)
    jumps = stays or abs(run.late("ratio/mean") - 1) > 0.2 or far
    cause, ways = "the learning rate is too high for this staleness", [smaller]
    if not jumps:
        cause = "updates lead away from the reward: the sign of the loss or of the advantages, or "
        cause, ways = f"{cause}the learning rate", ["the recipe's own loss", smaller]
    advice = _try(run, *ways, "loss.kl_coeff=0.01")
    severity = 60 if reward.sigmas > 3 else 91 if jumps else 79
    finding = Finding(severity, _AWAY, figure, cause, advice)
    return finding if jumps or fell else None


def _stands_still(run: Run) -> Finding | None:
    kl, staleness, reward = run.late(_KL), run.late("staleness/mean"), run.trend(_REWARD)
    figure = f"the KL to weights {staleness:.1f} steps older is {kl:.1g}, reward {reward}"
    advice = f"a higher {_rate(run)}"
    if not (staleness >= 0.5 and run.late("rollout/zero_variance_fraction") < 0.6):
        return None
    if kl < 1e-9 and not reward.sigmas > 3:
        what, advice = "the policy does not move", f"{advice}; is grad_norm above 0?"
        return Finding(67, what, figure, "learning rate of 0", advice)
    slow = Finding(43, "the policy hardly moves", figure, "small updates", f"{advice}, more steps")
    return slow if kl < 4e-6 and abs(reward.sigmas) < 3 else None


def _entropy_collapses(run: Run) -> Finding | None:
    entropy, late = run.trend("entropy"), run.trend(_REWARD, since=1 / 3)
    figure = f"{entropy} nats a token, reward {late} since"
    cause = "what the policy already does gets all the weight: learning rate, no entropy bonus"
    advice = "a larger loss.clip_high or loss.entropy_coeff, a lower optimizer.lr"
    ill = entropy.after < entropy.before / 4 and entropy.sigmas < -3
    well = run.late(_SUCCESS) > 0.8 or (late.sigmas > 2 and late.after > 1.05 * late.before)
    return Finding(88, "entropy collapses", figure, cause, advice) if ill and not well else None


def _cut_off(run: Run) -> Finding | None:
    share = run.late("rollout/cut_off_fraction", statistics.fmean)
    wrong = 1 - run.late(_SUCCESS, statistics.fmean)
    limit = run.setting("generator.max_response_tokens")
    figure = f"{share:.0%} of them" + (f", at {limit} tokens" if limit else "")
    figure += f"; {wrong:.0%} are wrong" if wrong > 0 else ""
    cause = "the limit is too small, or nothing pays for an end"
    advice = _try(run, _LARGER, "reward_shaping.overlong_tokens")
    finding = Finding(50 + 40 * share, _CUT, figure, cause, advice)
    return finding if share >= 0.25 or 0.08 <= share >= wrong / 4 else None


def _groups_equal(run: Run) -> Finding | None:
    share, right, stays = (
        run.late(key, statistics.fmean)
        for key in ("rollout/zero_variance_fraction", _SUCCESS, _REWARD)
    )
    trend = run.trend(_REWARD)
    moves = abs(trend.sigmas) > 3 and abs(trend.after - trend.before) > 0.05 * abs(trend.before)
    if not share >= 0.6 or moves or run.setting("teacher"):  # which trains equal groups too
        return None
    constant = share == 1 and right in (0, 1)
    right = min(share, max(0.0, right - (1 - share) / 2))  # half of the mixed groups are right
    easy = right > share / 2
    figure = f"it stays at {stays:.2f}; {share:.0%} of the groups have equal rewards, about "
    figure += f"{right:.0%} are all right and {share - right:.0%} all wrong"
    prompts = f"the prompts are too {'easy' if easy else 'hard'}"
    cause = f"{prompts}, or the reward tells nothing apart"
    choices = ("curriculum", "dynamic_sampling.enabled=true") if share < 0.95 else ()
    advice = _try(run, f"{'harder' if easy else 'easier'} prompts", *choices)
    if run.late("rollout/cut_off_fraction") > 0.5:
        cause, advice = "most responses are cut off before they end", _LARGER
    elif constant:
        cause = f"the reward tells no right from wrong (success is {right:.0f}), or {prompts}"
        advice = f"read responses in report.html; if the reward is right: {advice}"
    return Finding(55 + 30 * share, _FLAT, figure, cause, advice)


def _format_only(run: Run) -> Finding | None:
    rewards, success = run.setting("rewards", {}), run.trend(_SUCCESS)
    names = [name for name, each in rewards.items() if not (each or {}).get("is_success")]
    for name in names if len(names) < len(rewards) else ():
        term = run.trend(f"reward_terms/{name}_mean")
        learned = term.sigmas > 3 and term.after > term.before + 0.15
        if learned and success.sigmas < 2 and success.after < 0.5:
            figure = f"{name} {term}, success {success}"
            advice = f"a smaller rewards.{name}.weight, or pay it only with a right answer"
            what, cause = "the format is learned and the answer is not", "it is the easier reward"
            return Finding(74, what, figure, cause, advice)
    return None


def _length_grows(run: Run) -> Finding | None:
    length, reward = run.trend("rollout/response_tokens_mean"), run.trend(_REWARD)
    figure = f"{length} tokens, reward {reward}, success {run.trend(_SUCCESS)}"
    cause = "a reward, or a loss averaged by response, pays for length"
    mean = "aggregation._component_=grpo_components.objective.aggregation.TokenMean"
    advice = _try(run, mean, "reward_shaping.overlong_tokens", "a comparison at equal length")
    ill = length.sigmas > 4 and length.after > 1.4 * length.before and reward.sigmas > 2
    return Finding(84, _LONG, figure, cause, advice) if ill else None


def _held_out_stays(run: Run) -> Finding | None:
    reward, before, after, noise = run.trend(_REWARD), *_evaluated(run, _HELD_OUT)
    rise, gain = reward.after - reward.before, after - before
    figure = f"training {reward}, held-out {before:.2f} to {after:.2f}"
    cause = "training prompts are learned by heart, or held-out ones are of another kind"
    advice = "more prompts or fewer epochs; compare dataset with eval_dataset"
    chosen = run.setting("curriculum") or run.setting("dynamic_sampling.enabled")
    ill = reward.sigmas > 3 and rise > 0.05 and gain + noise < rise > 3 * gain and not chosen
    finding = Finding(73, "the reward rises, held-out does not", figure, cause, advice)
    return finding if ill else None


def _clipped(run: Run) -> Finding | None:
    share, high = run.late("ratio/clip_fraction"), run.setting("loss.clip_high", 0.2)
    figure = f"{share:.0%} of the tokens are outside the range; below 1 % is usual"
    updates = run.setting("ppo_epochs", 1) * run.setting("updates_per_batch", 1)
    low, stale = run.setting("loss.clip_low", 0.2), run.setting("max_staleness", 0)
    cause = f"too many updates by one batch ({updates}), " if updates > 1 else ""
    cause += f"too large updates, old tokens (max_staleness={stale}), or a narrow range "
    cause += f"(loss.clip_low={low}, loss.clip_high={high})"
    advice = "fewer ppo_epochs or updates_per_batch, " if updates > 1 else ""
    advice += f"a lower {_rate(run)}"
    advice += ", a smaller max_staleness" if stale else ""
    ill = share >= 0.05 and not (isinstance(high, float) and high < 0.05)  # as GSPO's
    return Finding(66, "clipping is far above usual", figure, cause, advice) if ill else None


def _groups_dropped(run: Run) -> Finding | None:
    lengths = run.history.lengths
    dropped = {drop["group_id"]: drop["reason"] for drop in run.history.drops}
    lost = [group for group in lengths if dropped.get(group) == "stale"]
    kept = lengths.keys() - dropped.keys()
    longer, noise = _longer(run, lost, kept)
    if math.isnan(longer) or len(lost) < 0.02 * len(kept):
        return None
    figure = f"{len(lost)} stale ({len(lost) / len(lengths):.0%}), {longer:+.3g} tokens a response"
    biased = longer > 4 * noise
    what = f"{'long responses' if biased else 'many groups'} are dropped"
    ways = "stale_groups=wait", "stale_tokens=mask", "a larger max_staleness"
    finding = Finding(71, what, figure, "training overtakes slow groups", _try(run, *ways))
    return finding if biased or len(lost) > 0.1 * len(kept) else None


def _longer(run: Run, some: Collection[int], others: Collection[int]) -> tuple[float, float]:
    """Return mean response tokens of groups `some` minus those of `others`, and standard error."""
    both = [
        [run.history.lengths[group][0] for group in each if group in run.history.lengths]
        for each in (some, others)
    ]
    if min(map(len, both)) < 8:
        return math.nan, math.nan
    longer = statistics.fmean(both[0]) - statistics.fmean(both[1])
    return longer, math.sqrt(sum(statistics.variance(each) / len(each) for each in both))


def _someone_waits(run: Run) -> Finding | None:
    waits, slow = run.share_of_step("time/wait_for_batch"), run.share_of_time("gen", NO_REWARD)
    idle = run.share_of_time("gen", NO_GROUP)
    figure = f"the trainer waits {waits:.0%} of a step, generators {slow:.0%} of their time for "
    figure += f"rewards or environments, {idle:.0%} for a group"
    in_turns = run.setting("max_staleness") == 0 or run.setting("colocate")
    if slow >= 0.4:
        workers = f"a quicker reward, reward_workers={2 * run.setting('reward_workers', 1)}"
        return Finding(58, "rewards are slow", figure, "a reward or environment", workers)
    numbers = run.setting("num_generators", 1), run.setting("num_trainers", 1)
    change = (1 - slow - idle) / (run.share_of_time("trainer_", "train_step") or 1)  # of the split
    fits = change * numbers[0] / numbers[1]
    advice = f"{fits:.1f} generators for each trainer, now {numbers[0]}:{numbers[1]}"
    keys = "generator.tensor_parallel_size", "tensor_parallel_dim"  # above 1, --gpus is refused
    if run.setting("device") != "cpu" and max(run.setting(key, 1) for key in keys) == 1:
        advice += f"; grpo simulate {run.folder} --gpus {max(4, sum(numbers))}"
    if waits >= 0.7 and slow + idle < 0.4 and change > 1.5 and not in_turns:
        return Finding(45, "the trainer waits", figure, "too few generators", advice)
    ill = idle >= 0.6 and waits < 0.2 and change < 1 / 1.5 and not in_turns
    return Finding(44, "generators idle", figure, "too few trainers", advice) if ill else None


def _pushes_dear(run: Run) -> Finding | None:
    push, load = run.share_of_step("time/push"), run.share_of_time("gen", "loading weights")
    figure = f"pushes take {push:.0%} of a step, loads {load:.0%} of a generator's time"
    rarer = "a larger push_every_n_steps and pull_every_m_rollouts"
    advice = _try(run, rarer, "push=delta", "longer steps")
    ill = push + load >= 0.25
    cause = "steps are short beside the move of the weights"
    return Finding(46, "weights move too often", figure, cause, advice) if ill else None


def _memory_grows(run: Run) -> Finding | None:
    by_role: dict[str, list[float]] = {}
    for beat in run.heartbeats:
        by_role.setdefault(str(beat["role"]), []).extend(values_of([beat], "rss_mib"))
    for role, used in by_role.items():
        third = max(3, len(used) // 3)
        a, b, c = (
            statistics.median(used[i:][:third] or [0]) / 1024 for i in range(0, 3 * third, third)
        )
        if min(b - a, c - b) > max(0.2, 0.1 * a):
            more = 1.5 * (c - a) / max(1, len(run.steps)) * run.steps_left
            figure = f"{role} has grown from {a:.1f} to {c:.1f} GiB"
            figure += f"; {more:.1f} GiB more until the last step" if more else ""
            advice = f"logs/{role}.log; a resumed run begins with little"
            cause = "something keeps what it should forget, such as a list in a reward"
            return Finding(62, "memory will not last", figure, cause, advice)
    return None


def _disk_too_small(run: Run) -> Finding | None:
    folders = saved_steps(run.folder / "checkpoints")
    sizes = [sum(map(_bytes_of, each.rglob("*"))) for each in folders]
    saves = math.ceil(run.steps_left / run.setting("save_every_n_steps", math.inf))
    keep = run.setting("keep_last_n", saves + len(sizes))
    needed = min(saves, max(0, keep + 1 - len(sizes))) * max(sizes, default=0) / 2**30
    free = shutil.disk_usage(run.folder).free / 2**30
    figure = f"{free:.1f} GiB are free, checkpoints to come need {needed:.1f}"
    advice = "a smaller keep_last_n, a larger save_every_n_steps, another output_dir"
    ill = needed > free or "No space left" in run.error
    return Finding(90, "the disk will not last", figure, "checkpoints", advice) if ill else None


def _bytes_of(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:  # a running run deletes its older checkpoints
        return 0


def _not_ours(run: Run) -> Finding | None:
    figure = f"none of {len(run.steps)} steps has {_REWARD}"
    finding = Finding(2, "nothing can be told", figure, "another program", "a run's output_dir")
    return finding if run.steps and not run.values(_REWARD) else None


def _evaluation_small(run: Run) -> Finding | None:
    before, after, noise = _evaluated(run, "eval/success_rate")
    prompts = run.evaluations[-1].get("eval/prompts", "few") if run.evaluations else 0
    figure = f"success {before:.2f} to {after:.2f} on {prompts} prompts is known to {noise:.2f}"
    needed = 2 * 1.96**2 / 4 / max(abs(after - before), 0.05) ** 2
    advice = f"{math.ceil(needed / 50) * 50} prompts" if needed > 0 else "more prompts"
    ill = noise > max(0.15, abs(after - before))
    advice += " in eval_dataset, or a larger eval.samples_per_prompt"
    finding = Finding(40, _SMALL_TEST, figure, "few held-out prompts", advice)
    return finding if ill else None


def _evaluated(run: Run, key: str) -> tuple[float, float, float]:
    """Return a metric in the first and last evaluation, and the 95 % margin of the difference."""
    found = run.evaluations if len(run.evaluations) > 1 else [{}]
    ends = found[0], found[-1]
    values = ([*values_of([e], key + end), math.nan] for end in ("", "_low", "_high") for e in ends)
    before, after, low, low_after, high, high_after = (found[0] for found in values)
    return before, after, math.hypot(high - low, high_after - low_after) / 2


RULES = (
    *(_warned, _samples_fail, _ends_with_an_error, _steps_skipped, _roles_disagree, _runs_away),
    *(_stands_still, _entropy_collapses, _cut_off, _groups_equal, _format_only, _length_grows),
    *(_held_out_stays, _clipped, _groups_dropped, _someone_waits, _pushes_dear, _memory_grows),
    *(_disk_too_small, _evaluation_small, _not_ours),
)
"""Each rule returns a finding, or None if the run does not have its fault."""


def diagnose(run: Run) -> Sequence[Finding]:
    """Return what looks wrong in a run: at most ten findings, the worst first."""
    found = []
    for rule in RULES:
        try:
            found.append(rule(run))
        except (*DAMAGED, OSError) as error:
            figure, cause = f"{rule.__name__[1:]}: {type(error).__name__}: {error}", "other writers"
            found.append(Finding(1, "a file is damaged", figure, cause, f"grpo audit {run.folder}"))
    found = [*filter(None, found)]
    if any(each.what == _AWAY and each.severity > 60 for each in found):
        advice = "the remedy above; then read responses that got nothing"
        effect = {"severity": 39, "cause": _AWAY, "advice": advice}
        found = [e._replace(**effect) if e.what in (_CUT, _FLAT, _LONG) else e for e in found]
    return sorted(found, key=lambda each: -each.severity)[:10]


def lines_of(run: Run) -> list[str]:
    """Return a line for each finding, or one that says that there is none."""
    steps = len(run.steps)
    short = f"; most rules need {FEWEST_OF_TREND} steps" if steps < FEWEST_OF_TREND else ""
    return [*map(str, diagnose(run))] or [f"nothing looks wrong in {steps} steps{short}"]


def worst_of(folder: Path) -> str:
    """Return the worst finding and how to see the others, in one line; empty for a clean run."""
    not_ill = _ENDED, _SMALL_TEST  # an error is shown anyway
    found = [each for each in diagnose(read(folder)) if each.what not in not_ill]
    more = f" ({len(found) - 1} more: grpo diagnose {folder})" if len(found) > 1 else ""
    return f"looks ill: {found[0]}{more}" if found else ""
