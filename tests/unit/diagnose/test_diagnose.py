"""A diagnosis names what is wrong in a run's files, the worst first, and nothing in a clean one."""

import math
import random
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
from lib.rows import write_rows

from grpo_components.exchange.event_order import EventOrder
from grpo_components.records.guards import FailedSamples, RunWatch
from grpo_components.records.metrics import as_json
from grpo_components.settings import Settings
from grpo_tools.diagnose.__main__ import main
from grpo_tools.diagnose.evidence import read
from grpo_tools.diagnose.rules import RULES, diagnose
from grpo_tools.report.__main__ import main as report
from grpo_tools.report.page import write_report

STEPS = 40
START = {"event": "start", "attempt": 0, "steps_done": 0, "num_steps": STEPS, "cpus": 2}
START |= {"time": 0.0, "libraries": {}, "carried": {}}
END = {"event": "end", "attempt": 0, "step": STEPS, "finished": True, "living": [], "time": 9.0}
CONFIG = """
optimizer: {lr: 1e-4}
dtype: fp32
max_staleness: 2
save_every_n_steps: 1
rewards: {right: {is_success: true}, form: {weight: 0.1}}
"""


def learning(at):
    """A reward that rises from 0.3 to 0.7."""
    return 0.3 + 0.4 * at


HEALTHY = {
    "rollout/reward_mean": learning,
    "rollout/success_rate": learning,
    "rollout/reward_std": 0.4,
    "rollout/zero_variance_fraction": 0.2,
    "rollout/response_tokens_mean": 20.0,
    "rollout/cut_off_fraction": 0.02,
    "entropy": lambda at: 0.5 - 0.3 * at,
    "mismatch/generator_kl": 3e-4,
    "mismatch/fresh_kl": 1e-9,
    "ratio/mean": 1.0,
    "ratio/clip_fraction": 0.01,
    "staleness/mean": 1.5,
    "skipped_steps": 0,
    "time/step": 1.0,
    "time/wait_for_batch": 0.3,
    "time/push": 0.02,
}
FLAT = {"rollout/reward_mean": 0.4, "rollout/success_rate": 0.4}
WAITS = {"idle: no group": 10.0, "idle: rewards, environments": 5.0, "sampling": 80.0}


@pytest.fixture
def write(tmp_path):
    """Write the files of a run as the recipe's own writers do; what is not given is healthy."""

    def write(
        planted=(),
        evaluated=((0.3, 200), (0.7, 200)),
        seconds=WAITS,
        events=(),
        num=STEPS,
        trains=None,
    ):
        draw = random.Random(3)
        rows = []
        ends = dict(zip((0, num), evaluated, strict=True))
        for step in range(num + 1):
            metrics = {"attempt": 0}
            if step:
                for key, value in (HEALTHY | dict(planted)).items():
                    exact = value(step / num) if callable(value) else value
                    noise = 0.05 * draw.uniform(-1, 1) if isinstance(exact, float) else 0
                    metrics[key] = exact * (1 + noise)
            if step in ends:
                rate, prompts = ends[step]
                half = 1.96 * math.sqrt(0.25 / prompts)
                for key in ("eval/success_rate", "eval/reward_mean"):
                    metrics |= {key: rate, f"{key}_low": rate - half, f"{key}_high": rate + half}
                metrics["eval/prompts"] = prompts
            rows.append({"step": step, **metrics})
        write_rows(tmp_path / "logs/metrics.jsonl", *map(as_json, rows))
        (tmp_path / "config.yaml").write_text(CONFIG)
        write_rows(tmp_path / "receipts.jsonl", START, *events, END)
        trains = trains or 90 - 100 * (HEALTHY | dict(planted))["time/wait_for_batch"]
        trainer = {"train_step": trains, "idle": 100 - trains}
        roles = {"generator_0": seconds, "trainer_0": trainer}
        beats = ({"role": role, "time": 1.0, "seconds": each} for role, each in roles.items())
        write_rows(tmp_path / "logs/heartbeats.jsonl", *beats)
        return tmp_path

    return write


def found(folder):
    return [str(finding) for finding in diagnose(read(folder))]


def rising(first, last):
    return lambda at: first + (last - first) * at


