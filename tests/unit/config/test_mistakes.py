"""Mistakes are refused by the key to change, some with a hint; what goes together is read."""

import re

import pytest
from lib.config_errors import refusal_of

DECAY = "{schedule: linear, start: 0.1, end: 0.01, num_steps: 9}"
LRS = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
OBJECTIVE = "grpo_components.objective"
ROLLOUT = "grpo_components.rollout"
SHORT = {
    "COSINE": f"lr_scheduler={{_component_: {LRS}, num_warmup_steps: 3}}",
    "GSPO": f"loss._component_={OBJECTIVE}.losses.GSPOLoss",
    "TIS": f"off_policy={{_component_: {OBJECTIVE}.off_policy.TokenTIS}}",
    "GYM": "dataset={_component_: grpo_components.environments.gymnasium.gymnasium_dataset, id: a}",
    "LORA": "lora.rank=8 lora.alpha=16",
    "LOW_BIT": "optimizer._component_=torchao.optim.AdamW8bit",
    "OFFLOADING": "enable_activation_offloading=true",
    "SMALL": "groups_per_step=2 group_size=4",
    "TURNS": "colocate=true max_staleness=0 pull_every_m_rollouts=1",
    "GPU": "device=cuda generator.gpu_memory_utilization=0.4",
    "WORKERS": "generator.tensor_parallel_size",
    "PLAIN": "generator.backend=transformers",
    "BIASED": "generator.allow_biased_sampling=true",
    "JUDGE": "rewards.my._component_=grpo_components.rewards.judge.LLMJudge rewards.my.model=m "
    "rewards.my.base_url=http://localhost:1/v1 rewards.my.rubric='{{ response }}'",
    "HUGGING": "model._component_=grpo_components.models.hugging_face",
    "LOSS": "loss._component_",
    "OWN": "rewards.my._component_",
    "WORLD": f"environment={{_component_: {ROLLOUT}.multi_turn.MultiTurnEnvironment, max_turns: 4, "
    f"world: {{_component_: {ROLLOUT}.tools.shipped_tools, tools: [calculator]}}}}",
    "BEST": "eval.samples_per_prompt=7 eval_every_n_steps=2 save_every_n_steps",
}
"""Overrides by the capital words of the tables."""

