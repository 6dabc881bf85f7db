"""Qwen3 computes what transformers computes, in the sizes that its model cards state."""

import numpy as np
import pytest
import torch
from equivalence.families import FAMILIES, random_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torchtune.data import Message
from torchtune.models.qwen2_5 import qwen2_5_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from grpo_components.models import qwen3
from grpo_components.models.qwen3_weights import Qwen3Checkpointer
from grpo_tools.memory_plan.model_sizes import ModelSizes

CARDS = {  # as the model cards state them: all parameters, and those that are not embeddings
    "qwen3_0_6b": ("0.6", "0.44"),
    "qwen3_1_7b": ("1.7", "1.4"),
    "qwen3_4b": ("4.0", "3.6"),
    "qwen3_8b": ("8.2", "6.95"),
    "qwen3_14b": ("14.8", "13.2"),
    "qwen3_32b": ("32.8", "31.2"),
}
TEXTS = [
    "Assistant: <think>3 + 4</think> 7<|im_end|>",
    "<tool_call>\n{}\n</tool_call>",
    "<tool_response>\n7\n</tool_response>",
    "a <thinking> b < think > c",
]


@pytest.fixture(params=["QWEN3 (tied)", "QWEN3 (untied)"], scope="module")
def checkpoint(request, tmp_path_factory):
    """A random model whose heads are together twice as wide as its hidden state."""
    family = FAMILIES[request.param]
    return family, random_checkpoint(family, tmp_path_factory.mktemp("qwen3"), seed=3)


def load(family, folder):
    model = family.build_model()
    reader = Qwen3Checkpointer(str(folder), ["model.safetensors"], "QWEN3", "unused")
    model.load_state_dict(reader.load_checkpoint()["model"])
    return model.eval()


@torch.inference_mode()
def test_logits_are_those_of_transformers(checkpoint):
    model = load(*checkpoint)
    attention = model.layers[0].attn
    assert attention.num_heads * attention.head_dim == 2 * model.tok_embeddings.embedding_dim
    ids = torch.randint(0, 256, (3, 50), generator=torch.Generator().manual_seed(0))
    expected = AutoModelForCausalLM.from_pretrained(checkpoint[1])(ids).logits
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_decoding_with_a_cache_is_one_forward_pass(checkpoint):
    model, ids = load(*checkpoint), torch.arange(20)[None] * 7
    expected = model(ids)
    model.setup_caches(batch_size=1, dtype=torch.float32, decoder_max_seq_len=32)
    sees = torch.ones(20, 32).tril().bool()[None]
    first = model(ids[:, :15], mask=sees[:, :15], input_pos=torch.arange(15)[None])
    rest = [
        model(ids[:, [place]], mask=sees[:, [place]], input_pos=torch.tensor([[place]]))
        for place in range(15, 20)
    ]
    torch.testing.assert_close(torch.cat([first, *rest], dim=1), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CARDS)
def test_a_builder_has_the_parameters_of_the_model_card(name):
    sizes = ModelSizes.of(getattr(qwen3, name))
    matrices = len(sizes.units) - sizes.num_layers - 1  # the units beside layers and last norm
    others = sizes.parameters - matrices * sizes.vocabulary * sizes.dim
    for found, stated in zip((sizes.parameters, others), CARDS[name], strict=True):
        decimals = len(stated.partition(".")[2])
        assert f"{found / 1e9:.{decimals}f}" == stated
    assert (sizes.num_kv_heads, sizes.head_dim) == (8, 128)
    assert sizes.kv_bytes_per_token("bf16") == 2 * sizes.num_layers * 8 * 128 * 2


def test_numbered_files_are_read_without_a_stored_copy_of_the_tied_head(tmp_path):
    family = FAMILIES["QWEN3 (tied)"]
    random_checkpoint(family, tmp_path, seed=0)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    weights = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    assert "lm_head.weight" in weights
    for number, part in enumerate((list(weights)[::2], list(weights)[1::2]), start=1):
        tensors = {name: weights[name] for name in part}
        torch.save(tensors, tmp_path / f"part-{number:05d}-of-00002.bin")
    files = {"filename_format": "part-{}-of-{}.bin", "max_filename": "00002"}
    read = Qwen3Checkpointer(str(tmp_path), files, "QWEN3", "unused").load_checkpoint()["model"]
    expected = load(family, tmp_path).state_dict()
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_another_model_is_refused_by_key_and_tensor(tmp_path):
    random_checkpoint(FAMILIES["QWEN2 (untied)"], tmp_path, seed=0)
    read = Qwen3Checkpointer(str(tmp_path), ["model.safetensors"], "QWEN3", "unused")
    with pytest.raises(ValueError, match=r"^checkpointer\.model_type: QWEN3 .*_proj\.bias"):
        read.load_checkpoint()
    with pytest.raises(ValueError, match=r"^checkpointer\.model_type: QWEN2 given"):
        Qwen3Checkpointer(str(tmp_path), ["model.safetensors"], "QWEN2", "unused")


# ---- tokenizer ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files as Qwen3 has them, of a small vocabulary."""
    folder = tmp_path_factory.mktemp("tokenizer")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet, vocab_size=256))
    bpe.model.save(str(folder))
    for name in qwen3._SPECIAL_TOKENS:  # Qwen3 marks those of tools and thoughts as not special
        bpe.add_tokens([name]) if name[1] != "|" else bpe.add_special_tokens([name])
    PreTrainedTokenizerFast(tokenizer_object=bpe).save_pretrained(folder)
    return folder


def build(files, builder=qwen3.qwen3_tokenizer, **options):
    return builder(str(files / "vocab.json"), str(files / "merges.txt"), **options)


def test_ids_are_those_of_transformers(files):
    tokenizer = build(files, special_tokens_path=str(files / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast.from_pretrained(files)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_bos=False, add_eos=False)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text


def test_thoughts_are_one_token_without_tokenizer_json(files):
    tokenizer = build(files)
    ids = tokenizer.encode(TEXTS[0], add_bos=False, add_eos=False)
    assert [i for i in ids if i > 256] == [151667, 151668, 151645]
    assert tokenizer.decode(ids) == TEXTS[0]
    assert set(tokenizer.stop_tokens) == {151643, 151645}
    with pytest.raises(TypeError):  # torchtune's own has no text for the ids that Qwen3 samples
        build(files, qwen2_5_tokenizer).decode(ids)


def test_a_chat_is_framed_as_by_qwen3s_template(files):
    tokenizer = build(files)
    messages = [Message(role="system", content="Be brief."), Message(role="user", content="3+4?")]
    ids, _ = tokenizer.tokenize_messages(messages, add_eos=False)
    framed = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n3+4?<|im_end|>\n"
    assert tokenizer.decode(ids) == framed
    styled = build(files, prompt_template={"user": ("Q: ", "\n")}, max_seq_len=9)
    ids, _ = styled.tokenize_messages(messages[1:], add_eos=False)
    assert len(ids) == 9 and "Q: " in styled.decode(np.array(ids).tolist())