def generated(group, tokens, stale=False):
    finish = {"event": "finish", "attempt": 0, "group": group, "response_tokens": [tokens] * 2}
    drop = {"event": "drop", "attempt": 0, "groups": [group], "reason": "stale", "reissue": True}
    return [finish, *([drop] if stale else [])]


ILL = {
    "gradients are skipped: 9 of 40 steps": {"skipped_steps": lambda at: int(at * 9.5)},
    "generator and trainer disagree": {"mismatch/fresh_kl": 9e-5},
    "generator and trainer drift apart": {"mismatch/fresh_kl": lambda at: 1e-9 * 10 ** (4 * at)},
    "the policy runs away: KL to the gen": {"mismatch/generator_kl": rising(0.001, 0.9)},
    "the policy runs away: reward 0.": {"rollout/reward_mean": rising(0.7, 0.1)},
    "the policy does not move": {**FLAT, "mismatch/generator_kl": 1e-13},
    "entropy collapses: 0.": {**FLAT, "entropy": lambda at: 0.5 * 0.01**at},
    "the policy hardly moves": {**FLAT, "mismatch/generator_kl": 1e-6},
    "responses are cut off: 50% of them": {"rollout/cut_off_fraction": 0.5},
    "responses are cut off: 18% of them; 60% are wrong": {
        **FLAT,
        "rollout/cut_off_fraction": 0.18,
    },
    "the reward is flat: it stays at 0.9": {
        **{"rollout/reward_mean": 0.97, "rollout/success_rate": 0.97},
        "rollout/zero_variance_fraction": 0.9,
    },
    "the format is learned and the answer is not: form": {
        **{"rollout/success_rate": 0.2, "reward_terms/form_mean": rising(0.2, 0.9)},
    },
    "length grows with the reward: ": {"rollout/response_tokens_mean": rising(20, 80)},
    "clipping is far above usual: ": {"ratio/clip_fraction": 0.3},
    "weights move too often: pushes": {"time/push": 0.5},
    "the trainer waits": {"time/wait_for_batch": 0.8},
}


@pytest.mark.parametrize("line", ILL)
def test_each_illness_is_named_first(write, line):
    assert found(write(ILL[line]))[0].startswith(line)


def test_a_clean_run_has_no_finding_whatever_its_length(write, capsys):
    for num in (1, 4, 16, STEPS):
        assert found(write(num=num)) == []
    folder = write()
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == "nothing looks wrong in 40 steps\n"
    for num, said in ((14, "; most rules need 15 steps\n"), (15, "\n")):
        assert main([str(write(num=num))]) == 0
        assert capsys.readouterr().out == f"nothing looks wrong in {num} steps{said}"


def test_what_a_policy_that_runs_away_does_is_listed_as_its_effect(write):
    away = {"mismatch/generator_kl": rising(0.001, 0.9), "rollout/zero_variance_fraction": 1.0}
    first, *others = found(write(FLAT | away | {"rollout/cut_off_fraction": 1.0}))
    assert first.startswith("the policy runs away")
    assert [each.partition(":")[0] for each in others[-2:]] == [
        *("responses are cut off", "the reward is flat")
    ]
    assert all("Likely cause: the policy runs away." in each for each in others[-2:])


def test_a_reward_that_falls_without_a_jump_may_have_the_wrong_sign(write):
    line = found(write({"rollout/reward_mean": rising(0.7, 0.1)}))[0]
    assert "the sign of the loss" in line and "Try: the recipe's own loss, a tenth of " in line
    assert "nats" not in line, "the KL is usual"
    line = found(write({"mismatch/generator_kl": rising(0.001, 0.9)}))[0]
    assert "0.1 nats a token in 36 steps, " in line and "sign" not in line


@pytest.mark.parametrize("rate", [0, 1])
def test_a_reward_that_gives_all_responses_the_same_is_looked_at_first(write, rate):
    flat = {"rollout/reward_mean": rate, "rollout/success_rate": rate}
    line = found(write({**flat, "rollout/zero_variance_fraction": 1}, evaluated=((1, 99),) * 2))[0]
    assert line.startswith("the reward is flat: ")
    says = f"tells no right from wrong (success is {rate}), or the prompts", "read responses"
    assert line.index(says[0]) < line.index(says[1]) < line.index("er prompts")
    assert line.endswith("er prompts"), "of groups that are all equal, none is left to choose"