# key, overrides, `->` what the allowed holds, `!!` what the problem holds
REFUSED = f"""
# wrong type, out of range, unknown
group_size                   group_size=8.0
device                       device=gpu
shuffle                      shuffle=1
output_dir                   output_dir=
eval_only                    eval_only=''
profiler.enabled             profiler.enabled=1
dynamic_sampling             dynamic_sampling=3 -> a section
updates_per_batch            updates_per_batch=65 !! has 64 samples
generator.stop_token_ids     generator.stop_token_ids=[a]
generator                    generator=7
checkpointer.model_type      checkpointer.model_type=QWEN4
checkpointer.model_type      checkpointer.model_type=QWEN3
model                        model=Qwen
model                        model=null
model                        model._component_=null
group_sise                   group_sise=1 -> did you mean group_size? !! unknown key
unlike_any                   unlike_any=1 -> the keys that `tune cat !! unknown key
temperature                  temperature=1 -> did you mean generator.temperature? !! unknown key
generator.top_z              generator.top_z=1 -> did you mean generator.top_p? !! unknown key
generator.unlike             generator.unlike=1 -> max_response_tokens, temp !! unknown key
# names that others have
num_generations              num_generations=4 -> did you mean group_size?
grpo_samples                 grpo_samples=4 -> did you mean group_size?
batch_size                   batch_size=4 -> did you mean groups_per_step?
num_iterations               num_iterations=2 -> did you mean ppo_epochs?
max_completion_length        max_completion_length=9 -> did you mean generator.max_response_tokens?
max_generated_tokens         max_generated_tokens=9 -> did you mean generator.max_response_tokens?
generator.max_tokens         generator.max_tokens=1 -> did you mean generator.max_response_tokens?
beta                         beta=0.1 -> did you mean loss.kl_coeff?
kl_coeff                     kl_coeff=0.1 -> did you mean loss.kl_coeff?
learning_rate                learning_rate=1 -> did you mean optimizer.lr?
lr                           lr=1 -> did you mean optimizer.lr?
generator.temperatures  generator.temperatures=1 -> you mean generator.temperature? !! unknown key
timeouts.startup_z           timeouts.startup_z=null -> you mean timeouts.startup_s? !! unknown key
seed                         seed=${{nothing}}
dataset.source               dataset.source=${{dataset.${{device}}}}
# schedules
loss.kl_coeff.schedule       loss.kl_coeff={DECAY} loss.kl_coeff.schedule=sudden
loss.kl_coeff.end            loss.kl_coeff={DECAY} loss.kl_coeff.schedule=constant
loss.kl_coeff.stop           loss.kl_coeff={DECAY} loss.kl_coeff.stop=1
loss.kl_coeff.schedule       loss.kl_coeff={DECAY} ~loss.kl_coeff.schedule
loss.kl_coeff.end            loss.kl_coeff={DECAY} ~loss.kl_coeff.end
# asynchrony, weights, turns
push_every_n_steps           push_every_n_steps=4
push_every_n_steps           max_staleness=0 push_every_n_steps=2
min_generators               min_generators=2
replay_generation.share      replay_generation.share=0.1
replay_generation.share      replay_generation.share=0.5 groups_per_step=1
replay_generation            replay_generation.max_uses=3 max_staleness=0 pull_every_m_rollouts=1
rollout_only                 replay_generation.max_uses=3 rollout_only=true
device                       weights=nccl
train_from                   weights=nccl device=cuda train_from=groups.jsonl
weights                      weights=nccl device=cuda gpus_per_trainer=0.5 gpus_per_generator=0.5
colocate                     weights=nccl TURNS GPU
push                         push=delta weights=nccl
max_staleness                TURNS max_staleness=1
pull_every_m_rollouts        TURNS pull_every_m_rollouts=2
num_trainers                 TURNS num_trainers=2
num_trainers                 TURNS generator.tensor_parallel_size=2
eval_only                    TURNS eval_only=true
gpus_per_generator           TURNS GPU gpus_per_generator=0.5
generator.kv_cache_gib       TURNS GPU generator.kv_cache_gib=null
gpus_per_trainer             TURNS GPU gpus_per_trainer=0.8 num_trainers=2 WORKERS=2
# batch, objective
updates_per_batch            num_trainers=2 updates_per_batch=33
tokens_per_micro_batch       tokens_per_micro_batch=95
num_references               loss.kl_coeff=0.1 num_references=0
num_references               reward_shaping.kl_coeff=0.1 num_references=0
reward_shaping.overlong_tokens  reward_shaping.overlong_tokens=33
advantages.kl_coeff          advantages.kl_coeff=x
advantages.kl_coeff.start    advantages.kl_coeff={{schedule: linear}}
lr_scheduler                 optimizer.lr={DECAY} COSINE
off_policy                   LOSS={OBJECTIVE}.losses.DecoupledPPOLoss TIS
loss.dual_clip               loss.dual_clip=3.0
loss.kl_estimator            GSPO loss.kl_estimator=k4
user                         user=3
# trainer, adapters, teacher
tensor_parallel_dim          SMALL num_trainers=3 tensor_parallel_dim=2
data_parallel_replicate_dim SMALL num_trainers=4 tensor_parallel_dim=2 data_parallel_replicate_dim=4
num_trainers                 SMALL num_trainers=9
tensor_parallel_dim          num_trainers=2 tensor_parallel_dim=2 checkpointer.model_type=GEMMA
compile                      num_trainers=2 tensor_parallel_dim=2 compile=true
enable_activation_offloading  device=cuda OFFLOADING
optimizer                    LOW_BIT optimizer.eps=null
optimizer                    device=cuda optimizer._component_=torchao.optim.CPUOffloadOptimizer
lora.alpha                   lora.rank=8
lora.target_modules          LORA lora.target_modules=[qkv]
lora.target_modules          LORA lora.target_modules=q_proj -> a valid list
lora.target_modules          LORA lora.target_modules=[q_proj,o_proj] checkpointer.model_type=PHI4
weights                      LORA weights=nccl
tensor_parallel_dim          LORA tensor_parallel_dim=2 num_trainers=2
generator.backend            generator.backend=onnx -> 'vllm' or 'transformers'
generator.tensor_parallel_size  PLAIN WORKERS=2 -> 1, or generator.backend: vllm
generator.top_k              PLAIN BIASED generator.top_k=5 -> generator.backend: vllm
weights                      PLAIN device=cuda weights=nccl -> 'object_store'
lora                         PLAIN LORA -> null
reward_shaping.kl_coeff      LORA reward_shaping.kl_coeff=0.1
teacher.path                 teacher.coeff=1
# sampling, lengths
generator.top_p              generator.top_p=0.9
generator.repetition_penalty  generator.repetition_penalty=1.1
generator.max_model_len      generator.max_model_len=95
environment.max_turns        environment.max_turns=33
# data, rewards, evaluation, records
curriculum.low               curriculum.low=0.9
shuffle                      curriculum.low=0.1 shuffle=false
train_from                   curriculum.low=0.1 train_from=a.jsonl
rewards                      rewards=null
rewards                      rewards.correctness=null
rewards                      rewards.correctness.is_success=false
rewards.correctness.is_success  rewards.correctness.is_success=1
rewards                      rewards.other={{_component_: a.B, is_success: true}}
rewards.reward_model         rewards.reward_model={{_component_: a.B}} reward_model.path=/a/model
eval_only                    eval_dataset=null eval_only=true
keep_best                    eval_dataset=null keep_best=eval/success_rate
keep_best                    keep_best=loss/total
keep_best                    BEST=4 keep_best=eval/pass_at_8
save_every_n_steps           BEST=5 keep_best=eval/reward_mean
log_token_logprobs           log_token_logprobs=true rollouts_logged_per_step=0
"""

