"""Registries: names open what they stand for, and every fault of a package is one line that names it."""

import sys
from types import SimpleNamespace

import pytest

from laminar_py.config.registry import Registry, named_section
from laminar_py.config.section import ConfigError, Section

GROUP = "laminar_py.test_counts"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package with entry points `name -> value`, and a module of its name beside them."""

    def install(package, source, **points):
        (tmp_path / f"{package}.py").write_text(source)
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]))
        monkeypatch.delitem(sys.modules, package, raising=False)

    monkeypatch.syspath_prepend(tmp_path)
    return install


def counts(kind=int):
    return Registry(kind, field="some.count", group=GROUP, built_in={"pad": "tests.config.test_registry:PAD"})


PAD = 7


def test_a_built_in_name_opens_its_attribute():
    assert counts().get("pad") == 7


def test_names_of_installed_packages_come_after_the_built_in_ones(install):
    install("countpack", "TEN = 10", ten="countpack:TEN")
    assert counts().names() == ("pad", "ten")
    assert counts().get("ten") == 10


def test_nothing_is_imported_before_it_is_asked_for(install):
    install("lazypack", "raise RuntimeError", lazy="lazypack:X")
    assert counts().get("pad") == 7
    assert "lazypack" not in sys.modules


def test_an_unknown_name_is_told_with_the_known_ones(install):
    install("countpack2", "TEN = 10", ten="countpack2:TEN")
    with pytest.raises(
        ConfigError, match=r"^some\.count=best: unknown; choose one of pad, ten, or install [^\n]*$"
    ):
        counts().get("best")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module", r"ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise ValueError('two\\nlines')", r"ValueError: two lines"),
        ("OTHER = 1", r"AttributeError: module 'broken' has no attribute 'X'"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named_with_its_error(install, source, message):
    install("broken", source, x="broken:X")
    with pytest.raises(
        ConfigError, match=rf"^some\.count=x: broken:X of package broken cannot .*{message}[^\n]*$"
    ):
        counts().get("x")


@pytest.mark.parametrize(("kind", "wanted"), [(int, "instance of int"), (type, "class")])
def test_what_is_opened_must_be_of_the_kind(install, kind, wanted):
    install("wordpack", "WORD = 'ten'", ten="wordpack:WORD")
    with pytest.raises(
        ConfigError, match=rf"^some\.count=ten: wordpack:WORD of package wordpack is no {wanted} but a str; name"
    ):
        counts(kind).get("ten")


def test_a_package_cannot_take_a_built_in_name(install):
    install("thief", "PAD = 8", pad="thief:PAD")
    with pytest.raises(ConfigError, match=r"^some\.count=pad: package thief announces a name that is built in;"):
        counts().get("pad")


def test_two_packages_cannot_share_a_name(install):
    install("one", "X = 1", x="one:X")
    install("two", "X = 2", x="two:X")
    with pytest.raises(ConfigError, match=r"^some\.count=x: package one and package two announce it;"):
        counts().get("x")


def test_an_error_that_came_through_a_package_names_it_and_one_of_ours_stays_as_it_is(install):
    install("divpack", "def divide(): return 1 // 0\nX = 1", x="divpack:X")
    registry = counts()
    assert registry.get("x") == 1
    from divpack import divide

    with (
        pytest.raises(
            ConfigError, match=r"^some\.count=x: divpack:X of package divpack raised ZeroDivisionError: "
        ),
        registry.naming_package("x"),
    ):
        divide()
    for name in ("x", "pad"):
        with pytest.raises(ValueError, match=r"^ours$"), registry.naming_package(name):
            raise ValueError("ours")
    with pytest.raises(ConfigError, match=r"^theirs$"), registry.naming_package("x"):
        raise ConfigError("theirs")


MODELS = """
from types import SimpleNamespace
from pydantic import model_validator
from laminar_py.config.section import Section

class Wide(Section):
    kind: str
    width: int = 0

    @model_validator(mode="after")
    def _check(self):
        if self.width < 0:
            raise ValueError("narrower than nothing")
        return self

WIDE = SimpleNamespace(settings=Wide)
"""


class Plain(Section):
    kind: str = "plain"


def test_a_section_is_read_by_the_model_that_its_key_names_and_a_mistake_of_that_is_its_packages(install):
    install("widepack", MODELS, wide="widepack:WIDE")
    registry = Registry(object, field="shape.kind", group=GROUP, built_in={"plain": f"{__name__}:PLAIN"})
    read = named_section(Plain, key="kind", registry=registry)
    assert read({}) == read(Plain()) == Plain()
    assert read({"kind": "wide", "width": 3}).width == 3
    with pytest.raises(ConfigError, match=r"^shape\.kind=wide: widepack:WIDE of .* raised ValueError: narrower"):
        read({"kind": "wide", "width": -1})
    with pytest.raises(ConfigError, match="a section with a `kind`"):
        read("wide")


PLAIN = SimpleNamespace(settings=Plain)
