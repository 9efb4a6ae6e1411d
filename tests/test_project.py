"""The files around the library agree with each other, on versions, links and paths."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tools import links

ROOT = Path(__file__).resolve().parent.parent
PROJECT = links.tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
# Put together from pieces, so that this file does not hold what it forbids.
FORBIDDEN = ["/" + "root/", "/" + "home/", "/" + "work/", "/" + "tmp/", "../" + "shared", "py" + "pi.org", "npm" + "js"]


def requirements(lines):
    """Parsed requirements; the project's own extras stand for lists that are read anyway."""
    parsed = [Requirement(line) for line in lines]
    return [requirement for requirement in parsed if requirement.name != PROJECT["name"]]


DIRECT = requirements([*PROJECT["dependencies"], *EXTRAS["lab"], *EXTRAS["dev"]])
PINS = requirements(
    line
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line.strip() and not line.startswith("#")
)


def holds(requirement, python):
    return requirement.marker is None or requirement.marker.evaluate({"python_version": python})


@pytest.mark.parametrize("python", PYTHONS)
def test_every_direct_dependency_has_one_exact_pin_inside_its_range(python):
    pins = [pin for pin in PINS if holds(pin, python)]
    for needed in (requirement for requirement in DIRECT if holds(requirement, python)):
        found = [pin for pin in pins if pin.name.lower() == needed.name.lower()]
        assert len(found) == 1, f"constraints.txt has {len(found)} pins of {needed.name} for Python {python}"
        (exact,) = found[0].specifier
        assert exact.operator == "==", f"constraints.txt: {found[0]} is not exact"
        assert Version(exact.version) in needed.specifier, f"{found[0]} is outside pyproject.toml's {needed}"


def test_every_pin_belongs_to_a_direct_dependency():
    assert {pin.name.lower() for pin in PINS} == {requirement.name.lower() for requirement in DIRECT}


def test_the_metadata_pins_nothing():
    for requirement in DIRECT:
        operators = {specifier.operator for specifier in requirement.specifier}
        assert ">=" in operators, f"{requirement} names no oldest version"
        assert operators <= {">=", "<", "!="}, f"{requirement} is a pin: exact versions go to constraints.txt"


def test_conda_installs_the_same_versions():
    packages = [entry for entry in ENVIRONMENT["dependencies"] if isinstance(entry, str)]
    pip = next(entry["pip"] for entry in ENVIRONMENT["dependencies"] if isinstance(entry, dict))
    assert pip == ["-c constraints.txt", "-e .[dev]"]
    assert [name for name in packages if not name.startswith("python=")] == ["pip"], "packages are left to pip"
    (python,) = [name.removeprefix("python=") for name in packages if name.startswith("python=")]
    assert python in PYTHONS
    assert Version(python) in Requirement("python" + PROJECT["requires-python"]).specifier


def test_links_badges_and_set_up_cells_are_in_step(capsys):
    assert links.main(["--check"]) == 0, capsys.readouterr().out


def copy_of_the_linked_files(folder):
    (folder / "specdec_lite").mkdir()
    for name in ["README.md", "CITATION.cff", "pyproject.toml", "specdec_lite/__init__.py"]:
        (folder / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", ["README.md", "CITATION.cff"])
def test_a_new_address_is_noticed_by_name_and_then_written_everywhere(tmp_path, capsys, name):
    root = copy_of_the_linked_files(tmp_path)
    pyproject = root / "pyproject.toml"
    elsewhere = "https://github.com/someone/elsewhere"
    pyproject.write_text(pyproject.read_text(encoding="utf-8").replace(PROJECT["urls"]["Repository"], elsewhere))
    assert links.main(["--check"], root) == 1
    assert f"{name}: out of step" in capsys.readouterr().out
    links.main([], root)
    assert links.main(["--check"], root) == 0
    assert "someone/elsewhere" in (root / name).read_text(encoding="utf-8")
    assert PROJECT["urls"]["Repository"] not in (root / name).read_text(encoding="utf-8")


def test_the_readme_lists_each_notebook_and_no_other():
    listed = re.findall(r"^\| \[.*?\]\((notebooks/.+?\.ipynb)\)", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert listed == [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("notebooks/*.ipynb"))]


def committed_texts():
    """Every file that git holds, or would take, and that is text."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listing.stdout.decode("utf-8").split("\0")):
        content = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b"\0"
        if b"\0" not in content:
            yield name, content.decode("utf-8")


def test_no_committed_file_names_a_machine_or_a_registry():
    found = [f"{name}: {word}" for name, text in committed_texts() for word in FORBIDDEN if word in text]
    assert not found, "\n".join(found)


def test_relative_links_in_documents_lead_somewhere():
    for name, text in committed_texts():
        if name.endswith(".md"):
            targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)\s#]+)", text)
            missing = [target for target in targets if not (ROOT / name).parent.joinpath(target).exists()]
            assert not missing, f"{name} links to {missing}"
