"""Real vLLM engines of tiny random models, for the tests of what runs in them."""

import gc
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, Qwen2Config, Qwen2ForCausalLM

from grpo_components.rollout.generator_options import EngineOptions, EnvironmentOptions
from grpo_components.settings import GeneratorSettings


@pytest.fixture(scope="module")
def build_engine(engine_variables):
    """Builds an engine; who builds it closes it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from grpo_components.rollout.engine import open_engine

    # vLLM collects garbage several times around each engine: 0.4 s each over all that is imported.
    gc.collect()
    gc.freeze()
    patched = pytest.MonkeyPatch()
    for name in ("freeze", "unfreeze"):  # what is imported stays frozen, engines are collected
        patched.setattr(gc, name, lambda: None)

    def build(path, schedule=None, workers=1, max_num_seqs=64, backend="vllm", **options):
        settings = GeneratorSettings(
            backend=backend,
            max_response_tokens=256,
            temperature=1.0,
            max_model_len=512,
            max_num_seqs=max_num_seqs,
            kv_cache_gib=1,
            tensor_parallel_size=workers,
        )
        options = EngineOptions(
            model_path=str(path),
            device="cpu",
            **{"dtype": "fp32", "recompute_kv_after_pull": False, **options},
        )
        return open_engine(settings, options, seed=0, schedule=schedule)

    yield build
    patched.undo()


@pytest.fixture
def make_generator(engine_variables, monkeypatch):
    """Builds generators over stand-ins of engine and rewards; closes them after the test."""
    from grpo_components.rollout import generator

    made = []

    def make(build_environment, *, engine, pool, tokenizer, size=8, in_flight=2, **environment):
        monkeypatch.setattr(generator, "open_engine", lambda *args, **kwargs: engine)
        options = {"timeout_s": 60, "build_environment": build_environment} | environment
        made.append(
            generator.Generator(
                build_tokenizer=tokenizer,
                settings=GeneratorSettings(
                    max_response_tokens=size,
                    temperature=1.0,
                    stop_token_ids=[0],
                    top_k=7,
                    allow_biased_sampling=True,
                ),
                engine=None,  # the stand-in reads no options
                group_size=3,
                seed=42,
                environment=EnvironmentOptions(**options),
                open_rewards=lambda: pool,
                rollouts_in_flight=in_flight,
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def make_engine(build_engine):
    """Builds engines and closes them after the test.

    Share none between tests: the end of one takes vLLM's process groups from all others.
    """
    engines = []

    def make(*args, **kwargs):
        engines.append(build_engine(*args, **kwargs))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders of random models: heads tied, redundantly tied or untied, and experts with sinks."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512}
    experts = {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    for seed, name in enumerate("AB"):
        for kind in ("tied", "untied"):
            torch.manual_seed(seed)
            tied = {"tie_word_embeddings": kind == "tied", "initializer_range": 0.2}
            config = Qwen2Config(**sizes, intermediate_size=96, **tied)
            Qwen2ForCausalLM(config).save_pretrained(folder / f"{kind}_{name}")
        torch.manual_seed(seed)
        model = GptOssForCausalLM(GptOssConfig(**sizes, intermediate_size=64, **experts))
        for parameter in model.parameters():  # also sinks and biases, which are 0
            torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder / f"experts_{name}")
    # Some tools write a tied head again, as a copy of the embedding.
    shutil.copytree(folder / "tied_A", folder / "redundant_A")
    tensors = load_file(folder / "tied_A" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "redundant_A" / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def force_cuda_defaults(build_engine, monkeypatch):
    """Engines built from now on schedule asynchronously, and may read prompts in parts.

    vLLM does both by default on CUDA and switches the first off on a CPU. The model runner, its
    kernels and the missing graphs stay the CPU's.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def force(batched_tokens=None):
        def check_and_force(vllm_config):
            check(vllm_config)
            scheduling = vllm_config.scheduler_config
            scheduling.async_scheduling = True
            if batched_tokens:
                scheduling.enable_chunked_prefill = True
                scheduling.max_num_batched_tokens = batched_tokens

        patched = staticmethod(check_and_force)
        monkeypatch.setattr(CpuPlatform, "check_and_update_config", patched)

    return force