# What is found only with files and components.
REFUSED_LATER = """
# files, folders and half runs
resume_from_checkpoint       resume_from_checkpoint=true
output_dir                   output_dir=.
output_dir                   output_dir=${base_model_path}
output_dir                   output_dir=${base_model_path}/config.json/run
checkpointer._component_     checkpointer._component_=torchtune.training.FullModelMetaCheckpointer
checkpointer.checkpoint_dir  checkpointer.checkpoint_dir=/tmp
base_model_path              base_model_path=/nowhere/tiny_policy
checkpointer.checkpoint_files  checkpointer.checkpoint_files=[no.safetensors]
tokenizer.path               tokenizer.path=/no/vocab.json
tokenizer.special_tokens_path  tokenizer.special_tokens_path=/no/tokenizer.json
dataset.source               dataset.source=/no/train.jsonl
dataset.source               dataset.source=${base_model_path}
dataset.source               dataset.source=rows.jsonl.gz
dataset.source               dataset.source=folder.jsonl
reward_model.path            reward_model.path=/nowhere/classifier
teacher.path                 teacher.path=/nowhere/Qwen2.5-7B
rollout_only                 eval_only=true rollout_only=true
resume_from_checkpoint       rollout_only=true resume_from_checkpoint=/a
eval_only                    eval_only=/nowhere
train_from                   train_from=/nowhere/trajectories.jsonl
keep_best                    train_from=/nowhere.jsonl keep_best=eval/reward_mean
reward_model.path            train_from=/nowhere.jsonl reward_model.path=/a/model
# components and their arguments
loss._component_  LOSS=own_parts.Goood -> did you mean own_parts.Good? !! own_parts.py has no Goood
loss._component_  LOSS=own_part.Good -> did you mean own_parts.Good? !! No module named 'own_part'
model._component_  model._component_=torchtune.models.qwen -> torchtune.models.qwen2? !! 'torchtune
loss._component_  LOSS=nothing_like_it.X -> a dotted path !! No module named
loss._component_  LOSS=own_broken.X -> a dotted path !! own_broken.py:2
loss._component_  LOSS=own_lacking.X -> a dotted path !! own_lacking.py:2
loss._component_  LOSS=own_parts.number -> a class or function !! cannot be called
rewards.my._component_  OWN=own_parts.of_trl -> prompt_text, response_text, !! takes completions
rewards.my._component_  OWN=own_parts.judge -> a function that makes one !! takes prompt_text
loss.kl_coeff     LOSS=own_parts.Takes ~loss.clip_low ~loss.clip_high
loss.epsilon                 loss.epsilon=0.2 -> did you mean loss.clip_low?
eval_dataset.path            eval_dataset.path=own.jsonl -> did you mean eval_dataset.source?
loss.unlike                  loss.unlike=0.2 -> clip_low, clip_high, kl_coeff
loss.my_coeff                loss.my_coeff=1 -> user.my_coeff, passed by `partial`
loss.epsilon                 GSPO loss.epsilon=3.0
model.num_layer              model.num_layer=4 -> model.num_layers?
model.max_seq_len            HUGGING model.path=${base_model_path} -> path
dataset.src                  dataset.src=x -> source
dataset.max_promt_tokens  GYM ~dataset.source dataset.max_promt_tokens=9 -> max_prompt_tokens?
dataset.source               GYM dataset.source=x
lr_scheduler.step_size       lr_scheduler={_component_: torch.optim.lr_scheduler.StepLR}
checkpointer                 checkpointer=null -> `_component_` and its arguments
optimizer                    optimizer=null -> `_component_` and its arguments !! null given
checkpointer.checkpoint_files  checkpointer.checkpoint_files=a.bin -> [a.bin]
profiler.steps               profiler.enabled=true profiler.steps=3 -> active_steps
rewards.correctness.weights  rewards.correctness.weights=1 -> correctness.weight?
rewards.correctness.answer_format  rewards.correctness.answer_format=xml -> tag
rewards.my.limit             rewards.my._component_=own_parts.Good
rewards.my.wall_s  OWN=grpo_components.rewards.code_tests.CodeTests timeouts.reward_s=8
rewards.my.wall_s            JUDGE rewards.my.wall_s=10
rewards.my.api_key_env       JUDGE rewards.my.api_key_env=NONE_X
environment.max_turns        WORLD environment.max_turns=0
environment.num_slots        WORLD environment.num_slots=3
environment.world            WORLD ~environment.world
environment.world.tool       WORLD environment.world.tool=[]
environment.world.tools      WORLD environment.world.tools=[browser]
environment.world._component_  WORLD environment.world._component_=my_worlds.Nowhere
"""

