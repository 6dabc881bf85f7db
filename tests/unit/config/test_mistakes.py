"""Mistakes in values are refused by the key to change; what goes together is read."""

import pytest
from lib.config_errors import refused_key

DECAY = "{schedule: linear, start: 0.1, end: 0.01, num_steps: 9}"
WARM = "generator.temperature={schedule: constant, start: 1.0, warmup_steps: %d}"
LRS = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
OBJECTIVE = "grpo_components.objective"
SHORT = {
    "COSINE": f"lr_scheduler={{_component_: {LRS}, num_warmup_steps: 3}}",
    "GSPO": f"loss._component_={OBJECTIVE}.losses.GSPOLoss",
    "TIS": f"off_policy={{_component_: {OBJECTIVE}.off_policy.TokenTIS}}",
    "MASK": f"off_policy={{_component_: {OBJECTIVE}.off_policy.OffPolicySequenceMask}}",
    "LORA": "lora.rank=8 lora.alpha=16",
    "LOW_BIT": "optimizer._component_=torchao.optim.AdamW8bit",
    "CPU_OFFLOAD": "optimizer._component_=torchao.optim.CPUOffloadOptimizer",
    "OFFLOADING": "enable_activation_offloading=true",
    "CHECKPOINTING": "enable_activation_checkpointing=true",
    "SMALL": "groups_per_step=2 group_size=4",
    "TURNS": "colocate=true max_staleness=0 pull_every_m_rollouts=1",
    "GPU": "device=cuda generator.gpu_memory_utilization=0.4",
    "WORKERS": "generator.tensor_parallel_size",
    "REPLICAS": "data_parallel_replicate_dim",
    "BIASED": "generator.allow_biased_sampling=true",
    "BEST": "eval.samples_per_prompt=7 eval_every_n_steps=2 save_every_n_steps",
}
"""Overrides by the capital words of the tables."""

REFUSED = f"""
# wrong type, out of range, unknown
group_size                   group_size=8.0
group_size                   group_size=1
device                       device=gpu
shuffle                      shuffle=1
output_dir                   output_dir=
eval_only                    eval_only=''
profiler.enabled             profiler.enabled=1
optimizer.lr                 optimizer.lr=0
optimizer.lr                 optimizer.lr=fast
loss.clip_low                loss.clip_low=1.5
generator.stop_token_ids     generator.stop_token_ids=[a]
generator                    generator=7
eval.temperature             eval.temperature=1e-5
timeouts.rollout_s           timeouts.rollout_s=soon
checkpointer.model_type      checkpointer.model_type=QWEN4
checkpointer.model_type      checkpointer.model_type=QWEN3
model                        model=Qwen
max_stalenes                 max_stalenes=2
packing                      packing=true
# asynchrony, weights, turns
push_every_n_steps           push_every_n_steps=4
push_every_n_steps           max_staleness=0 push_every_n_steps=2
min_generators               min_generators=2
replay_generation.share      replay_generation.share=0.1
replay_generation.share      replay_generation.share=0.5 groups_per_step=1
replay_generation            replay_generation.max_uses=3 max_staleness=0 pull_every_m_rollouts=1
replay_generation            replay_generation.max_uses=3 rollout_only=true
replay_generation            replay_generation.max_uses=3 train_from=a.jsonl
weights                      weights=nccl
weights                      weights=nccl device=cuda train_from=groups.jsonl
weights                      weights=nccl device=cuda gpus_per_trainer=0.5 gpus_per_generator=0.5
weights                      weights=nccl TURNS GPU
push                         push=delta weights=nccl
max_staleness                TURNS max_staleness=1
pull_every_m_rollouts        TURNS pull_every_m_rollouts=2
num_trainers                 TURNS num_trainers=2
num_trainers                 TURNS generator.tensor_parallel_size=2
colocate                     TURNS eval_only=true
colocate                     TURNS rollout_only=true
colocate                     TURNS train_from=/tmp/trajectories.jsonl
gpus_per_generator           TURNS GPU gpus_per_generator=0.5
generator.kv_cache_gib       TURNS GPU generator.kv_cache_gib=null
gpus_per_trainer             TURNS GPU gpus_per_trainer=0.8 num_trainers=2 WORKERS=2
# batch, objective
num_trainers                 num_trainers=2 updates_per_batch=33
tokens_per_micro_batch       tokens_per_micro_batch=95
num_references               loss.kl_coeff=0.1 num_references=0
num_references               num_references=0 loss.kl_coeff={DECAY}
num_references               reward_shaping.kl_coeff=0.1 num_references=0
reward_shaping.overlong_tokens  reward_shaping.overlong_tokens=33
advantages.kl_coeff          advantages.kl_coeff=x
advantages.kl_coeff.start    advantages.kl_coeff={{schedule: linear}}
lr_scheduler                 optimizer.lr={DECAY} COSINE
off_policy                   loss={OBJECTIVE}.losses.DecoupledPPOLoss TIS
loss.dual_clip               loss.dual_clip=3.0
loss.kl_estimator            GSPO loss.kl_estimator=k4
loss.entropy_coeff           loss.entropy_coeff=-1
user                         user=3
# trainer, adapters, teacher
tensor_parallel_dim          SMALL num_trainers=3 tensor_parallel_dim=2
data_parallel_replicate_dim  SMALL num_trainers=4 tensor_parallel_dim=2 REPLICAS=4
num_trainers                 SMALL num_trainers=9
tensor_parallel_dim          num_trainers=2 tensor_parallel_dim=2 checkpointer.model_type=GEMMA
compile                      num_trainers=2 tensor_parallel_dim=2 compile=true
dtype                        dtype=bf16
reduce_dtype                 reduce_dtype=bf16
enable_activation_offloading  OFFLOADING CHECKPOINTING
enable_activation_offloading  device=cuda OFFLOADING
fsdp_cpu_offload             fsdp_cpu_offload=true
optimizer                    LOW_BIT optimizer.eps=null
optimizer                    device=cuda CPU_OFFLOAD
lora.alpha                   lora.rank=8
lora.target_modules          LORA lora.target_modules=[qkv]
lora.target_modules          LORA lora.target_modules=[q_proj,q_proj]
lora.target_modules          LORA lora.target_modules=[q_proj,o_proj] checkpointer.model_type=PHI4
weights                      LORA weights=nccl
tensor_parallel_dim          LORA tensor_parallel_dim=2 num_trainers=2
reward_shaping.kl_coeff      LORA reward_shaping.kl_coeff=0.1
teacher.path                 teacher.coeff=1
# sampling, lengths
generator.top_p              generator.top_p=0.9
generator.top_k              generator.top_k=50
generator.repetition_penalty  generator.repetition_penalty=1.1
generator.temperature.warmup_steps  {WARM % 101}
generator.max_model_len      generator.max_model_len=95
environment.max_turns        environment.max_turns=33
# data, rewards, evaluation, records
curriculum.low               curriculum.low=0.9
shuffle                      curriculum.low=0.1 shuffle=false
curriculum                   curriculum.low=0.1 train_from=a.jsonl
rewards                      rewards.correctness=null
rewards                      rewards.correctness.is_success=false
rewards                      rewards.other={{_component_: a.B, is_success: true}}
rewards.reward_model         rewards.reward_model={{_component_: a.B}} reward_model.path=/a/model
eval_only                    eval_dataset=null eval_only=true
eval_only                    eval_dataset._component_=null eval_only=true
keep_best                    eval_dataset=null keep_best=eval/success_rate
keep_best                    eval_dataset._component_=null keep_best=eval/success_rate
keep_best                    keep_best=loss/total
keep_best                    BEST=4 keep_best=eval/pass_at_8
save_every_n_steps           BEST=5 keep_best=eval/reward_mean
log_token_logprobs           log_token_logprobs=true rollouts_logged_per_step=0
"""