def test_a_flat_reward_is_no_fault_of_a_run_that_learns_from_a_teacher(write):
    constant = {"rollout/reward_mean": 0, "rollout/success_rate": 0}
    folder = write({**constant, "rollout/zero_variance_fraction": 1})
    assert any("the reward is flat" in line for line in found(folder))
    (folder / "config.yaml").write_text(f"{CONFIG}teacher: {{path: /models/a}}\n")
    assert not any("the reward is flat" in line for line in found(folder))


def test_what_is_cut_off_needs_more_tokens_and_no_other_prompts(write):
    flat = {**FLAT, "rollout/zero_variance_fraction": 0.9, "rollout/cut_off_fraction": 0.9}
    (line,) = [each for each in found(write(flat)) if each.startswith("the reward is flat")]
    assert line.endswith("before they end. Try: a larger generator.max_response_tokens")


def test_clipping_names_the_range_and_no_fewer_than_one_update(write):
    folder = write({"ratio/clip_fraction": 0.3})
    (line,) = found(folder)
    assert "(max_staleness=2), or a narrow range (loss.clip_low=0.2, loss.clip_high=0.2)" in line
    assert "fewer" not in line and line.endswith("a smaller max_staleness")
    (folder / "config.yaml").write_text("ppo_epochs: 2\nmax_staleness: 0\nupdates_per_batch: 3\n")
    (line,) = found(folder)
    assert "by one batch (6)" in line and "Try: fewer ppo_epochs or" in line
    assert "smaller max_staleness" not in line


def test_a_first_step_that_is_skipped_is_no_matter_of_the_learning_rate(write):
    all_skipped = {"skipped_steps": lambda at: round(at * STEPS), "rollout/trained_tokens": 9}
    folder = write(all_skipped)
    for logged, ends in ((1, " (rollouts_logged_per_step=8 logs all groups)"), (8, "")):
        sizes = f"groups_per_step: 8\nrollouts_logged_per_step: {logged}\n"
        (folder / "config.yaml").write_text(sizes)
        line = found(folder)[0]
        assert "before any update" in line and "optimizer" not in line
        assert line.endswith(f"null among the advantages in logs/rollouts.jsonl{ends}")
    line = found(write(ILL["gradients are skipped: 9 of 40 steps"]))[0]
    assert "Try: a lower optimizer.lr" in line and "dtype" not in line


def test_no_finding_advises_what_the_config_has(write):
    def advised(ill, config=""):
        folder = write(ILL[ill])
        with (folder / "config.yaml").open("a") as file:
            file.write(config)
        return found(folder)[0].partition("Try: ")[2]

    away, flat, cut, dear = (
        next(line for line in ILL if line.startswith(start))
        for start in ("the policy runs away", "the reward is flat", "responses are cut", "weights")
    )
    assert "dtype" not in advised("generator and trainer disagree")
    assert advised(away).endswith(", loss.kl_coeff=0.01")
    assert "kl_coeff" not in advised(away, "loss: {kl_coeff: 0.01}")
    assert advised(flat).endswith("curriculum, dynamic_sampling.enabled=true")
    assert advised(flat, "curriculum: {low: 0.2}").endswith("s, dynamic_sampling.enabled=true")
    assert "overlong" in advised(cut, "reward_shaping: {overlong_tokens: 0}")
    assert "overlong" not in advised(cut, "reward_shaping: {overlong_tokens: 4}")
    assert "delta" in advised(dear) and "delta" not in advised(dear, "push: delta")


def test_what_the_evaluations_say(write):
    (line,) = found(write(evaluated=((0.3, 400), (0.31, 400))))
    assert line.startswith("the reward rises, held-out does not: training 0.3")


def test_an_evaluation_on_few_prompts(write):
    (line,) = found(write(FLAT, evaluated=((0.3, 12), (0.45, 12))))
    assert line.startswith("the evaluation is too small: success 0.30 to 0.45 on 12 prompts")


def test_who_waits_for_whom(write):
    slow = WAITS | {"idle: rewards, environments": 90.0}
    assert found(write(seconds=slow))[0].startswith("rewards are slow: the trainer waits 30%")


