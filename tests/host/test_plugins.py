"""Plugins: how they are found and loaded, what they may register, and what is said of one that is faulty."""

import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from backend_engine.errors import ConfigError, InvalidRequestError
from backend_engine.plugins import discovery
from backend_engine.plugins.discovery import PluginLoader, plugin_names
from backend_engine.plugins.foreign_code import call_foreign
from backend_engine.plugins.registrations import Targets
from backend_engine.plugins.registry import Held, Registry


@pytest.fixture
def targets() -> Targets:
    """Registries of things that are cheap to make: fractions, kinds of errors, and what can be called."""
    held_fraction = Held("a Fraction", "fractions:Fraction", instances=True)
    return Targets(
        architectures=Registry("architecture", {"Ours": "fractions:Fraction"}, held_fraction),
        attention_backends=Registry("attention backend", {}, Held("a subclass of Mapping", "collections.abc:Mapping")),
        quantization_methods=Registry("quantization method", {"ours": len}),
        logits_processors=Registry("logits processor", {}, Held("a kind of LookupError", "builtins:LookupError")),
        operators=Registry("operators", {}),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def clean_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test imports is gone after it, and no plugin of this machine takes part."""
    before = set(sys.modules)
    monkeypatch.delenv("ENGINE_PLUGINS", raising=False)
    find = discovery.entry_points
    monkeypatch.setattr(
        discovery, "entry_points", lambda group: [e for e in find(group=group) if e.dist.name.startswith("pkg-")]
    )
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: Path, body: str, head: str = "") -> str:
    """A file with ``register`` whose body is ``body``; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"from fractions import Fraction\n{head}\ndef register(plugin):\n    {body}\n")
    return str(path)


def install(folder: Path, package: str, module: str, body: str, version: str = "1.2") -> None:
    """What pip leaves of a package with a plugin called ``example``."""
    write(folder / f"{module}.py", body)
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[inflight.plugins]\nexample = {module}:register\n")


def names(targets: Targets) -> list[list[str]]:
    return [registry.names() for registry in targets]


def refusal(targets: Targets, *named: str) -> str:
    """The line with which a plugin is refused, after which the registries hold what they held."""
    before = names(targets)
    with pytest.raises(ConfigError) as caught:
        PluginLoader(targets).load(named)
    assert "\n" not in str(caught.value) and names(targets) == before
    return str(caught.value)


def test_a_plugin_registers_one_of_each_kind_and_the_log_tells(
    targets: Targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        tmp_path / "one_of_each.py",
        "plugin.architecture('New', Fraction(1, 3)); plugin.attention_backend('dict', 'builtins:dict'); "
        "plugin.quantization_method('q', print); plugin.logits_processor('key', KeyError); plugin.operators('o', set)",
        "__version__ = '0.7'",
    )
    lines: list[str] = []
    monkeypatch.setattr(discovery._log, "info", lambda form, *values: lines.append(form % values))
    PluginLoader(targets).load([path])
    assert targets.architectures.get("New") == Fraction(1, 3) and targets.attention_backends.get("dict") is dict
    assert targets.quantization_methods.get("q") is print and targets.logits_processors.get("key") is KeyError
    assert targets.operators.get("o") is set
    assert targets.operators.owner_of("o") == f"plugin {path} 0.7"
    assert targets.architectures.owner_of("Ours") == "Inflight itself"
    assert lines == [
        f"loaded plugin {path} 0.7: architecture New, attention backend dict, quantization method q, "
        "logits processor key, operators o"
    ]


def test_plugins_of_installed_packages_are_found_by_themselves_unless_none_is_said(
    targets: Targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "pkg-a", "installed_a", "plugin.operators('a', set)")
    monkeypatch.syspath_prepend(str(tmp_path))
    extra = write(tmp_path / "more" / "extra_plugin.py", "plugin.operators('extra', set)")
    loader = PluginLoader(targets)
    assert loader.load(["none"]) == [] and targets.operators.names() == []
    assert [plugin.owner for plugin in loader.load(f"none, {extra}")] == [f"plugin {extra}"]
    assert [plugin.owner for plugin in loader.load()] == ["plugin example (pkg-a 1.2)"]
    assert targets.operators.names() == ["a", "extra"]


def test_a_plugin_is_loaded_once_however_it_is_named(
    targets: Targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "pkg-b", "installed_b", "plugin.operators('b', set)")
    monkeypatch.syspath_prepend(str(tmp_path))
    loader = PluginLoader(targets)
    (first,) = loader.load()
    again = loader.load(["installed_b", str(tmp_path / "installed_b.py")])
    assert again == [first] * 3 and targets.operators.names() == ["b"]


def test_a_package_folder_is_loaded_with_its_own_modules(targets: Targets, tmp_path: Path) -> None:
    folder = tmp_path / "folder_plugin"
    write(folder / "__init__.py", "plugin.operators('lazy', 'folder_plugin.inner:make')")
    (folder / "inner.py").write_text("def make(): return 5\n")
    PluginLoader(targets).load([str(folder)])
    assert targets.operators.get("lazy")() == 5