ACCEPTED = f"""
min_generators=2 num_generators=2
pull_every_m_rollouts=1000 push_every_n_steps=3 push=delta
weights=object_store train_from=groups.jsonl
weights=nccl device=cuda num_generators=2 num_trainers=6
TURNS
TURNS num_generators=2 num_trainers=8 generator.tensor_parallel_size=4
TURNS loss.kl_coeff=0.1 stale_groups=wait dynamic_sampling.enabled=true
loss.kl_coeff=0 num_references=0
num_trainers=2 updates_per_batch=32
tokens_per_micro_batch=96
reward_shaping.overlong_tokens=32 loss.kl_coeff={DECAY}
optimizer.lr={DECAY} TIS
COSINE
off_policy={{_component_: {OBJECTIVE}.off_policy.OffPolicySequenceMask}}
SMALL num_trainers=4 tensor_parallel_dim=2 data_parallel_replicate_dim=2
SMALL num_trainers=6 tensor_parallel_dim=3 data_parallel_replicate_dim=2
SMALL num_trainers=16 tensor_parallel_dim=2
compile=true
LOW_BIT optimizer.eps=1e-5
device=cuda dtype=bf16 reduce_dtype=bf16
device=cuda OFFLOADING enable_activation_checkpointing=true fsdp_cpu_offload=true
SMALL num_trainers=2 tensor_parallel_dim=2 checkpointer.model_type=LLAMA3_2
SMALL num_trainers=2 data_parallel_replicate_dim=2 checkpointer.model_type=GEMMA
LORA loss.kl_coeff=0.1
teacher.path=/a teacher.coeff=0.1
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


def is_refused(checked, row):
    given, allowed, problem = re.fullmatch(r"(.*?)(?: -> (.*?))?(?: !! (.*))?", row).groups("")
    key, overrides = given.split(maxsplit=1)
    error = refusal_of(checked, spelled(overrides))
    assert error.key.replace(", ", ",") == key
    assert allowed in error.allowed and problem in error.problem


@pytest.mark.parametrize("row", rows(REFUSED))
def test_what_is_refused_by_its_key(read, row):
    is_refused(read, row)


@pytest.mark.parametrize("row", rows(REFUSED_LATER))
def test_what_is_refused_with_files_and_components(check, own, row):
    is_refused(check, row)


@pytest.mark.parametrize("row", rows(ACCEPTED))
def test_what_is_accepted(read, row):
    assert read(spelled(row)).evaluates == ("eval_dataset" not in row and "train_from" not in row)
