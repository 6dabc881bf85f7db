"""One page for several runs: their curves together, their key figures and what differs."""

import json
import re

import numpy as np
import pytest
from lib.rows import write_rows

from grpo_components.files import EVALUATIONS
from grpo_tools.report.__main__ import main
from grpo_tools.report.better import verdicts
from grpo_tools.report.comparison import write_comparison
from grpo_tools.report.run_files import History, NoStepsError


@pytest.fixture(autouse=True)
def _without_plotly(monkeypatch):
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")  # saves 5 MB per page


@pytest.fixture
def make(tmp_path):
    def make(name, config="seed: 1\n", steps=2, **metrics):
        folder = tmp_path / name
        lines = ({"step": s + 1, "attempt": 0, "my/own": 1.5, **metrics} for s in range(steps))
        write_rows(folder / "logs/metrics.jsonl", *lines)
        (folder / "config.yaml").write_text(config)
        return folder

    return make


def compared(*folders):
    """The page of these runs, and the verdicts."""
    return write_comparison(folders, folders[0].parent / "page.html")


def page(*folders):
    html = compared(*folders)[0].read_text(encoding="utf-8")
    (data,) = re.findall(r'id="data-charts">(.*?)</script>', html)
    return html, json.loads(data)


def test_the_curves_of_all_runs_are_in_the_same_chart(make):
    html, charts = page(make("a"), make("b"), make("c", steps=5))
    [own] = charts
    assert [trace["name"] for trace in own["data"]] == ["a", "b", "c"]
    assert [trace["x"][-1] for trace in own["data"]] == [2, 2, 5]
    assert [trace["meta"]["run"] for trace in own["data"]] == [0, 1, 2]
    assert html.count("<h2 ") == 4, "runs, which is better, other metrics, configs"


def test_config_keys_are_listed_that_differ(make):
    first = "seed: 1\nloss: {clip_low: 0.2, clip_high: 0.2}\nlr_scheduler: null\n"
    second = "seed: 2\nloss: {clip_low: 0.2, clip_high: 0.3}\nlr_scheduler: {name: cosine}\n"
    html, _ = page(make("a", first), make("b", second))
    differences = html.partition('id="differences-in-the-configs"')[2]
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", differences)
    assert rows == [
        ("seed", "1", "2"),
        ("loss.clip_high", "0.2", "0.3"),
        *(("lr_scheduler", "null", "-"), ("lr_scheduler.name", "-", "cosine")),
    ]
    assert "configs are the same" in page(make("c"), make("d"))[0]


def test_runs_are_told_apart_by_as_much_of_their_paths_as_needed(make):
    _, [own] = page(make("x/run"), make("y/run"))
    assert [trace["name"] for trace in own["data"]] == ["x/run", "y/run"]


