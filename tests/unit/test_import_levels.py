"""Who may import whom, and that importing does nothing. Read from the source, by ast."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "torchtitan_lc"

FOLDER_LEVELS = {
    "config": 0,
    "tools": 0,
    "attention": 1,
    "ops": 1,
    "distributed": 2,
    "memory": 2,
    "components": 4,
    "plan": 5,
    "dry_run": 6,
}
TOP_LEVELS = {
    "__init__": 0,
    "trainer": 5,
    "preflight": 5,
    "self_check": 5,
    "train": 6,
    "launch": 6,
}
# What else a model's folder holds describes the model on one device.
MODEL_LEVELS = {"parallelize": 4, "registration": 4, "__init__": 4}
SINGLE_DEVICE_MODEL_LEVEL = 3

# What the heart is given are tensors, numbers and process groups; config loads on a laptop.
FORBIDDEN = {
    "config": ("torch",),
    "attention": ("torchtitan_lc.config",),
    "ops": ("torchtitan_lc.config",),
}

# Calls that change the process or ask the machine: no business of a module that is only imported.
FORBIDDEN_CALLS = (
    "os.environ.",
    "os.putenv",
    "os.unsetenv",
    "os.chdir",
    "sys.path.",
    "torch.cuda.",
    "torch.accelerator.",
    "torch.distributed.init",
    "torch.distributed.new_group",
    "dist.init",
    "dist.new_group",
    "torch.manual_seed",
    "torch.set_",
    "torch.use_deterministic",
    "torch.backends.",
    "multiprocessing.set_",
    "logging.basicConfig",
    "signal.signal",
    "init_logger",
)
FORBIDDEN_TARGETS = ("os.environ", "sys.path", "torch.backends.", "logging.root")


def modules(folder: Path) -> dict[str, Path]:
    """Dotted name -> file, of a package's folder; a package's own name ends in ".__init__"."""
    return {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts): path
        for path in sorted(folder.rglob("*.py"))
    }


def level(module: str) -> int:
    """The level of a module or package name. KeyError for one that has no place yet."""
    parts = module.split(".")[1:]
    if not parts:
        return TOP_LEVELS["__init__"]
    if parts[0] == "models":
        if len(parts) < 3:  # the package itself, models.spec, or a model's package
            return 4
        return MODEL_LEVELS.get(parts[2], SINGLE_DEVICE_MODEL_LEVEL)
    if len(parts) == 1 and parts[0] not in FOLDER_LEVELS:
        return TOP_LEVELS[parts[0]]
    return FOLDER_LEVELS[parts[0]]


def imported(module: str, tree: ast.AST, known: set[str]) -> Iterator[str]:
    """Every name that a module imports anywhere, `from x import module` as x.module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, base] if base else package)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                is_module = name in known or f"{name}.__init__" in known
                yield name if is_module else base


def level_faults(module: str, tree: ast.AST, known: set[str]) -> list[str]:
    faults = []
    folder = module.split(".")[1]
    for name in imported(module, tree, known):
        if name.split(".")[0] == PACKAGE and level(name) > level(module):
            faults.append(f"{module} (level {level(module)}) imports {name} (level {level(name)})")
        for forbidden in FORBIDDEN.get(folder, ()):
            if name == forbidden or name.startswith(forbidden + "."):
                faults.append(f"{module} imports {name}, which {folder}/ must not know")
    return faults


def run_at_import(node: ast.AST) -> Iterator[Any]:
    """The nodes that run at import: not the bodies of functions, nor what is under __main__."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
        return
    yield node
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        children: list[ast.AST] = [*node.decorator_list, *node.args.defaults]
        children += [default for default in node.args.kw_defaults if default is not None]
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from run_at_import(child)


def import_work(module: str, tree: ast.AST) -> list[str]:
    faults = []
    for node in run_at_import(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            reads = name == "os.environ.get"
            if name.startswith(FORBIDDEN_CALLS) and not reads:
                faults.append(f"{module}:{node.lineno} calls {name} when imported")
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if ast.unparse(target).startswith(FORBIDDEN_TARGETS):
                faults.append(f"{module}:{node.lineno} changes {ast.unparse(target)} when imported")
    return faults


MODULES = modules(ROOT / PACKAGE)


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_from_a_higher_level(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    assert level_faults(module, tree, set(MODULES)) == []


@pytest.mark.parametrize("module", MODULES)
def test_importing_a_module_does_no_work(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    assert import_work(module, tree) == []


@pytest.mark.parametrize(
    "module, source",
    [
        ("torchtitan_lc.ops.loss", "from torchtitan_lc.components import data"),
        ("torchtitan_lc.ops.loss", "def f():\n    import torchtitan_lc.trainer"),
        ("torchtitan_lc.ops.loss", "from torchtitan_lc.config.job_config import JobConfig"),
        ("torchtitan_lc.attention.upipe", "from ..models.decoder import model"),
        ("torchtitan_lc.models.decoder.model", "from .parallelize import parallelize"),
        ("torchtitan_lc.config.manager", "import torch.distributed as dist"),
    ],
)
def test_an_upward_import_is_found_however_it_is_written(module: str, source: str) -> None:
    known = {*MODULES, "torchtitan_lc.components.data", "torchtitan_lc.models.decoder.model"}
    assert len(level_faults(module, ast.parse(source), known)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "os.environ['A'] = '1'",
        "if True:\n    os.environ.setdefault('A', '1')",
        "sys.path.insert(0, '.')",
        "class A:\n    device = torch.cuda.current_device()",
        "def f(n=torch.cuda.device_count()):\n    pass",
        "torch.set_num_threads(1)",
        "torch.backends.cuda.matmul.allow_tf32 = True",
    ],
)
def test_work_at_import_is_found(source: str) -> None:
    assert len(import_work("m", ast.parse(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    os.environ['A'] = '1'",
        "if __name__ == '__main__':\n    torch.set_num_threads(1)",
        "value = os.environ.get('A')",
    ],
)
def test_work_in_functions_and_programs_is_allowed(source: str) -> None:
    assert import_work("m", ast.parse(source)) == []
