"""The unmodified `tune` command knows our recipe, from an editable install and from a wheel."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from lib.chaos import RECIPE
from lib.tracked import tracked

from grpo_components import _plugin, _tune_run

REPOSITORY = Path(__file__).parents[2]
RECIPE_FILE = REPOSITORY / "recipes" / f"{RECIPE}.py"
CONFIGS = {path.stem: path for path in tracked("recipes/configs/*.yaml")}
TINY = "tiny_async_grpo"
COPY_RUNS = "the copy runs"
Command = tuple[str, ...]

# Runs the real `tune` script once per command in one process: loading torchtune takes seconds.
RUN_TUNE_MANY_TIMES = """
import contextlib, io, json, runpy, sys
script, results = sys.argv[1], []
for arguments in json.loads(sys.argv[2]):
    sys.argv, output, code = [script, *arguments], io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stop:
            code = stop.code or 0
    results.append([code, output.getvalue()])
    if not hasattr(sys.modules.get("torchtune"), "__version__"):  # `ls` and `cp` leave out torch
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchtune"]:
            del sys.modules[name]
sys.stdout.write(json.dumps(results))
"""


@dataclass(frozen=True)
class Install:
    """An environment with this project in it."""

    bin: Path

    def tune(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run the `tune` executable as a user does, away from the checkout."""
        return self._run(str(self.bin / "tune"), *arguments, cwd=cwd)

    def tune_each(self, *commands: Command, cwd: Path) -> dict[Command, tuple[int, str]]:
        """Run many `tune` commands; return the exit code and the output of each."""
        python, script = str(self.bin / "python"), str(self.bin / "tune")
        done = self._run(python, "-c", RUN_TUNE_MANY_TIMES, script, json.dumps(commands), cwd=cwd)
        assert done.returncode == 0, done.stderr
        assert "not added to `tune`" not in done.stderr
        results = map(tuple, json.loads(done.stdout))
        return dict(zip(commands, results, strict=True))

    def _run(self, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        hidden = ("PYTHONPATH", "TORCH_DEVICE_BACKEND_AUTOLOAD")
        env = {key: value for key, value in os.environ.items() if key not in hidden}
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = ["pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([sys.executable, "-m", *build, str(REPOSITORY)], check=True)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def editable_install():
    return Install(Path(sys.executable).parent)


@pytest.fixture(scope="module")
def wheel_install(wheel, tmp_path_factory):
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (site_packages,) = venv.glob("lib/python*/site-packages")
    # All but our project comes from the running environment, whose own .pth files do not act here.
    (site_packages / "everything_else.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    pip = ["pip", "--python", str(venv / "bin" / "python"), "install", "-qq", "--no-deps"]
    subprocess.run([sys.executable, "-m", *pip, str(wheel)], check=True)
    return Install(venv / "bin")


@pytest.mark.parametrize("kind", ["editable", "wheel"])
def test_every_command_knows_the_recipe_and_its_configs(kind, request, tmp_path):
    install = request.getfixturevalue(f"{kind}_install")
    by_name = ("run", RECIPE, "--config", TINY, "group_size=1")
    torchrun = ("run", "--nproc_per_node", "2", *by_name[1:])
    good = [("ls",), *(("cp", name, ".") for name in (RECIPE, *CONFIGS))]
    good += [("validate", f"{name}.yaml") for name in CONFIGS]
    good += [("cat", name) for name in CONFIGS]
    answers = install.tune_each(*good, torchrun, by_name, cwd=tmp_path)
    for command in good:
        code, output = answers[command]
        assert code == 0, (command, output)

    assert_lists_the_recipe_with_every_config_tiny_ones_first(answers["ls",][1])
    for file in (RECIPE_FILE, *CONFIGS.values()):
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()
    for name in CONFIGS:
        assert "Config is well-formed!" in answers["validate", f"{name}.yaml"][1]
        assert "max_staleness:" in answers["cat", name][1]
    assert_refused(*answers[by_name], key="group_size")
    code, output = answers[torchrun]  # Ray starts the ranks
    assert_refused(code, output, key="--nproc_per_node")
    assert "num_trainers" in output


def test_cp_overwrites_no_file_that_differs(editable_install, tmp_path):
    (tmp_path / "mine.yaml").write_text("seed: 7\n")
    (tmp_path / f"{TINY}.yaml").write_text("seed: 8\n")
    (tmp_path / "same.py").write_bytes(RECIPE_FILE.read_bytes())
    copies = [("cp", TINY, name) for name in ("mine.yaml", "mine", ".")]
    flags = ("cp", TINY, "mine.yaml", "-n"), ("cp", TINY, "a/b.yaml", "--make-parents")
    again = ("cp", RECIPE, "same.py")
    answers = editable_install.tune_each(*copies, *flags, again, cwd=tmp_path)
    for copy in copies:
        code, output = answers[copy]
        (line,) = output.splitlines()
        assert code == 2 and "exists and differs" in line and "another name, or remove" in line
    assert [answers[command][0] for command in (*flags, again)] == [0, 0, 0]
    assert (tmp_path / "mine.yaml").read_text() == "seed: 7\n"
    assert (tmp_path / "a" / "b.yaml").read_bytes() == CONFIGS[TINY].read_bytes()


def assert_lists_the_recipe_with_every_config_tiny_ones_first(table: str) -> None:
    """Also the proof that the command is torchtune's: Ray installs another one of this name."""
    rows = [line.split() for line in table.splitlines()]
    first = next(i for i, row in enumerate(rows) if row[0] == RECIPE)
    listed = [rows[first][1], *(row[0] for row in rows[first + 1 :])]
    listed = [name for name in listed if name in CONFIGS]  # an editable install has more
    assert listed == sorted(CONFIGS, key=lambda name: (not name.startswith("tiny"), name))
    assert listed[0] == TINY


def test_run_executes_a_copied_recipe_with_a_copied_config(wheel_install, tmp_path):
    main = 'if __name__ == "__main__":'
    recipe = RECIPE_FILE.read_text()
    assert recipe.count(main) == 1
    # A copy that says where components come from answers itself.
    mark = f"sys.path.append('.')\nsys.stderr.write('{COPY_RUNS}\\n')\n"
    (tmp_path / "my_grpo.py").write_text(recipe.replace(main, mark + main))
    # Only the copy names a model that is not there, for which the recipe itself looks.
    missing = "\nbase_model_path: /nowhere/tiny_policy  # was"
    config = CONFIGS[TINY].read_text().replace("\nbase_model_path:", missing)
    (tmp_path / "my_config.yaml").write_text(config)
    for path in ("my_grpo.py", "./my_grpo.py"):
        done = wheel_install.tune("run", path, "--config", "my_config.yaml", cwd=tmp_path)
        assert COPY_RUNS in done.stderr
        assert_refused(done.returncode, done.stderr, key="base_model_path")
        (loading,) = done.stdout.splitlines()
        assert loading.startswith("loading ")


class Registry:
    """A stand-in for torchtune's registry module, which takes seconds to import."""

    Recipe = Config = SimpleNamespace

    def __init__(self, *names: str) -> None:
        self._ALL_RECIPES = [SimpleNamespace(name=name) for name in names]

    def get_all_recipes(self) -> list[SimpleNamespace]:
        return self._ALL_RECIPES


def test_a_recipe_that_is_nowhere_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_grpo.py").touch()
    (tmp_path / "sub").mkdir()
    hints = {"async_grpo_full_finetune_distribted": f"did you mean {RECIPE}?"}
    hints |= dict.fromkeys(("my_gpro.py", "./my_gpro.py"), "did you mean my_grpo.py?")
    hints |= dict.fromkeys(("sub/nothing.py", "/nowhere/at/all.py"), "`tune ls`")
    for given, hint in hints.items():
        with pytest.raises(SystemExit) as end:
            _tune_run.complete(Registry(RECIPE), given)
        (line,) = capsys.readouterr().err.splitlines()
        assert end.value.code == 2 and given in line and line.endswith(hint) == hint.endswith("?")
        assert hint in line and ("; allowed: " in line) != hint.endswith("?")


def test_a_path_is_registered_that_torchtune_cannot_run(tmp_path, monkeypatch):
    here = tmp_path / "here"
    (here / "sub").mkdir(parents=True)
    monkeypatch.chdir(here)
    (here / "recipes").mkdir()
    paths = ["./my_grpo.py", "../here/my_grpo.py", f"{here}/my_grpo.py"]
    paths += ["recipes/mine.py", "my_grpo_v1.2.py"]
    for name in ("my_grpo.py", "sub/mine.py", *paths[3:]):
        (here / name).touch()
    for given in paths:
        registry = Registry(RECIPE)
        _tune_run.complete(registry, given)
        (found,) = registry.get_all_recipes()[1:]
        assert found.name == given and Path(found.file_path) == (here / given).resolve()
    for given in (RECIPE, "my_grpo.py", "my_grpo", "timeit", "sub/mine.py"):
        registry = Registry(RECIPE)
        _tune_run.complete(registry, given)
        assert len(registry.get_all_recipes()) == 1, given


def test_only_commands_that_run_our_recipe_say_that_it_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("from grpo_components.cluster import supervision\n")
    (tmp_path / "theirs.py").write_text("import torch\n")
    theirs = ("theirs.py", "lora_finetune_single_device")
    for recipe in (RECIPE, f"--nproc_per_node 2 {RECIPE}", "mine.py", *theirs):
        command, named = f"tune run {recipe} --config x a=1".split(), recipe.split()[-1]
        assert _tune_run.recipe_argument(command) == named
        assert _tune_run.is_run_of_ours(command) == (recipe not in theirs)
    for other in (f"tune cp {RECIPE} .", "tune run", "tune", f"python run {RECIPE}"):
        assert _tune_run.recipe_argument(other.split()) is None
        assert not _tune_run.is_run_of_ours(other.split())


def test_ctrl_c_while_torch_is_imported_shows_one_line_and_is_not_lost(tmp_path):
    lost = "import signal\ntry: signal.raise_signal(signal.SIGINT)\nexcept BaseException: pass\n"
    (tmp_path / "torchtune.py").write_text(lost)
    program = "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += f"sys.argv = ['tune', 'run', '{RECIPE}']\n"
    program += "from grpo_components import _tune_run\n_tune_run.main()\n"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("loading torch")
    assert (done.stderr, done.returncode) == ("interrupted\n", -signal.SIGINT)


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("pass", 0), ("1 / 0", 1)])
def test_the_end_runs_what_libraries_registered_and_keeps_the_exit_code(tmp_path, end, code):
    package = tmp_path / "torchtune" / "_cli"
    package.mkdir(parents=True)
    command = "import atexit, sys\n\ndef main():\n    atexit.register(print, 'library ended')\n"
    (package / "tune.py").write_text(f"{command}    {end}\n")
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    program = "from grpo_components import _tune_run\n_tune_run.main()\n"
    process = [sys.executable, "-c", program]
    done = subprocess.run(process, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("library ended\n", code)


def assert_refused(code: int, output: str, key: str) -> None:
    """Our preflight answered: exit code 2, and one line that names the key, no other."""
    assert code == 2, output
    assert "Traceback" not in output
    shown = [line for line in output.splitlines() if not line.startswith("loading torch")]
    (line,) = [line for line in shown if line != COPY_RUNS]
    assert f"{key}: " in line


def test_the_wheel_carries_the_recipes_inside_the_package_only(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    carried = {f"_recipes/{RECIPE}.py", "py.typed"}
    carried |= {f"_recipes/configs/{name}.yaml" for name in CONFIGS}
    assert names >= {f"grpo_components/{name}" for name in carried}
    top_level = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top_level == {"grpo_components", "grpo_tools"}


def test_registering_twice_adds_the_recipe_once():
    registry = Registry()
    for _ in range(2):
        _plugin.register(registry)
    (recipe,) = registry.get_all_recipes()
    assert (recipe.name, Path(recipe.file_path)) == (RECIPE, RECIPE_FILE)


def test_configs_in_subfolders_are_named_as_torchtune_names_them(tmp_path):
    for name in ("zebra.yaml", "dev/ant.yaml", "tiny_b.yaml", "tiny_a.yaml", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list(_plugin.config_files(tmp_path)) == ["tiny_a", "tiny_b", "dev/ant", "zebra"]


def test_a_broken_installation_warns_and_breaks_neither_torch_nor_tune(monkeypatch, tmp_path):
    monkeypatch.setattr(_plugin, "__file__", str(tmp_path / "grpo_components" / "_plugin.py"))
    monkeypatch.setitem(sys.modules, "torchtune._recipe_registry", Registry())
    with pytest.warns(UserWarning, match="not added to `tune`"):
        _plugin.install()
