"""An evaluation covers every held-out prompt, at one version, with any generators left."""

import asyncio
import contextlib

import pytest
from lib.role import limits, stand_in_role, waits_of

from grpo_components.cluster.handles import GeneratorHandle
from grpo_components.errors import RoleFailedError
from grpo_components.evaluation.evaluation import Evaluation
from grpo_components.evaluation.metrics import evaluation_metrics
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.schedules import as_schedule
from grpo_components.settings import EvalSettings, Settings, Timeouts
from grpo_components.state_files import write_state


class Generator:
    """Answers every prompt with its handle's weights, once `may_answer` is set."""

    def __init__(self, **options):
        role = stand_in_role("generator_0", self, **options)
        self.handle = GeneratorHandle(role, new_ledger(), limits())
        self.waits = waits_of(role)
        self.asked, self.temperatures, self.logged = [], [], []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def evaluate(self, prompts, temperature, samples, logged):
        assert self.handle.swapping.locked()
        await self.may_answer.wait()
        self.asked += prompts
        self.logged += [prompts[i] for i in logged]
        self.temperatures.append(temperature)
        version = self.handle.version
        return [
            {"prompt_index": p, "reward": 1.0, "success": p % 2, "error": None}
            | {"oldest_version": version, "newest_version": version}
            for p in prompts
            for _ in range(samples)
        ]


def new_ledger():
    return Ledger(StalenessContract(9, 1), 50, iter(()))


DIES = {"dies_in": {"evaluate"}, "max_restarts": 0}


class Run:
    def __init__(self, *generators, rows=10, samples=1, prompts_logged=4, temperature=1.0, **keys):
        self.generators, self.published, self.results = [g.handle for g in generators], 7, []
        self.answers, self.pulls = [], []
        self.ledger = new_ledger()
        keys = {"eval_every_n_steps": 5, "num_steps": 50, "max_staleness": 9, **keys}
        cfg = Settings.model_construct(
            **{"groups_per_step": 1, "group_size": 2, "rollouts_in_flight": 2, **keys},
            eval=EvalSettings(samples_per_prompt=samples, prompts_logged=prompts_logged),
            eval_dataset="held out",
            timeouts=Timeouts(rollout_s=9),
        )
        self.evaluation = Evaluation(
            *(cfg, range(rows), as_schedule("generator.temperature", temperature)),
            pin_weights=self.ledger.pin_weights,
            ended=self.ended,
        )

    def ended(self, step, results):
        self.answers.append((step, results))
        self.results.append((step, evaluation_metrics(results)))
        return self.results[-1][1]

    async def pull(self, generator, cause):
        assert cause.startswith("evaluation 3") and generator.swapping.locked()
        assert (generator, cause) not in self.pulls, "a replay cannot tell it from the earlier one"
        self.pulls.append((generator, cause))
        await asyncio.sleep(0)
        generator.version = self.published

    async def begin(self, tasks):
        await self.evaluation.begin(3, self.generators, self.pull, tasks)

    def whole(self):
        async def evaluate():
            async with asyncio.TaskGroup() as tasks:
                await self.begin(tasks)
                return await self.evaluation.collect()

        return asyncio.run(evaluate())


def test_generators_share_the_prompts_and_answer_each_once():
    generators = [Generator() for _ in range(3)]
    run = Run(*generators)
    metrics = run.whole()
    assert sorted(p for g in generators for p in g.asked) == list(range(10))
    assert metrics["eval/success_rate"] == 0.5
    assert (metrics["eval/prompts"], metrics["eval/policy_version"]) == (10, 7)
    assert run.results == [(3, metrics)]
    assert not any(generator.handle.swapping.locked() for generator in generators)


@pytest.mark.parametrize(
    ("prompts_logged", "expected"), [(0, []), (1, [0]), (3, [0, 3, 6]), (99, [*range(10)])]
)
def test_the_prompts_whose_answers_are_logged_are_spread_and_always_the_same(
    prompts_logged, expected
):
    """However many generators share them."""
    for generators in ([Generator()], [Generator() for _ in range(3)]):
        Run(*generators, prompts_logged=prompts_logged).whole()
        assert sorted(p for g in generators for p in g.logged) == expected


def test_answers_and_metrics_have_the_version_of_the_weights_that_generators_start_with(tmp_path):
    write_state(tmp_path / "state", "driver", {"ledger": {"policy_version": 30}})
    run = Run(Generator(), eval_only=str(tmp_path))
    assert run.whole()["eval/policy_version"] == 37
    [(step, results)] = run.answers
    assert step == 3 and len(results) == 10
    assert {result["oldest_version"] for result in results} == {37}