def test_the_environment_names_plugins_when_the_parameter_does_not(
    targets: Targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write(tmp_path / "env_plugin.py", "plugin.operators('env', set)")
    second = write(tmp_path / "given_plugin.py", "plugin.operators('given', set)")
    monkeypatch.setenv("ENGINE_PLUGINS", f"none,{first}")
    PluginLoader(targets).load(["none", second])
    assert targets.operators.names() == ["given"]
    PluginLoader(targets).load()
    assert targets.operators.names() == ["env", "given"]
    assert plugin_names(" a.b , ,/c.py,") == ("a.b", "/c.py") and plugin_names("") == ()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise RuntimeError('no\\nlicence')", "its register failed: RuntimeError: no licence"),
        ("raise SystemExit(3)", "its register failed: SystemExit: 3"),
        ("plugin.architecture('Ours', Fraction(1))", "architecture 'Ours' belongs to Inflight itself already"),
        ("plugin.operators('x', set); plugin.operators('x', set)", "operators 'x' is registered twice by it"),
        ("plugin.architecture('F', 0.5)", "architecture 'F' is of type float; it must be a Fraction"),
        ("plugin.architecture('F', Fraction)", "architecture 'F' is the class Fraction; it must be a Fraction"),
        ("plugin.attention_backend('l', list)", "'l' is the class list; it must be a subclass of Mapping"),
        ("plugin.attention_backend('p', print)", "'p' is the function print; it must be a subclass of Mapping"),
        ("plugin.attention_backend('m', 'collections.abc:Mapping')", "without __getitem__, __iter__, __len__; it must"),
        ("plugin.logits_processor('v', ValueError)", "the class ValueError; it must be a kind of LookupError"),
        ("plugin.quantization_method('n', 7)", "is of type int; it must be something that can be called"),
        ("plugin.operators('x', 'no_such_module:x')", "operators 'x' (no_such_module:x) cannot be imported: ModuleNot"),
        ("plugin.operators('x', 'builtins:no_such')", "operators 'x' (builtins:no_such) cannot be imported: Attribute"),
        ("plugin.operators('x', 'builtins')", "'builtins' is not of the form module:attribute"),
        ("plugin.operators('', set)", "operators '' has no proper name"),
        ("plugin.operators(5, set)", "operators 5 has no proper name"),
        ("plugin.tokenizer('t', set)", "its register failed: AttributeError: 'Registrations' object has no attribute"),
    ],
)
def test_a_faulty_plugin_is_named_and_leaves_nothing_behind(
    body: str, told: str, targets: Targets, tmp_path: Path
) -> None:
    path = write(tmp_path / "faulty_plugin.py", f"plugin.operators('good', set); {body}")
    message = refusal(targets, "none", path)
    assert message.startswith(f"plugin {path}: ") and told in message


def test_a_plugin_that_cannot_be_imported_is_named_with_the_place(targets: Targets, tmp_path: Path) -> None:
    path = write(tmp_path / "broken_plugin.py", "pass", "1 / 0")
    assert refusal(targets, "none", path) == (
        f"plugin {path}: cannot be imported: ZeroDivisionError: division by zero ({path}:2)"
    )
    assert "broken_plugin" not in sys.modules
    assert "ModuleNotFoundError: No module named 'no_such_plugin'" in refusal(targets, "none", "no_such_plugin")
    assert "invalid syntax" in refusal(targets, "none", write(tmp_path / "syntax_plugin.py", "pass", "a b"))
    write(tmp_path / "half" / "__init__.py", "pass", "import half.inner\n1 / 0")
    (tmp_path / "half" / "inner.py").write_text("")
    refusal(targets, "none", str(tmp_path / "half"))
    assert not [name for name in sys.modules if name.partition(".")[0] == "half"]


def test_a_path_must_lead_to_a_module_of_its_own_name(targets: Targets, tmp_path: Path) -> None:
    (tmp_path / "empty_folder").mkdir()
    (tmp_path / "text.txt").write_text("")
    for name, told in (
        ("missing.py", "there is no such file or folder"),
        ("empty_folder", "neither a .py file nor the folder of a package"),
        ("text.txt", "neither a .py file nor the folder of a package"),
        ("my-plugin.py", "'my-plugin' cannot be the name of a module"),
        ("json.py", "there is another module called 'json'; rename"),
        ("colorsys.py", "there is another module called 'colorsys'; rename"),
    ):
        if name.endswith(".py") and name != "missing.py":
            write(tmp_path / name, "pass")
        path = str(tmp_path / name)
        message = refusal(targets, "none", path)
        assert message.startswith(f"plugin {path}: ") and told in message, message


def test_a_module_without_register_is_no_plugin(targets: Targets, tmp_path: Path) -> None:
    (tmp_path / "plain_module.py").write_text("register = 5\n")
    assert "it has no function register(plugin)" in refusal(targets, "none", str(tmp_path / "plain_module.py"))


def test_two_plugins_that_want_one_name_are_both_named(
    targets: Targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "pkg-c", "installed_c", "plugin.logits_processor('same', KeyError)")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = write(tmp_path / "second_plugin.py", "plugin.operators('o', set); plugin.logits_processor('same', KeyError)")
    loader = PluginLoader(targets)
    with pytest.raises(ConfigError) as caught:
        loader.load([path])
    assert str(caught.value) == (
        f"plugin {path}: logits processor 'same' belongs to plugin example (pkg-c 1.2) already; choose another"
    )
    assert targets.operators.names() == [] and targets.logits_processors.names() == ["same"]


def test_an_installed_plugin_with_a_fault_is_named_with_its_package(
    targets: Targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "pkg-d", "installed_d", "plugin.operators('d', 5)", version="3")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert refusal(targets).startswith("plugin example (pkg-d 3): operators 'd' is of type int")


def test_a_client_is_not_told_where_a_plugin_lies() -> None:
    def fail() -> Any:
        raise KeyError("x" * 9_000)

    with pytest.raises(ConfigError, match=r"test_plugins\.py:\d+\)$"):
        call_foreign("plugin p", "it failed", fail)
    with pytest.raises(InvalidRequestError) as caught:
        call_foreign("plugin p", "it failed", fail, InvalidRequestError)
    assert ".py" not in str(caught.value) and len(str(caught.value)) < 600
    assert str(caught.value).startswith("plugin p: it failed: KeyError: 'xxx")