def test_a_run_without_a_step_is_named(make, tmp_path, capsys):
    with pytest.raises(NoStepsError, match=r"empty/logs/metrics\.jsonl"):
        page(make("a"), make("empty", steps=0))
    assert main([str(tmp_path / "a"), str(tmp_path / "empty")]) == 2
    assert "empty/logs/metrics.jsonl" in capsys.readouterr().err
    assert main([str(tmp_path / "a"), str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err == f"no report: {tmp_path}/nothing: no such folder\n"


def test_the_command_overlays_several_runs_in_the_current_folder_or_in_a_file(
    make, tmp_path, monkeypatch, capsys
):
    """And writes nothing into the folders of the runs."""
    runs = [str(make(name)) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)
    assert main(runs) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("comparison.html (")
    assert main([*runs, "--output", "both.html"]) == 0
    assert main([runs[0], "--output", "one.html"]) == 0
    pages = sorted(path.name for path in tmp_path.glob("*.html"))
    assert pages == ["both.html", "comparison.html", "one.html"]
    assert not list(tmp_path.glob("*/report.html"))
    assert main([*runs, "--output", "no/such/folder.html"]) == 2


# ---- which is better ----------------------------------------------------------------------------


def evaluation(step, success):
    success = [*success]
    prompts = [*range(len(success))]
    return {"step": step, "attempt": 0, "prompt_index": prompts, "success": success}


@pytest.fixture
def compare(tmp_path):
    """Compare jobs, each of the arrays of success [prompts] of its seeds; gives the verdicts."""

    def compare(*jobs, step=9, **config):
        folders, configs = [], []
        for number, seeds in enumerate(jobs):
            for seed, success in enumerate(seeds):
                folder = tmp_path / f"{number} {seed}"
                line = evaluation(step if number else 9, map(float, success))
                write_rows(folder / "logs" / EVALUATIONS, line | {"step": 1}, line)
                own = {"optimizer.lr": str(number), "seed": str(seed), "output_dir": folder.name}
                own |= {"rewards.right.is_success": "True"}
                folders.append(folder)
                configs.append(own | ({} if number else config))
        return verdicts([*map(History, folders)], [each.name for each in folders], configs)

    return compare


def runs(random, rates, seeds, effect=0.0):
    """Answers to prompts of different difficulty; each seed moves all of them by its own effect."""
    moved = (np.clip(rates + random.normal(0, effect), 0, 1) for _ in range(seeds))
    return [random.random(len(rates)) < each for each in moved]


def test_a_clear_difference_is_named_and_its_direction(compare):
    base, better = np.arange(200) % 2 == 0, np.arange(200) % 10 > 0
    [line] = compare([base], [better])
    assert line.startswith("1 0 against 0 0: better: held-out success 0.500 to 0.900, +0.400 (+0.3")
    assert "200 prompts, 1 and 1 runs, steps 9 and 9. Another seed may differ by more" in line
    [line] = compare([better] * 3, [base] * 3)
    assert line.startswith("1 0, 1 1, 1 2 against 0 0, 0 1, 0 2: worse: "), "all folders of a job"
    assert "3 and 3 runs" in line and "Another seed" not in line


def test_the_same_prompts_count_more_than_as_many_others(compare):
    """What is hard for both runs tells nothing about the difference."""
    hard = np.arange(200) < 100
    [line] = compare([hard], [hard | (np.arange(200) % 20 == 19)])
    assert ": better: " in line, "5 prompts of 200 gained, none lost"


@pytest.mark.parametrize(("seeds", "effect"), [(1, 0.0), (3, 0.1)])
def test_runs_that_are_alike_are_called_different_in_few_cases(compare, seeds, effect):
    random, wrong = np.random.default_rng(5), 0
    for _ in range(200):
        rates = random.random(60)
        pair = (runs(random, rates, seeds, effect) for _ in range(2))
        wrong += "not enough to tell" not in compare(*pair)[0]
    assert wrong <= 18, "5 % of 200, and three standard deviations"


@pytest.mark.parametrize(("seeds", "effect"), [(2, 0.02), (3, 0.04)])
def test_the_interval_has_the_true_difference_and_is_narrow_enough_to_decide(
    compare, seeds, effect
):
    """Answers to 204 prompts of a job that is better by 0.1; few seeds, which differ little."""
    random, missed, decided = np.random.default_rng(5), 0, 0
    for _ in range(200):
        rates = random.uniform(0.25, 0.65, 204)
        pair = (runs(random, rates + more, seeds, effect) for more in (0, 0.1))
        line = compare(*pair)[0]
        low, high = map(float, re.findall(r"\((\S+) to (\S+) with 95 %", line)[0])
        missed += not low <= 0.1 <= high
        decided += ": better: " in line
    assert missed <= 18, "5 % of 200, and three standard deviations"
    assert decided >= 60


def test_copies_of_a_run_are_no_further_seeds(compare):
    success = np.arange(200) % 2 == 0
    [line] = compare([success] * 2, [success] * 2, seed="0")
    assert "2 and 2 runs" in line and "Another seed may differ by more" in line


def test_other_evaluations_are_not_compared_and_missing_ones_are_named(compare, make):
    alike = [np.ones(9)]
    for key in ("eval_dataset.source", "timeouts.reward_s", "rewards.right.answer_format"):
        assert compare(alike, alike, **{key: "x"})[0].endswith(f"with different {key}")
    for key in ("timeouts.startup_s", "rewards.right.weight", "rewards.other.max_words"):
        assert "not enough to tell" in compare(alike, alike, **{key: "x"})[0]
    [line] = compare(alike, alike)
    assert "+0.000 (no difference on any prompt); 9 prompts, 1 and 1 runs, steps 9 and 9. " in line
    [line] = compare(alike, [np.arange(9) > 0], step=5)
    assert "with 95 %); 9 prompts, 1 and 1 runs, steps 9 and 5: not the same. " in line
    pair = History(make("a")), History(make("b"))
    [line] = verdicts(pair, ["a", "b"], [{"a": "1"}, {"a": "2"}])
    assert line == "b against a: not enough to tell: no evaluation of a"
    [line] = verdicts(pair, ["c", "d"], [{"seed": "1"}, {"seed": "2"}])
    assert line == "c, d: runs of one job, which differ in their seeds at most"


def test_own_files_that_differ_make_another_job_and_those_that_evaluate_another_measure(make):
    def run(name, **files):
        right = "right: {_component_: my_reward.A, is_success: true}"
        rewards = f"rewards: {{{right}, form: {{_component_: my_form.B}}}}"
        folder = make(name, f"{rewards}\neval_dataset: {{_component_: my_data.C}}\n")
        (folder / "code/attempt_0").mkdir(parents=True)
        for file in ("my_reward", "my_form", "my_data"):
            (folder / f"code/attempt_0/{file}.py").write_text(files.get(file, "as it was"))
        write_rows(folder / "logs" / EVALUATIONS, evaluation(2, [1.0] * 9))
        return folder

    def verdict(folder):
        return compared(first, folder)[1][0]

    first = run("a")
    assert verdict(run("b")).startswith("a, b: runs of one job")
    assert verdict(run("c", my_form="edited")).startswith("c against a: not enough to tell: held")
    for file in ("my_reward", "my_data"):
        line = verdict(run(file, **{file: "edited"}))
        assert line.endswith(f": not comparable: they were evaluated with different code/{file}.py")


def test_a_folder_without_a_config_is_named_and_the_others_are_compared(make):
    folders = [make("a"), make("b"), make("c", "seed: 2\n")]
    (folders[1] / "config.yaml").unlink()
    html, lines = compared(*folders)
    without = "b: not comparable: it has no config.yaml"
    assert html.exists() and lines[0] == without
    assert lines[1].startswith("a, c: runs of one job")
    (folders[0] / "config.yaml").unlink()
    assert compared(*folders[:2])[1] == [without.replace("b", "a", 1), without]


def test_an_evaluation_that_a_later_attempt_replaced_does_not_count(make):
    folders = [make("a", "lr: 1\n", steps=9), make("b", "lr: 2\n", steps=9)]
    for folder in folders:
        lines = evaluation(4, [1.0] * 100), evaluation(9, [0.0] * 100)
        write_rows(folder / "logs" / EVALUATIONS, *lines)
    with (folders[1] / "logs/metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "attempt": 1}\n')  # resumed from step 4, then killed
    (line,) = compared(*folders)[1]
    assert "held-out success 0.000 to 1.000" in line and "steps 9 and 4: not the same" in line


def test_which_is_better_comes_before_the_curves(make):
    html, _ = page(make("a", **{"rollout/reward_mean": 1.0}), make("b"))
    headings = re.findall('<h2 id="(.*?)"', html)
    assert headings[:2] == ["runs", "which-is-better"] and "data-chart=" in html
    assert html.index('<h2 id="which-is-better"') < html.index("data-chart=")


def test_a_forked_recipe_is_another_job_and_a_folder_counts_once(make, capsys):
    def forked(name, loss, prompt):
        folder = make(name, f"system_prompt: {'x' * 200}{prompt}{'y' * 200}")
        for attempt, code in ((9, "old"), (10, loss)):
            (folder / f"code/attempt_{attempt}").mkdir(parents=True)
            (folder / f"code/attempt_{attempt}/my_grpo.py").write_text(code)
        return folder

    runs = (("a", "1", 5), ("b", "1", 5), ("c", "2", 5), ("d", "1", 6))
    folders = [forked(*each) for each in runs]
    page, (fork, other) = compared(*folders, folders[0])
    assert fork.startswith("c against a, b: ") and other.startswith("d against a, b: ")
    assert "<td>code/my_grpo.py</td>" in page.read_text()
    (folders[1] / "config.yaml").write_text("a: [")
    assert main([str(each) for each in folders[:2]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("no report: ")