def test_idle_generators_get_a_split_to_try_if_it_is_another_one(write, tmp_path):
    idle = WAITS | {"idle: no group": 300.0}
    (line,) = found(write({"time/wait_for_batch": 0.05}, seconds=idle))
    tail = f"{tmp_path} --gpus 4"
    assert line.startswith("generators idle") and line.endswith("now 1:1; grpo simulate " + tail)
    assert found(write({"time/wait_for_batch": 0.05}, seconds=idle, num=4)) == []
    assert found(write({"time/wait_for_batch": 0.05}, seconds=idle, trains=20.0)) == [], "1:1 fits"
    folder = write({"time/wait_for_batch": 0.05}, seconds=idle)
    (folder / "config.yaml").write_text(f"{CONFIG}device: cpu\nnum_trainers: 2\n")
    assert found(folder)[0].endswith("Try: 0.1 generators for each trainer, now 1:2")
    for parallel in ("generator: {tensor_parallel_size: 2}", "tensor_parallel_dim: 2"):
        (folder / "config.yaml").write_text(f"{CONFIG}{parallel}\n")
        assert found(folder)[0].endswith(", now 1:1"), "grpo simulate refuses --gpus"


def test_failing_samples_are_named_by_their_most_frequent_error(write, tmp_path):
    folder = write(events=[each for n in range(20) for each in generated(n, 5)])
    sizes = {"groups_per_step": 2, "group_size": 4}
    cfg = Settings.model_construct(output_dir=str(folder), max_failed_samples=0.9, **sizes)
    failures = FailedSamples(cfg, EventOrder(), lambda _: None)
    entry = SimpleNamespace(group_id=1, epoch=0, prompt={"prompt_index": 1, "prompt_text": "?"})
    group = SimpleNamespace(rewards=[0.0] * 6, errors=["reward form: KeyError"] * 4 + ["late"])
    failures.count_group(entry, group)
    says = "samples fail: 5 of 40 in training, "
    assert found(folder)[0].startswith(f"{says}4 like reward form: KeyError")
    held_out = {"prompt_index": 1, "prompt_text": "?", "error": "late"}
    failures.count_evaluation(0, [held_out] * 3 + [held_out | {"error": None}])
    assert found(folder)[0].startswith(f"{says}3 in evaluations, 4 like ")


def test_failures_of_one_line_count_together_whatever_values_their_messages_have(write):
    folder = write(events=[each for n in range(20) for each in generated(n, 5)])
    texts = [f"reward form: ValueError (my.py:3): invalid literal 'now{n}'" for n in range(4)]
    errors = {"late": 3, **dict.fromkeys(texts, 1)}
    write_rows(folder / "logs/failed_samples.jsonl", {"group_id": 1, "errors": errors})
    assert found(folder)[0].startswith(f"samples fail: 7 of 40 in training, 4 like {texts[0]}. ")


@pytest.mark.parametrize(
    ("tokens", "longer"), [(9, ""), (30, "; in groups of +21 tokens a respon")]
)
def test_samples_that_fail_in_long_groups_say_so(write, tokens, longer):
    lengths = [tokens + n % 2 if n < 20 else 9 + n % 2 for n in range(60)]
    folder = write(events=[each for group in enumerate(lengths) for each in generated(*group)])
    rows = ({"group_id": n, "errors": {"late": 1}} for n in range(20))
    write_rows(folder / "logs/failed_samples.jsonl", *rows)
    assert f"20 like late{longer or '.'}" in found(folder)[0]


WARNED = {
    "samples share seeds: groups 8 and 9 have samples of the same seed (99). L": {},
    "tokens weigh differently: step 9: loss/total is 3, but the": {"loss/total": 3.0},
    "the mismatch jumps: step 9: mismatch/generator_kl is 2, the": {"mismatch/generator_kl": 2.0},
}


@pytest.mark.parametrize("line", WARNED)
def test_what_the_run_warned_of_comes_first_until_a_resume(write, line):
    folder, sound = write({"time/push": 0.5}), {"loss/total": 1.0, "loss/policy": 1.0}
    begin = partial(RunWatch, print, folder / "logs", averages_tokens=True, ends="7")
    watch = begin()
    for step in range(5):
        watch.check_step(step, {**sound, "mismatch/generator_kl": 1e-3})
        watch.count_group(SimpleNamespace(group_id=step, seeds=[2 * step, 2 * step + 1]))
    assert found(folder)[0].startswith("weights move too often")
    watch.check_step(9, sound | WARNED[line])
    for group in () if WARNED[line] else (8, 9):
        watch.count_group(SimpleNamespace(group_id=group, seeds=[99]))
    assert found(folder)[0].startswith(line)
    begin()
    assert found(folder)[0].startswith("weights move too often")


