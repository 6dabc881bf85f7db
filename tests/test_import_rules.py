"""The direction rules of the house, checked on the source: who imports whom, what stays small."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from lib.tracked import tracked

REPOSITORY = Path(__file__).parents[1]
RECIPE = REPOSITORY / "recipes" / "async_grpo_full_finetune_distributed.py"


def core(names: str) -> tuple[str, ...]:
    return tuple(f"grpo_components.{name}" for name in names.split())


ROLES = {
    *core("exchange.parameter_server exchange.replay_buffer rollout.generator"),
    *core("training.reference training.reward_model training.trainer"),
}
ONLY_IMPORTERS = {
    "ray": core("cluster"),
    "vllm": (
        *core("rollout.vllm_backend rollout.vllm_weights"),
        *core("training.weight_sender agents.tool_calls"),
    ),
}
VLLMS_INTERNALS = ("vllm.v1", "vllm.model_executor.model_loader.reload")
"""They change without notice, as do vLLM's names with a leading underscore."""
MAY_USE_VLLMS_INTERNALS = {*core("rollout.vllm_backend rollout.vllm_weights")}
# Imported in a notebook within seconds: the record, the maths, and the rewards that users write.
RECORD_AND_MATHS = core("errors plain_text schedules trajectory objective exchange.staleness")
WITHOUT_TORCH = (
    *core("rewards.maths rewards.pool rewards.code_tests rewards.judge environments.rewards"),
    *core("rewards.sandbox.code_sandbox rewards.sandbox.inside"),
    *core("environments.reasoning_gym_score"),
)
# From the ground up: a room imports only itself and rooms above it in this list.
ROOMS = (
    *("ground", "objective", "exchange", "models", "training", "data", "rewards"),
    *("agents", "rollout", "environments", "cluster", "offline", "evaluation"),
    *("records", "config", "audit", "plan", "examples"),
)
"""The ground is the modules that stand in no room."""
MAX_ROOM = 0.14
"""Share of the package's lines that one room may have."""
HEAVY = ("ray", "vllm", "torchrl", "torchtune")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


def parsed(pattern: str) -> dict[str, ast.Module]:
    return {module_name(path): ast.parse(path.read_text(), str(path)) for path in tracked(pattern)}


