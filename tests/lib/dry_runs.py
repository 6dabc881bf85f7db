"""Makes a dry run of every shipped config in one process, on as many GPUs as it needs.

    PYTHONPATH=tests python tests/lib/dry_runs.py FOLDER

The policy is in FOLDER/policy; the plans, by config and heading, come to FOLDER/dry_runs.json.
"""

import contextlib
import io
import json
import math
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torchtune._cli.tune  # noqa: F401  # before GPUs seem to be there: it looks at their kind
import transformers
import yaml

from lib.chaos import RECIPE, TUNE
from lib.tracked import tracked

MODELS = {  # layers, width, inner width, heads, heads of keys, tied embeddings, files
    "Qwen2.5-0.5B": (24, 896, 4864, 14, 2, True, 1),
    "Qwen2.5-3B": (36, 2048, 11008, 16, 2, True, 2),
    "Qwen2.5-7B": (28, 3584, 18944, 28, 4, False, 4),
    "Qwen2.5-14B": (48, 5120, 13824, 40, 8, False, 8),
    "Qwen2.5-32B": (64, 5120, 27648, 40, 8, False, 17),
    "Qwen3-0.6B-Base": (28, 1024, 3072, 16, 8, True, 1),
    "Qwen3-4B-Base": (36, 2560, 9728, 32, 8, True, 3),
    "Qwen3-8B-Base": (36, 4096, 12288, 32, 8, False, 5),
}
"""Sizes as published, from which the shapes in a checkpoint follow."""


def published_config(name):
    layers, width, inner, heads, kv_heads, tied, _ = MODELS[name]
    kind = (transformers.Qwen3Config, "Qwen3ForCausalLM", {"head_dim": 128})
    if name.startswith("Qwen2.5"):
        kind = (transformers.Qwen2Config, "Qwen2ForCausalLM", {})
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes |= {"vocab_size": 151936 if tied or kind[2] else 152064, "max_position_embeddings": 32768}
    numbers = {"rms_norm_eps": 1e-5 if width == 5120 else 1e-6, "tie_word_embeddings": tied}
    numbers |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    return kind[0](**sizes, **numbers, architectures=[kind[1]], **kind[2])


def empty_model(folder, name, policy):
    """Write a checkpoint of a published model's shapes, all zeros that take no room on the disk."""
    config, num_files = published_config(name), MODELS[name][-1]
    shutil.copytree(policy, folder)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
    tied = config.tie_word_embeddings
    keys = sorted(key for key in shapes if not (tied and key == "lm_head.weight"))
    files = [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]
    (folder / "model.safetensors").unlink()
    if num_files == 1:
        files = ["model.safetensors"]
    else:
        index = {"weight_map": {key: files[i % num_files] for i, key in enumerate(keys)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for i, file in enumerate(files):
        header, end = {}, 0
        for key in keys[i::num_files]:
            shape, start = list(shapes[key]), end
            end += 2 * math.prod(shape)
            header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
    for file in (folder / "data").iterdir():  # some data sets call the question a problem
        file.write_text(file.read_text().replace('{"question"', '{"problem": "one", "question"'))


def dry_runs(folder):
    """Write the dry run's text of every config, by heading, without what machines differ in."""
    plans = {}
    for name in MODELS:
        empty_model(folder / name, name, folder / "policy")
    os.environ["WANDB_MODE"] = "offline"
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(total_memory=80 * 2**30)
    shutil.disk_usage = lambda _: SimpleNamespace(free=2**50)
    for file in sorted(tracked("recipes/configs/*.yaml")):
        cfg = yaml.safe_load(file.read_text())
        is_cpu, base = cfg["device"] == "cpu", folder / Path(cfg["base_model_path"]).name
        torch.cuda.device_count = lambda on_cpu=is_cpu: 0 if on_cpu else 64
        base, output, code = (folder / "policy" if is_cpu else base), io.StringIO(), 0
        sys.argv = [str(TUNE), "run", RECIPE, "--config", file.stem, "dry_run=true"]
        sys.argv += [f"base_model_path={base}", f"output_dir={folder / 'dry'}"]
        for name, part in (("dataset", "train"), ("eval_dataset", "held_out")):
            sys.argv.append(f"{name}.source={base}/data/{part}.jsonl")
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                runpy.run_path(str(TUNE), run_name="__main__")
            except SystemExit as end:
                code = end.code or 0
        text = output.getvalue().replace(str(folder), "<folder>")
        text = re.sub(r"\d+ CPU cores|(?<=object store )(\S+) of \S+ GiB", r"\1 <machine>", text)
        plan = plans.setdefault(file.stem, {"exit code": [str(code)]})
        for line in text.splitlines():
            if found := re.match(r"([a-z]+(?: [a-z]+)*) {2,}(.*)", line):
                plan[found[1]] = [found[2]]
            elif line[:1] == " ":
                plan[next(reversed(plan))].append(re.sub(" +", " ", line.strip()))
            elif not line.startswith("loading "):
                plan.setdefault("errors", []).append(line)
    (folder / "dry_runs.json").write_text(json.dumps(plans))


if __name__ == "__main__":
    dry_runs(Path(sys.argv[1]))
