"""What our engine uses of vLLM's internals is there in the installed vLLM, under these names.

Some of it is set, or read with a default: after a rename, nothing else would fail there.
"""

import ast
import inspect
import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

import grpo_components.rollout

RELOAD = "vllm.model_executor.model_loader.reload"
MOE = "vllm.model_executor.layers.fused_moe"
OF_WORKER = (
    "device model_runner vllm_config weight_transfer_engine "
    "init_weight_transfer_engine shutdown_weight_transfer_engine"
)
USED = {
    "vllm_backend": {
        "vllm.v1.engine.llm_engine:LLMEngine": "engine_core",
        "vllm.v1.engine.core_client:InprocClient": "engine_core",
        "vllm.v1.engine.core:EngineCore": (
            "model_executor scheduler batch_queue pause_scheduler resume_scheduler"
        ),
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor": (
            "workers rpc_broadcast_mq shutting_down"
        ),
        "vllm.v1.executor.multiproc_executor:WorkerProcHandle": "proc",
        "vllm.distributed.device_communicators.shm_broadcast:MessageQueue": "buffer",
        "vllm.distributed.device_communicators.shm_broadcast:ShmRingBuffer": "is_creator",
        "vllm.v1.core.sched.scheduler:Scheduler": "requests kv_cache_manager",
        "vllm.v1.core.kv_cache_manager:KVCacheManager": "block_pool evict_blocks",
        "vllm.v1.core.block_pool:BlockPool": "blocks cached_block_hash_to_block",
        "vllm.v1.core.kv_cache_utils:KVCacheBlock": "block_id block_hash",
        "vllm.v1.request:Request": (
            "request_id num_computed_tokens cache_salt block_hashes update_block_hashes"
        ),
    },
    "vllm_weights": {
        RELOAD: "initialize_layerwise_reload finalize_layerwise_reload",
        f"{RELOAD}.layerwise": "_layerwise_process get_layerwise_info",
        f"{RELOAD}.meta": "materialize_layer",
        f"{RELOAD}.types:LayerReloadingInfo": "kernel_tensors load_numel can_load",
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor": "collective_rpc",
        "vllm.v1.worker.cpu_worker:CPUWorker": OF_WORKER,
        "vllm.v1.worker.gpu_worker:Worker": OF_WORKER,
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner": "vllm_config model_config get_model",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "vllm_config model_config get_model",
        "vllm.model_executor.models.qwen2:Qwen2ForCausalLM": "compute_logits load_weights",
        "vllm.model_executor.models.gpt_oss": "GptOssRoutedExperts OAIAttention",
        f"{MOE}.routed_experts:RoutedExperts": "quant_method",
        f"{MOE}.fused_moe_method_base:FusedMoEMethodBase": "moe_kernel",
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding": (
            "quant_method"
        ),
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod": (
            "process_weights_after_loading"
        ),
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm": "cpu_linear",
        "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA": "lora_a_stacked lora_b_stacked",
    },
}
"""Our module -> object of vLLM -> its names that we use."""
ROWS = [(ours, theirs, each.split()) for ours, of in USED.items() for theirs, each in of.items()]


def names_in(thing):
    """Names in a module or class, and attributes that its code sets, most of them in `__init__`."""
    names = set(dir(thing))
    for each in getattr(thing, "__mro__", (thing,)):
        if getattr(each, "__module__", "").startswith("vllm."):
            names.update(getattr(each, "__annotations__", ()))
            nodes = ast.walk(ast.parse(inspect.getsource(each)))
            targets = (node for node in nodes if isinstance(node, ast.Attribute))
            of_it = (n for n in targets if ast.unparse(n.value) in ("self", "layer"))
            names.update(n.attr for n in of_it if isinstance(n.ctx, ast.Store))
    return names


@pytest.mark.parametrize(("ours", "theirs", "used"), ROWS, ids=[f"{o}-{t}" for o, t, _ in ROWS])
def test_what_we_use_of_vllms_internals_has_these_names(engine_variables, ours, theirs, used):
    assert not set(used) - names_in(resolve_name(theirs))
    source = Path(grpo_components.rollout.__path__[0], f"{ours}.py").read_text()
    assert not [name for name in used if not re.search(rf"\b{name}\b", source)], "no longer used"
