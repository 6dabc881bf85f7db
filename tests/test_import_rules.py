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

ROLES = {
    "grpo_components.exchange.parameter_server",
    "grpo_components.exchange.replay_buffer",
    "grpo_components.rollout.generator",
    "grpo_components.training.reference",
    "grpo_components.training.reward_model",
    "grpo_components.training.trainer",
}
ONLY_IMPORTERS = {
    "ray": ("grpo_components.cluster",),
    "vllm": (
        *("grpo_components.rollout.vllm_engine", "grpo_components.rollout.vllm_weights"),
        *("grpo_components.rollout.weight_sender", "grpo_components.agents.tool_calls"),
        "grpo_components.rollout.vllm_adapters",
    ),
}
# Imported in a notebook within seconds: the record, the maths, and the rewards that users write.
RECORD_AND_MATHS = (
    "grpo_components.errors",
    "grpo_components.plain_text",
    "grpo_components.schedules",
    "grpo_components.trajectory",
    "grpo_components.objective",
    "grpo_components.exchange.staleness",
)
WITHOUT_TORCH = (
    "grpo_components.rewards.maths",
    "grpo_components.rewards.pool",
    "grpo_components.rewards.code_tests",
    "grpo_components.rewards.judge",
    "grpo_components.rewards.sandbox.code_sandbox",
    "grpo_components.rewards.sandbox.inside",
    "grpo_components.environments.reasoning_gym_score",
    "grpo_components.environments.rewards",
)
# From the ground up: a room imports only itself and rooms above it in this list.
ROOMS = (
    *("ground", "objective", "replay", "exchange", "models", "training", "data", "rewards"),
    *("agents", "rollout", "environments", "cluster", "offline", "evaluation"),
    *("records", "config", "audit", "plan", "examples"),
)
"""The ground is the modules that stand in no room."""
MAX_ROOM = 0.14
"""Share of the package's lines that one room may have."""
HEAVY = ("ray", "vllm", "torchrl", "torchtune")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in tracked("grpo_components/**/*.py")}
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in MODULES.items()}
TOOLS = {
    module_name(path): ast.parse(path.read_text(), str(path))
    for path in tracked("grpo_tools/**/*.py")
}
SHIMS = {"grpo_components.audit.__main__", "grpo_components.plan.__main__"}
"""Commands under their former names."""
RECIPE_TREES = {
    path.stem: ast.parse(path.read_text(), str(path)) for path in tracked("recipes/*.py")
}
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


def test_a_room_imports_only_rooms_below_it():
    above = {
        (name, target)
        for name, targets in OWN_IMPORTS.items()
        for target in targets
        if ROOMS.index(room_of(target)) > ROOMS.index(room_of(name))
    }
    assert not above


def test_the_core_imports_tools_only_when_it_needs_one():
    assert TOOLS and TREES.keys() >= SHIMS
    for name in TREES.keys() - SHIMS:
        own = ast.parse(MODULES[name].read_text())
        own.body = [
            node
            for node in own.body
            if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        ]
        for node in ast.walk(own):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = []
        assert not any(inside(each, ("grpo_tools",)) for each in imports(own)), name


@pytest.mark.parametrize("library", ONLY_IMPORTERS)
def test_one_component_only_imports(library: str):
    importers = {
        name for name, tree in TREES.items() if any(inside(i, (library,)) for i in imports(tree))
    }
    assert importers
    assert not [name for name in importers if not inside(name, ONLY_IMPORTERS[library])]


def test_roles_are_wired_by_the_recipe_alone():
    arrows = {(name, target) for name, targets in OWN_IMPORTS.items() for target in targets & ROLES}
    assert not arrows


def test_roles_take_typed_arguments_and_no_config():
    assert TREES.keys() >= ROLES
    for name in ROLES:
        assert not any(
            inside(i, ("omegaconf", "torchtune.config")) for i in imports(TREES[name])
        ), name


def test_record_and_maths_know_nothing_of_the_machinery():
    for name in TREES:
        if inside(name, RECORD_AND_MATHS):
            assert not any(inside(i, HEAVY) for i in imports(TREES[name])), name
            packages = {
                target for target in OWN_IMPORTS[name] if not inside(target, RECORD_AND_MATHS)
            }
            assert packages <= {"grpo_components"}, name


def test_imports_form_no_circle():
    unresolved = {name: set(targets) - {name} for name, targets in OWN_IMPORTS.items()}
    while leaves := {
        name for name, targets in unresolved.items() if not targets & unresolved.keys()
    }:
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
    """Checkpoints, configs and data are data: safe loaders only, and no eval."""
    never = {"eval", "exec", "pickle.load", "pickle.loads", "yaml.load", "yaml.unsafe_load"}
    never |= {"pickle.Unpickler", "torch.hub.load", "joblib.load", "marshal.loads"}
    told = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
    found, seen = [], set()
    for module, tree in OWN_CODE.items():
        for node in ast.walk(tree):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            keywords = {k.arg: ast.unparse(k.value) for k in getattr(node, "keywords", ())}
            seen |= {called} & told.keys()
            name, value = told.get(called, ("trust_remote_code", False))
            unsafe = keywords.get(name, "unsaid" if called in told else str(value)) != str(value)
            if called in never or unsafe:
                found.append(f"{module}, line {getattr(node, 'lineno', 0)}: {called}")
        # The one unpickler of ours builds what its own list allows.
        inherits = [ast.unparse(b) for n in ast.walk(tree) for b in getattr(n, "bases", ())]
        if "pickle.Unpickler" in inherits:
            found += [] if module == "grpo_components.training.checkpoint" else [module]
    assert not found
    assert "np.load" in seen


def test_recipes_is_no_package_and_nobody_imports_it():
    assert not (REPOSITORY / "recipes" / "__init__.py").exists()
    for name, tree in OWN_CODE.items():
        assert not any(inside(i, ("recipes", "grpo_components._recipes")) for i in imports(tree)), (
            name
        )


def test_the_recipe_imports_installed_packages_only_so_that_a_copy_runs():
    installed = {
        *sys.stdlib_module_names,
        *importlib.metadata.packages_distributions(),
        "grpo_components",
    }
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
    assert set(imports(ast.Module(defined, []))) == {
        *("importlib", "importlib.import_module", "typing", "typing.Any")
    }


def test_the_recipe_stays_readable():
    assert len(RECIPE.read_text().splitlines()) <= 300
    names = [
        alias.name
        for node in ast.walk(RECIPE_TREES[RECIPE.stem])
        if isinstance(node, ast.ImportFrom) and inside(node.module or "", ("grpo_components",))
        for alias in node.names
    ]
    assert len(names) <= 15, names
    (recipe,) = (
        node
        for node in RECIPE_TREES[RECIPE.stem].body
        if isinstance(node, ast.ClassDef) and "Recipe" in node.name
    )
    loops = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in recipe.body
        if isinstance(node, ast.AsyncFunctionDef)
        and (node.name.endswith("_loop") or node.name == "rollout")
    }
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
    classes = {
        node.name
        for tree in OWN_CODE.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    for module, tree in OWN_CODE.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
                assert not bases & classes, f"{module}.{node.name}"


def test_no_prints_no_sleeping_no_bare_except():
    found = []
    for module, tree in OWN_CODE.items():
        for node in ast.walk(tree):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            bare = isinstance(node, ast.ExceptHandler) and node.type is None
            slept = isinstance(node, ast.ImportFrom) and "time.sleep" in imports(node)
            if called in {"print", "time.sleep"} or bare or slept:
                found.append(f"{module}, line {getattr(node, 'lineno', 0)}")
    assert not found
