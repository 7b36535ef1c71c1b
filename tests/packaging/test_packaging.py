"""What is installed, and that importing it is quick."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

import shardwright

PROJECT = Path(__file__).parents[2]


def read_pyproject() -> dict[str, dict[str, object]]:
    with (PROJECT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def test_types_are_shipped() -> None:
    assert files("shardwright").joinpath("py.typed").is_file()


def test_the_installed_version_is_the_package_s() -> None:
    assert importlib.metadata.version("shardwright") == shardwright.__version__


def test_the_command_is_installed() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="shardwright")
    assert command.value == "shardwright.app.cli:main"


def test_every_public_name_is_there() -> None:
    missing = [name for name in shardwright.__all__ if not hasattr(shardwright, name)]
    assert missing == []
    assert set(shardwright.__all__) <= set(dir(shardwright))


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(shardwright, "no_such_name")


def test_importing_the_package_imports_no_torch() -> None:
    program = "import sys, shardwright; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == 0


def test_every_requirement_is_pinned_for_tests() -> None:
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (PROJECT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    project = read_pyproject()["project"]
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    wanted = [*project["dependencies"], *extras["dev"], *extras["hf"]]  # type: ignore[misc]
    assert [name for name in wanted if name.split(">=")[0] not in pinned] == []
