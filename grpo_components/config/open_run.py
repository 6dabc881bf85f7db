"""Opens a run's folder, and builds everything that records the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_components.config.components import build
from grpo_components.config.data import left_out, shared_prompts
from grpo_components.config.replayed import available_cpus, replay_of
from grpo_components.data.curriculum import PromptCurriculum
from grpo_components.errors import fail
from grpo_components.evaluation.evaluation import Evaluation
from grpo_components.evaluation.metrics import evaluation_metrics
from grpo_components.exchange.event_order import EventOrder
from grpo_components.exchange.group_reuse import GroupReuse
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.objective.aggregation import TokenMean
from grpo_components.quiet import without_prints
from grpo_components.records.guards import FailedSamples, RunWatch
from grpo_components.records.journal import Journal
from grpo_components.records.receipts import build_receipts
from grpo_components.records.resume import Stateful, begin_run
from grpo_components.records.run import RunRecords
from grpo_components.records.run_folder import save_code
from grpo_components.records.run_log import RunLog
from grpo_components.schedules import Schedule
from grpo_components.settings import Settings

_TOKEN_MEAN = f"{TokenMean.__module__}.{TokenMean.__name__}"


def open_run(
    cfg: Settings,
    ledger: Ledger,
    prompts: Stateful,
    temperature: Schedule,
    tokenizer: Any,
    dataset: Any,
    held_out: Any,
    recipe: str | None = None,
) -> RunRecords:
    """Open the run's folder and its records; on a resume, restore the ledger and the prompts."""
    if cfg.curriculum is not None and not isinstance(prompts, PromptCurriculum):
        problem = "given, but the recipe takes its prompts from another stream"
        fail("curriculum", problem, "null, or a recipe with `build_prompts(cfg, dataset)`")
    ledger.reuse = build_reuse(cfg)
    start = begin_run(cfg, ledger, prompts)
    save_code(start.output_dir, start.attempt, recipe)
    replay = replay_of(cfg)
    ledger.events = EventOrder(start.attempt, replay and replay.order)
    curriculum = prompts if isinstance(prompts, PromptCurriculum) else None
    receipts = build_receipts(cfg, ledger, start.identity, curriculum, available_cpus(cfg))
    if curriculum is not None:
        ledger.events.listen(curriculum.follow)
    log = open_log(cfg, ledger.events, start.note, dataset, held_out)
    failures = FailedSamples(cfg, ledger.events, log.note)
    journal = Journal(cfg, start, ledger, prompts, receipts, log)

    def evaluated(step: int, results: list[dict[str, Any]]) -> dict[str, float]:
        log.evaluation_answers(step, results)
        scored = failures.count_evaluation(step, results)
        metrics = {"eval/step": step, **evaluation_metrics(scored)}
        log.evaluation(step, metrics)
        journal.add_evaluation(step, metrics)
        return metrics

    evaluation = Evaluation(cfg, held_out, temperature, ledger.pin_weights, evaluated)
    return RunRecords(
        *(cfg, start, ledger, journal, log),
        evaluation=evaluation,
        failures=failures,
        watch=_watch(cfg, log, tokenizer),
        curriculum=curriculum,
    )


def build_reuse(cfg: Settings) -> GroupReuse:
    """Build what chooses trained groups to train on again: none if `replay_generation` is null."""
    contract = StalenessContract.of(cfg)
    rule = cfg.replay_generation
    return GroupReuse(contract, **rule.model_dump()) if rule else GroupReuse(contract)


def _watch(cfg: Settings, log: RunLog, tokenizer: Any) -> RunWatch:
    """Build the `RunWatch`, which warns of mistakes that raise no error."""
    names = {token_id: name for name, token_id in getattr(tokenizer, "special_tokens", {}).items()}
    stops = cfg.generator.stop_token_ids or tokenizer.stop_tokens
    ends = ", ".join(f"{i} ({names[i]})" if i in names else f"{i}" for i in stops)
    averages_tokens = cfg.aggregation._component_ == _TOKEN_MEAN
    logs = Path(cfg.output_dir, "logs")
    return RunWatch(log.note, logs, averages_tokens=averages_tokens, ends=ends)


def open_log(cfg: Settings, events: EventOrder, note: str, dataset: Any, held_out: Any) -> RunLog:
    """Open the run log, and show the notes on the start and the data sets."""
    with without_prints(cfg.log_level):
        logger = build("metric_logger", cfg.metric_logger)
    if missing := [name for name in ("log_dict", "close") if not hasattr(logger, name)]:
        problem = f"{cfg.metric_logger._component_} makes a logger without {missing[0]}"
        fail("metric_logger", problem, "one of torchtune.training.metric_logging, or one like it")
    run_log = RunLog(cfg, logger, events)
    shared = shared_prompts(dataset, held_out) if cfg.trains else ""
    unused = "eval_dataset is null: nothing is evaluated, whatever eval_every_n_steps says"
    none = "" if len(held_out) else unused
    for line in filter(None, (note, *left_out(dataset, held_out), shared, none)):
        run_log.note(line)
    return run_log