ACCEPTED = f"""
min_generators=2 num_generators=2
pull_every_m_rollouts=1000 push_every_n_steps=3 push=delta
weights=object_store train_from=groups.jsonl
weights=nccl device=cuda num_generators=2 num_trainers=6
TURNS
TURNS num_generators=2 num_trainers=2
TURNS num_generators=2 num_trainers=8 generator.tensor_parallel_size=4
TURNS loss.kl_coeff=0.1 stale_groups=wait dynamic_sampling.enabled=true
loss.kl_coeff=0 num_references=0
num_trainers=2 updates_per_batch=32
num_trainers=4 tensor_parallel_dim=2 data_parallel_replicate_dim=2
tokens_per_micro_batch=96
reward_shaping.overlong_tokens=32 loss.kl_coeff={DECAY}
optimizer.lr={DECAY} TIS
COSINE
MASK
SMALL num_trainers=4 tensor_parallel_dim=2 data_parallel_replicate_dim=2
SMALL num_trainers=6 tensor_parallel_dim=3 data_parallel_replicate_dim=2
SMALL num_trainers=8 data_parallel_replicate_dim=8
SMALL num_trainers=16 tensor_parallel_dim=2
compile=true
LOW_BIT optimizer.eps=1e-5
device=cuda dtype=bf16 reduce_dtype=bf16
device=cuda OFFLOADING CHECKPOINTING fsdp_cpu_offload=true
SMALL num_trainers=2 tensor_parallel_dim=2 checkpointer.model_type=LLAMA3_2
SMALL num_trainers=2 data_parallel_replicate_dim=2 checkpointer.model_type=GEMMA
LORA
LORA loss.kl_coeff=0.1
teacher.path=/a teacher.coeff=0.1
{WARM % 100}
generator.max_model_len=96
generator.max_response_tokens=448 tokens_per_micro_batch=512
generator.stop_token_ids=[1,2]
generator.top_k=-1 generator.top_p=1 generator.repetition_penalty=1.0
generator.top_p=0.9 generator.top_k=50 BIASED
eval_dataset=null rollout_only=true
eval_dataset._component_=null rollout_only=true
BEST=5
BEST=4 keep_best=eval/success_rate
BEST=4 keep_best=eval/pass_at_4
"""


def rows(table):
    return [line for line in table.splitlines() if line and line[0] != "#"]


def spelled(overrides):
    for word, meaning in SHORT.items():
        overrides = overrides.replace(word, meaning)
    return overrides


@pytest.mark.parametrize("row", rows(REFUSED))
def test_what_is_refused_by_its_key(read, row):
    key, overrides = row.split(maxsplit=1)
    assert refused_key(read, spelled(overrides)) == key


@pytest.mark.parametrize("row", rows(ACCEPTED))
def test_what_is_accepted(read, row):
    assert read(spelled(row)).evaluates == ("eval_dataset" not in row and "train_from" not in row)
