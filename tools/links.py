"""Write the project's public address and version into every place that shows them.

    python tools/links.py            rewrite what is out of step
    python tools/links.py --check    change nothing; name each file that is out of step and exit with 1

The address stands in pyproject.toml under [project.urls], the version in specdec_lite/__init__.py. From these come the
badges in README.md, the address and version in CITATION.cff, and two cells of every notebook: the one tagged `badges`
and the one tagged `setup`. A new notebook only needs the two tags; their text is filled in. The exercises are made from
the solutions: run `make exercises` afterwards.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
BRANCH = "main"
FIRST_NOTEBOOK = "notebooks/00_start_here.ipynb"
README_BADGES = re.compile(r"(?<=<!-- badges: begin -->\n).*?(?=<!-- badges: end -->)", re.DOTALL)

SETUP = """\
# Set-up, the same in every notebook. Run it first.
import sys
from importlib.metadata import version

if "google.colab" in sys.modules:  # Colab has torch and numpy: install only what it lacks
    %pip install -q --no-deps jaxtyping wadler-lindig git+{address}
    found = version("transformers")
    assert tuple(map(int, found.split(".")[:2])) >= {oldest}, f"{{found}} is too old: %pip install -U transformers"
import specdec_lite

assert specdec_lite.__version__ == "{version}", f"notebook {version}, library {{specdec_lite.__version__}}: renew both"\
"""


@dataclass(frozen=True)
class Project:
    """What the generated texts are made of."""

    address: str  # https://github.com/OWNER/NAME
    version: str
    transformers: tuple[int, ...]  # the oldest release that will do

    @classmethod
    def read(cls, root: Path) -> "Project":
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        init = (root / "specdec_lite" / "__init__.py").read_text(encoding="utf-8")
        requirement = next(r for r in map(Requirement, project["dependencies"]) if r.name == "transformers")
        oldest = next(s.version for s in requirement.specifier if s.operator == ">=")
        return cls(
            address=project["urls"]["Repository"].rstrip("/"),
            version=re.search(r'^__version__ = "(.+)"$', init, re.MULTILINE)[1],
            transformers=tuple(int(part) for part in oldest.split(".")),
        )

    @property
    def slug(self) -> str:
        return self.address.removeprefix("https://github.com/")

    def badges(self, notebook: str) -> str:
        """Colab and Binder badges that open one notebook (its path from the project's root)."""
        colab = f"https://colab.research.google.com/github/{self.slug}/blob/{BRANCH}/{notebook}"
        binder = f"https://mybinder.org/v2/gh/{self.slug}/{BRANCH}?urlpath=lab/tree/{notebook}"
        return (
            f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab})\n"
            f"[![Open in Binder](https://mybinder.org/badge_logo.svg)]({binder})"
        )

    def setup(self) -> str:
        """The source of every notebook's set-up cell."""
        return SETUP.format(address=self.address, version=self.version, oldest=self.transformers)


def readme(text: str, project: Project) -> str:
    if not README_BADGES.search(text):
        raise ValueError("the markers <!-- badges: begin --> and <!-- badges: end --> are missing")
    return README_BADGES.sub(lambda _: project.badges(FIRST_NOTEBOOK) + "\n", text)


def citation(text: str, project: Project) -> str:
    text = re.sub(r'^version: ".*"$', f'version: "{project.version}"', text, flags=re.MULTILINE)
    return re.sub(r'^repository-code: ".*"$', f'repository-code: "{project.address}"', text, flags=re.MULTILINE)


def notebook(text: str, project: Project, path: str) -> str:
    """The notebook with its `badges` and `setup` cells renewed; outputs and everything else stay as they are."""
    content = json.loads(text)
    for tag, source in {"badges": project.badges(path), "setup": project.setup()}.items():
        tagged = [cell for cell in content["cells"] if tag in cell["metadata"].get("tags", [])]
        if len(tagged) != 1:
            raise ValueError(f"{len(tagged)} cells are tagged `{tag}`; exactly one must be")
        tagged[0]["source"] = source.splitlines(keepends=True)
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def opened(name: str) -> str:
    """What the badges of a notebook open: in a solution, the exercise that is made from it."""
    return re.sub("^solutions/", "exercises/", name)


def renewed(root: Path) -> dict[Path, str]:
    """Each file that shows the address or the version, and the text it should have."""
    project = Project.read(root)
    makers = {"README.md": readme, "CITATION.cff": citation}
    texts = {}
    notebooks = [*sorted(root.glob("notebooks/*.ipynb")), *sorted(root.glob("solutions/*.ipynb"))]
    for path in [*(root / name for name in makers), *notebooks]:
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        try:
            texts[path] = makers[name](text, project) if name in makers else notebook(text, project, opened(name))
        except ValueError as error:
            raise SystemExit(f"{name}: {error}") from error
    return texts


def main(arguments: list[str], root: Path = ROOT) -> int:
    check = arguments == ["--check"]
    if arguments and not check:
        raise SystemExit(__doc__)
    stale = {path: text for path, text in renewed(root).items() if path.read_text(encoding="utf-8") != text}
    for path, text in stale.items():
        print(f"{path.relative_to(root).as_posix()}: " + ("out of step; run `make links`" if check else "renewed"))
        if not check:
            path.write_text(text, encoding="utf-8", newline="\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
