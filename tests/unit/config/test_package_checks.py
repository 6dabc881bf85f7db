"""Builds of torchvision, torchaudio and torchcodec that do not fit PyTorch end a run before it."""

import os
import sys

import pytest

from grpo_components.config.package_checks import check_packages
from grpo_components.examples import tiny_policy

NAMES = ("torchvision", "torchaudio", "torchcodec")
NO_NMS = "raise RuntimeError('operator torchvision::nms does not exist')"
NO_LIBRARY = "raise OSError('Could not load this library: ' + '/a/long/folder' * 50)"
NO_FFMPEG = "raise RuntimeError('Could not load libtorchcodec.\\nIs FFmpeg installed?')"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs the three packages: working ones, or with other source."""
    site = tmp_path / "site-packages"

    def install(**sources):
        for name in NAMES:
            (site / name).mkdir(parents=True)
            (site / name / "__init__.py").write_text(sources.get(name, "print('[loaded')\n"))
        monkeypatch.syspath_prepend(site)

    return install


@pytest.fixture
def packages_refused(installed):
    def refused(timeout_s=60.0, **sources):
        installed(**sources)
        with pytest.raises(ValueError) as error:
            check_packages(timeout_s)
        message = str(error.value)
        assert message.startswith("packages: ") and "; allowed: " in message
        assert "\n" not in message and len(message) <= 285
        return message

    return refused


def test_builds_for_another_pytorch_are_named_with_the_command_that_removes_them(packages_refused):
    """What pip installs for the extra `cpu` from an index without CPU builds."""
    sources = {"torchvision": NO_NMS, "torchaudio": NO_LIBRARY, "torchcodec": NO_LIBRARY}
    message = packages_refused(**sources)
    assert "operator torchvision::nms does not exist" in message
    assert "`pip uninstall -y torchvision torchaudio torchcodec`" in message
    assert not {*NAMES} & sys.modules.keys(), "this process imports none of them"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("source", [NO_LIBRARY, "import os; os.abort()", "raise SystemExit(0)"])
def test_only_the_package_that_fails_is_named(packages_refused, name, source):
    assert f"`pip uninstall -y {name}`" in packages_refused(**{name: source})


@pytest.mark.parametrize("sources", [{}, {"torchcodec": NO_FFMPEG}])
def test_working_builds_pass_and_torchcodec_without_ffmpeg_too(installed, sources):
    installed(**sources)
    check_packages(60.0)


def test_an_import_without_end_is_waited_for_so_long(packages_refused):
    hangs = "import threading; threading.Event().wait()"
    assert "timeouts.startup_s" in packages_refused(timeout_s=2.0, torchaudio=hangs)


def test_preflight_refuses_them(installed, cfg, refusal):
    installed(torchvision=NO_NMS)
    assert refusal().startswith("packages: torchvision ")
    assert not os.path.lexists(cfg.output_dir)


def test_the_tiny_policy_is_not_built_with_them(installed, tmp_path, capsys):
    installed(torchvision=NO_NMS)
    assert tiny_policy.main(["--output-dir", str(tmp_path / "new" / "policy"), "--steps=1"]) == 2
    assert capsys.readouterr().err.startswith("packages: torchvision ")
    assert not (tmp_path / "new").exists()