def test_drops_that_prefer_long_responses(write):
    events = [each for n in range(60) for each in generated(n, 10 + n % 3, stale=False)]
    events += [each for n in range(60, 75) for each in generated(n, 30 + n % 3, stale=True)]
    (line,) = found(write(events=events))
    assert line.startswith("long responses are dropped: 15 stale (20%), +20 tokens")


def test_staleness_is_not_blamed_for_groups_that_failed(write):
    events = [each for n in range(75) for each in generated(n, 30 - n // 15, stale=n < 15)]
    failed = [each | {"reason": "failed"} for each in events]
    assert found(write(events=events)) and found(write(events=failed)) == []


def test_memory_that_grows_and_a_disk_that_is_too_small(write, monkeypatch):
    folder = write()
    write_rows(folder / "receipts.jsonl", START | {"num_steps": 1000})
    beats = ({"role": "driver", "rss_mib": 1000 + 300 * n} for n in range(12))
    write_rows(folder / "logs/heartbeats.jsonl", *beats)
    (folder / "checkpoints/step_40").mkdir(parents=True)
    (folder / "checkpoints/step_40/model").write_bytes(bytes(2**20))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**29))
    disk, memory = found(folder)
    assert disk.startswith("the disk will not last: 0.5 GiB are free, checkpoints to come need 0.9")
    assert memory.startswith("memory will not last: driver has grown from 1.")
    assert "more until the last step" in memory


def test_the_worst_come_first_and_ten_at_most(write):
    planted = {key: value for each in ILL.values() for key, value in each.items()}
    lines = diagnose(read(write(planted, evaluated=((0.5, 8), (0.5, 8)))))
    assert len(lines) <= 10 < len(RULES)
    assert [each.severity for each in lines] == sorted((e.severity for e in lines), reverse=True)


def test_a_run_that_goes_on_and_damaged_or_foreign_files_have_an_answer(write, tmp_path, capsys):
    folder = write({"rollout/cut_off_fraction": 0.5})
    for name in ("receipts", "logs/metrics", "logs/heartbeats", "logs/failed_samples"):
        path = folder / f"{name}.jsonl"
        path.touch()
        lines = path.read_bytes().splitlines(keepends=True)
        foreign = [
            b'{"event": 3}\n',
            b'{"step": "x", "role": 1, "errors": [], "error": 1}\n',
            b"\xff\n",
        ]
        path.write_bytes(b"".join([*lines[:-1], *foreign, *(line[:9] for line in lines[-1:])]))
    (folder / "config.yaml").write_text("a: [")
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.startswith("responses are cut off")
    write_rows(folder / "receipts.jsonl", START)
    (folder / "logs/metrics.jsonl").unlink()
    assert main([str(folder)]) == 0
    assert "0 steps" in capsys.readouterr().out
    assert main([str(tmp_path / "logs")]) == 2
    assert capsys.readouterr().err.startswith("no diagnosis: no run: ")
    assert main([str(folder / "config.yaml")]) == 2
    assert capsys.readouterr().err.endswith("config.yaml: a file, not a folder\n")