MODULES = {module_name(path): path for path in tracked("grpo_components/**/*.py")}
TREES, TOOLS = parsed("grpo_components/**/*.py"), parsed("grpo_tools/**/*.py")
SHIMS = {"grpo_components.audit.__main__", "grpo_components.plan.__main__"}
"""Commands under their former names."""
RECIPE_TREES = parsed("recipes/*.py")
OWN_CODE = {**TREES, **TOOLS, **RECIPE_TREES}


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield every imported dotted name, at any depth; `from a import b` yields `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inside(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


OWN_IMPORTS = {
    name: {target for target in imports(tree) if target in TREES} for name, tree in TREES.items()
}


def room_of(name: str) -> str:
    found = name.removeprefix("grpo_components").strip(".").split(".")[0]
    return found if found in ROOMS else "ground"


def test_every_folder_is_a_room_and_no_room_is_too_large():
    folders = {path.parent.name for path in tracked("grpo_components/*/__init__.py")}
    assert folders == set(ROOMS) - {"ground"}
    lines = Counter()
    for name, path in MODULES.items():
        lines[room_of(name)] += len(path.read_text().splitlines())
    assert max(lines.values()) <= MAX_ROOM * lines.total(), lines.most_common(3)


ARROWS = [(name, target) for name, targets in OWN_IMPORTS.items() for target in targets]


def test_a_room_imports_only_rooms_below_it():
    floors = {name: ROOMS.index(room_of(name)) for name in TREES}
    assert not [arrow for arrow in ARROWS if floors[arrow[1]] > floors[arrow[0]]]


def test_the_core_imports_tools_only_when_it_needs_one():
    assert TOOLS and TREES.keys() >= SHIMS
    users = {
        name for name in TREES if any(inside(i, ("grpo_tools",)) for i in imports(TREES[name]))
    }
    assert users == SHIMS | {*core("records.run_log config.objective config.replayed")}
    for name in TREES.keys() - SHIMS:
        own = ast.parse(MODULES[name].read_text())
        for node in ast.walk(own):
            typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            if typing or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = []
        assert not any(inside(each, ("grpo_tools",)) for each in imports(own)), name


def test_the_audit_uses_no_code_that_it_checks():
    checked = core("exchange data training.weight_sender records.receipts records.receipt_chain")
    audit = {name: tree for name, tree in TOOLS.items() if inside(name, ("grpo_tools.audit",))}
    assert len(audit) > 5
    assert not [
        (name, i) for name, tree in audit.items() for i in imports(tree) if inside(i, checked)
    ]


@pytest.mark.parametrize("library", ONLY_IMPORTERS)
def test_one_component_only_imports(library: str):
    importers = {
        name for name, tree in TREES.items() if any(inside(i, (library,)) for i in imports(tree))
    }
    assert importers
    assert not [name for name in importers if not inside(name, ONLY_IMPORTERS[library])]


def test_two_modules_only_import_what_vllm_keeps_to_itself():
    """By the names that tests/unit/rollout/test_vllm_private.py looks for."""

    def is_internal(name: str) -> bool:
        private = name.startswith("vllm.") and "._" in name
        return private or inside(name, VLLMS_INTERNALS)

    users = {name for name, tree in OWN_CODE.items() if any(map(is_internal, imports(tree)))}
    assert users == MAY_USE_VLLMS_INTERNALS


def test_roles_are_wired_by_the_recipe_alone_and_take_typed_arguments_and_no_config():
    assert not [arrow for arrow in ARROWS if arrow[1] in ROLES]
    assert TREES.keys() >= ROLES
    for name in ROLES:
        read = [i for i in imports(TREES[name]) if inside(i, ("omegaconf", "torchtune.config"))]
        assert not read, name


def test_record_and_maths_know_nothing_of_the_machinery():
    for name in TREES:
        if inside(name, RECORD_AND_MATHS):
            assert not any(inside(i, HEAVY) for i in imports(TREES[name])), name
            others = {each for each in OWN_IMPORTS[name] if not inside(each, RECORD_AND_MATHS)}
            assert others <= {"grpo_components"}, name


def test_imports_form_no_circle():
    unresolved = {name: set(targets) - {name} for name, targets in OWN_IMPORTS.items()}
    while leaves := [name for name, own in unresolved.items() if not own & unresolved.keys()]:
        for name in leaves:
            del unresolved[name]
    assert not unresolved


@pytest.mark.parametrize(
    ("packages", "absent"), [(RECORD_AND_MATHS, HEAVY), (WITHOUT_TORCH, (*HEAVY, "torch"))]
)
def test_light_modules_load_nothing_heavy(packages: tuple[str, ...], absent: tuple[str, ...]):
    names = [name for name in MODULES if inside(name, packages)]
    assert names
    code = (
        f"import sys\nimport {', '.join(names)}\n"
        f"print(*sorted({{name.split('.')[0] for name in sys.modules}} & {set(absent)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_nothing_is_loaded_that_could_run_code():
    """Checkpoints, configs and data are data; ruff refuses eval, pickle and unsafe YAML."""
    safe = {"weights_only": "True", "allow_pickle": "False", "trust_remote_code": "False"}
    said = {"torch.load": "weights_only", "np.load": "allow_pickle"}
    for module, tree in OWN_CODE.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called, given = ast.unparse(node.func), {k.arg: k.value for k in node.keywords}
                unsafe = [n for n in given.keys() & safe if ast.unparse(given[n]) != safe[n]]
                assert not unsafe and said.get(called) in (None, *given), (module, called)
            # The one unpickler of ours builds what its own list allows.
            if "pickle.Unpickler" in map(ast.unparse, getattr(node, "bases", ())):
                assert module == "grpo_components.training.checkpoint"


def test_recipes_is_no_package_and_nobody_imports_it():
    assert not (REPOSITORY / "recipes" / "__init__.py").exists()
    packages = ("recipes", "grpo_components._recipes")
    for name, tree in OWN_CODE.items():
        assert not any(inside(i, packages) for i in imports(tree)), name


def test_the_recipe_imports_installed_packages_only_so_that_a_copy_runs():
    installed = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions()}
    installed.add("grpo_components")
    for tree in RECIPE_TREES.values():
        assert {name.split(".")[0] for name in imports(tree)} <= installed


def test_importing_the_package_runs_nothing():
    inits = [path for path in MODULES.values() if path.name == "__init__.py"]
    assert {path.parent for path in MODULES.values()} <= {path.parent for path in inits}
    lazy = REPOSITORY / "grpo_components" / "models" / "__init__.py"
    assert all(path.read_text() == "" for path in inits if path != lazy)
    defined = ast.parse(lazy.read_text()).body[1:]  # it only says where `hugging_face` is
    assert {node.name for node in defined if isinstance(node, ast.FunctionDef)} == {"__getattr__"}
    kinds = (ast.FunctionDef, ast.Import, ast.ImportFrom)
    assert all(isinstance(node, kinds) for node in defined)
    allowed = {"importlib", "importlib.import_module", "typing", "typing.Any"}
    assert set(imports(ast.Module(defined, []))) == allowed


def test_the_recipe_stays_readable():
    assert len(RECIPE.read_text().splitlines()) <= 300
    tree = RECIPE_TREES[module_name(RECIPE)]
    sources = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in sources if inside(node.module or "", ("grpo_components",))]
    assert sum(len(node.names) for node in ours) <= 15
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    (recipe,) = (node for node in classes if "Recipe" in node.name)
    methods = [node for node in recipe.body if isinstance(node, ast.AsyncFunctionDef)]
    lines = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in methods}
    loops = {name: lines[name] for name in lines if re.search("_loop$|^rollout$", name)}
    assert {"rollout_loop", "rollout", "training_loop"} <= loops.keys()
    assert sum(loops.values()) <= 60, loops


def test_every_module_starts_with_its_charter_in_one_sentence():
    for name, tree in OWN_CODE.items():
        if not tree.body or MODULES.get(name, RECIPE).name == "__init__.py":
            continue
        docstring = ast.get_docstring(tree)
        assert docstring, f"{name} has no docstring"
        charter = docstring.split("\n\n")[0]
        assert charter.endswith("."), f"{name}: {charter}"
        assert not re.search(r"\.\s+[A-Z]", charter), f"{name}: more than one sentence: {charter}"


def test_no_class_inherits_from_our_own():
    nodes = [node for tree in OWN_CODE.values() for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    for each in classes:
        bases = {ast.unparse(base).split(".")[-1] for base in each.bases}
        assert not bases & {other.name for other in classes}, each.name