def test_several_responses_to_each_prompt_are_sampled_at_the_evaluations_temperature():
    generator = Generator()
    metrics = Run(generator, samples=4, temperature=0.0).whole()
    assert generator.temperatures == [0.0]
    assert generator.waits == [("evaluate", 9.0 * (2 + 40 // 4))], "for every batch of responses"
    assert metrics["eval/pass_at_4"] == 0.5


def test_training_goes_on_as_soon_as_every_generator_holds_the_weights():
    first, second = Generator(), Generator()
    run = Run(first, second)

    async def train():
        second.may_answer.clear()
        async with asyncio.TaskGroup() as tasks:
            await run.begin(tasks)
            assert (first.handle.version, second.handle.version) == (7, 7)
            assert await run.evaluation.collect(3) == {}
            run.published = 8
            for _ in range(20):
                await asyncio.sleep(0)
            assert first.handle.swapping.locked(), "every generator waits for all answers"
            second.may_answer.set()
        metrics = await run.evaluation.collect(3)
        assert metrics["eval/policy_version"] == 7
        assert await run.evaluation.collect(3) == {}, "once"

    asyncio.run(train())


async def waits_at(number, **schedule):
    """Whether this step's record waits for the evaluation that began after step 3."""
    generator = Generator()
    generator.may_answer.clear()
    run = Run(generator, **schedule)
    async with asyncio.TaskGroup() as tasks:
        await run.begin(tasks)
        record = tasks.create_task(run.evaluation.collect(number))
        await asyncio.sleep(0)
        waited = not record.done()
        generator.may_answer.set()
    return waited


def waiting_steps(**schedule):
    return {number for number in range(3, 7) if asyncio.run(waits_at(number, **schedule))}


@pytest.mark.parametrize(
    ("every", "expected"), [(1, {3, 4, 5, 6}), (2, {3, 5, 6}), (5, {4, 5, 6}), (9, {5, 6})]
)
def test_a_steps_record_waits_if_the_next_evaluation_is_near(every, expected):
    """So each evaluation has a record of its own, and the last is not lost."""
    assert waiting_steps(eval_every_n_steps=every, num_steps=6) == expected


@pytest.mark.parametrize(
    ("max_staleness", "expected"), [(0, {4, 5, 6}), (1, {5, 6}), (2, {6}), (3, set())]
)
def test_training_waits_if_its_next_groups_need_newer_weights(max_staleness, expected):
    """Else it would wait for a batch, which has a time-out."""
    assert waiting_steps(eval_every_n_steps=50, max_staleness=max_staleness) == expected


@pytest.mark.parametrize("dies", [{}, DIES])
def test_no_other_wait_times_out_during_an_evaluation(dies):
    """Afterwards they can again, whether it failed or not."""
    generator = Generator(**dies)
    run, seen = Run(generator), []
    load = run.pull

    async def pull(generator, cause):
        seen.append(run.ledger.weights_pinned)
        await load(generator, cause)

    run.pull = pull
    with contextlib.suppress(ExceptionGroup):
        run.whole()
    assert seen == [True] and not run.ledger.weights_pinned


def test_evaluations_are_due_every_n_steps_and_after_the_last():
    run = Run(Generator(), eval_every_n_steps=4, num_steps=6)
    assert [step for step in range(1, 7) if run.evaluation.due(step)] == [4, 6]


def test_it_is_repeated_without_a_generator_that_is_lost_meanwhile():
    lost, left = Generator(**DIES, can_spare=lambda: True), Generator()
    metrics = Run(lost, left).whole()
    assert sorted(left.asked[-10:]) == list(range(10))
    assert metrics["eval/prompts"] == 10


def test_it_is_repeated_if_a_restarted_generator_has_newer_weights():
    """At the version published by then; no result mixes two versions."""

    async def pulls_newer(name):
        restarted.handle.version = run.published = 8

    restarted, other = Generator(dies_in={"evaluate"}, recover=pulls_newer), Generator()
    run = Run(restarted, other)

    async def older(generator, cause):
        generator.version = max(generator.version, 7 if not other.asked else 8)

    run.pull = older
    assert run.whole()["eval/policy_version"] == 8
    assert len(other.asked) == 10, "its share, twice"


def test_any_other_failure_ends_the_run():
    with pytest.raises(ExceptionGroup) as raised:
        Run(Generator(**DIES), Generator()).whole()
    (failure,) = raised.value.exceptions
    assert isinstance(failure, RoleFailedError) and failure.kind == "died"
