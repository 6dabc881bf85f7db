"""A reward model for tests: random weights over the tiny policy's tokens."""


def random_classifier(folder, tiny_policy):
    """Save a random reward model and the tiny policy's tokenizer in a folder; return the folder."""
    # Here, as every test session imports this file, and few of them need seconds of transformers.
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_labels": 1}
    model = Qwen2ForSequenceClassification(Qwen2Config(vocab_size=384, **shape, **heads))
    for part in (model, AutoTokenizer.from_pretrained(tiny_policy)):
        part.save_pretrained(folder)
    return folder
