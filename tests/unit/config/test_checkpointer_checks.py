"""A checkpointer that a trainer could not read the base model with is refused by its key."""

import pytest
from omegaconf import OmegaConf

from grpo_components.config.checkpointer_checks import checkpoint_files

HF = "torchtune.training.FullModelHFCheckpointer"
QWEN3 = "grpo_components.models.qwen3_weights.Qwen3Checkpointer"
NODE = {
    "_component_": HF,
    "checkpoint_files": ["a.safetensors", "b.safetensors"],
    "model_type": "QWEN2",
}


def files(base, **change):
    return checkpoint_files(OmegaConf.create(NODE | change), base, "/run")


def test_files_are_named_or_numbered(tmp_path):
    named = files(tmp_path)
    assert named == [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    numbered = {"filename_format": "model-{}-of-{}.safetensors", "max_filename": "00002"}
    names = [path.name for path in files(tmp_path, checkpoint_files=numbered)]
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    files(tmp_path, _component_="my_checkpointers.Mine")
    files(tmp_path, _component_="my_checkpointers.Mine", model_type="QWEN3")
    assert files(tmp_path, _component_=QWEN3, model_type="QWEN3") == named


@pytest.mark.parametrize(
    ("change", "key"),
    [
        *(
            ({"_component_": f"torchtune.training.{name}"}, "checkpointer._component_")
            for name in ("FullModelMetaCheckpointer", "FullModelTorchTuneCheckpointer")
        ),
        ({"model_type": "QWEN3"}, "checkpointer._component_"),
        ({"_component_": QWEN3}, "checkpointer.model_type"),
        ({"should_load_recipe_state": True}, "checkpointer.should_load_recipe_state"),
        ({"resume_from_checkpoint": True}, "checkpointer.resume_from_checkpoint"),
        ({"checkpoint_files": []}, "checkpointer.checkpoint_files"),
        ({"checkpoint_files": "a"}, "checkpointer.checkpoint_files"),
        ({"checkpoint_files": [1]}, "checkpointer.checkpoint_files"),
        ({"checkpoint_files": {}}, "checkpointer.checkpoint_files.max_filename"),
        (
            {"checkpoint_files": {"filename_format": "{}-{}", "max_filename": "9" * 12}},
            "checkpointer.checkpoint_files.max_filename",
        ),
        (
            {"checkpoint_files": {"filename_format": 3, "max_filename": "00002"}},
            "checkpointer.checkpoint_files",
        ),
        ({"output_dir": "/dev/null/x"}, "checkpointer.output_dir"),
    ],
)
def test_what_would_fail_in_the_trainer_is_refused(change, key, tmp_path):
    with pytest.raises(ValueError, match=rf"^{key}: .*; allowed: "):
        files(tmp_path, **change)


def test_a_folder_of_its_own_lies_outside_of_the_base_model(tmp_path):
    with pytest.raises(ValueError, match=r"^checkpointer\.output_dir: "):
        files(tmp_path, output_dir=str(tmp_path / "x"))