HUGE = {"step": 1, "rollout/reward_mean": 10**401, "rollout/cut_off_fraction": 1e308}
STRANGE = {
    "logs/failures.jsonl": ('{"message": {"error": 2}}', '{"attempt": [0], "error": "x"}'),
    "receipts.jsonl": (
        *('{"event": "start", "attempt": [1]}', '{"event": "start", "attempt": "a"}'),
        '{"event": "start", "attempt": 0, "steps_done": "3", "num_steps": 9}',
        *(f'{{"event": "start", "attempt": 7, "num_steps": {n}}}' for n in ("null", '"100"')),
        '{"event": "end", "attempt": {}, "step": 1}',
        '{"event": "drop", "attempt": "a", "groups": [1], "reason": 1, "reissue": 0}',
    ),
    "logs/metrics.jsonl": tuple(str({**HUGE, "step": n}).replace("'", '"') for n in range(1, 60)),
    "logs/failed_samples.jsonl": (
        *('{"errors": {"a": "b"}}', '{"errors": [[]]}', '{"errors": {}, "group_id": []}'),
    ),
    "logs/roles.jsonl": ('{"role": 1}', '{"role": [], "started": "x", "attempt": {}, "node": []}'),
    "logs/heartbeats.jsonl": ('{"role": 3, "time": []}', '{"role": "a", "seconds": {"b": []}}'),
    "logs/phases.jsonl": ('{"attempt": 0}', '{"attempt": 0, "phase": 1, "seconds": "x"}'),
    "logs/rollouts.jsonl": tuple(
        f'{{"step": 1, "attempt": 0, "responses": {responses}}}' for responses in ("3", '["a"]')
    ),
    "logs/warnings.jsonl": ('{"kind": []}', '{"kind": "loss"}', '{"kind": "seeds", "warning": 1}'),
    "config.yaml": (
        *("lr: 2020-99-99", "save_every_n_steps: 0", "num_trainers: 0", "optimizer: 3"),
        *("[" * 9000, "rewards: [1]", "max_staleness: x"),
    ),
}


SECTIONS = "diagnosis", "evaluation", "rollouts", "timeline", "dropped-groups", "config"


@pytest.mark.parametrize("name", STRANGE)
def test_strange_values_end_neither_a_diagnosis_nor_a_report(write, name, capsys, monkeypatch):
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")  # saves 5 MB per page
    folder = write({"time/wait_for_batch": 0.9, "rollout/cut_off_fraction": 0.5})
    sound = shutil.copytree(folder, folder / "sound")
    (folder / "checkpoints/step_1").mkdir(parents=True)
    whole = (folder / name).read_text() if (folder / name).exists() else ""
    for line in ("\n".join(STRANGE[name]), *STRANGE[name]):
        (folder / name).write_text(line + "\n" if name == "config.yaml" else f"{whole}{line}\n")
        assert main([str(folder)]) == 0, line
        assert capsys.readouterr().out.strip() and found(folder)
        assert report([str(folder)]) == 0, line
        assert capsys.readouterr().out.count("\n") == 1
        html = (folder / "report.html").read_text("utf-8")
        assert all(f'<h2 id="{each}">' in html for each in SECTIONS), "those of other files"
        code = report([str(folder), str(sound), "--output", str(folder / "both.html")])
        told = capsys.readouterr().err
        assert (code, told) == (0, "") or (told.startswith("no report: ") and told.count("\n") == 1)


def test_without_a_config_no_figure_or_advice_names_its_values(write):
    folder = write({"rollout/cut_off_fraction": 0.5, "mismatch/generator_kl": rising(0.001, 0.9)})
    (folder / "config.yaml").write_text("generator: {max_response_tokens: 64}\n")
    assert any(" of them, at 64 tokens; " in line for line in found(folder))
    (folder / "config.yaml").unlink()
    assert len(found(folder)) == 2 and not any("None" in line for line in found(folder))


def test_metrics_of_another_program_are_no_clean_run(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    rows = [{"step": step, "loss": 1.0, "kl": 50} for step in range(1, 40)]
    write_rows(tmp_path / "logs/metrics.jsonl", *rows)
    assert main([str(tmp_path)]) == 0
    line = "nothing can be told: none of 39 steps has rollout/reward_mean. "
    assert capsys.readouterr().out.startswith(line)
    assert report([str(tmp_path)]) == 0


def test_the_report_has_a_panel(write):
    html = write_report(write(FLAT | {"rollout/cut_off_fraction": 0.5})).read_text("utf-8")
    assert '<h2 id="diagnosis">' in html and "<li>responses are cut off: 5" in html
    clean = write_report(write()).read_text("utf-8")
    assert "<li>nothing looks wrong in 40 steps</li>" in clean


def test_an_error_that_ended_the_run(write):
    folder = write()
    write_rows(folder / "logs/failures.jsonl", {"attempt": 0, "error": "RoleLostError: trainer_0"})
    assert found(folder)[0].startswith("the run ended with an error: RoleLostError: trainer_0")
