"""A reward model for tests: random weights over the tiny policy's tokens."""

from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

from grpo_components.examples.tiny_policy import DEFAULT_OUTPUT_DIR


def random_classifier(folder):
    """Save one, with its tokenizer, in a new folder; returns that."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_labels": 1}
    model = Qwen2ForSequenceClassification(Qwen2Config(vocab_size=384, **shape, **heads))
    for part in (model, AutoTokenizer.from_pretrained(DEFAULT_OUTPUT_DIR)):
        part.save_pretrained(folder)
    return folder
