"""The project's sessions. `nox -l` lists them; each makes its own environment with pip and needs nothing else."""

from pathlib import Path

import nox

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests"]

PACKAGES = ("packages/core", "packages/kernels", "packages/cli")
CODE = ("packages", "tests", "examples", "benchmarks", "tools", "tutorials", "noxfile.py")
PINS = ("-c", "constraints.txt")


def install_moelora(session: nox.Session, *more: str) -> None:
    """The three packages from this checkout, editable, with the versions that constraints.txt pins."""
    session.install(*PINS, *(part for package in PACKAGES for part in ("-e", package)), *more)


@nox.session
def tests(session: nox.Session) -> None:
    """The test suite, on the CPU. Arguments after `--` go to pytest."""
    install_moelora(session, "peft", "pyarrow", "matplotlib", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
    # A process per core, each with one thread: threads of small products cost more than they give.
    one_thread = {"OMP_NUM_THREADS": "1"}
    session.run("pytest", "-q", "-m", "not gpu", "--timeout", "300", "-n", "auto", *session.posargs, env=one_thread)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: rules and formatting."""
    session.install("ruff")
    code = [path for path in CODE if Path(path).exists()]
    session.run("ruff", "check", *code)
    session.run("ruff", "format", "--check", *code)


@nox.session
def types(session: nox.Session) -> None:
    """mypy over the three packages."""
    install_moelora(session, "mypy")
    session.run("mypy", *(f"{package}/src" for package in PACKAGES))


@nox.session
def demo(session: nox.Session) -> None:
    """Scores held-out text of four kinds under the base and four adapters, on the model in examples/tiny-moe."""
    install_moelora(session)
    session.run("python", "examples/demo.py", *session.posargs)


@nox.session
def tutorials(session: nox.Session) -> None:
    """Runs the demo, and the tutorials into docs/tutorials/; a cell that raises fails. Arguments: which, as `3`."""
    install_moelora(session, "peft", "jupytext", "nbclient", "ipykernel", "matplotlib")
    if not session.posargs:
        session.run("python", "examples/demo.py")
    session.run("python", "tools/run_tutorials.py", *session.posargs)


@nox.session(requires=["tutorials"])
def docs(session: nox.Session) -> None:
    """Checks the pages and builds the site into site/, after `tutorials`; needs no torch itself."""
    session.install("--no-deps", *(part for package in ("core", "cli") for part in ("-e", f"packages/{package}")))
    session.install("click", "rich", "pytest", "mkdocs-material<10", "mkdocstrings[python]")
    session.run("pytest", "-q", "--noconftest", "tests/docs")
    session.run("mkdocs", "build", "--strict", "--quiet", env={"NO_MKDOCS_2_WARNING": "1"})
    session.run("python", "tools/check_site.py")


@nox.session
def support(session: nox.Session) -> None:
    """Writes docs/support.md from the probe; `-- --check` fails if the page is another one."""
    install_moelora(session)
    session.run("python", "tools/support_matrix.py", *session.posargs)


@nox.session(reuse_venv=False)
def build(session: nox.Session) -> None:
    """Wheels of the three packages into a fresh environment, then an import and `moelora --help`."""
    session.install("build")
    dist = Path(session.create_tmp()).resolve() / "dist"
    for package in PACKAGES:
        session.run("python", "-m", "build", "--wheel", "--outdir", str(dist), package, silent=True)
    session.install(*PINS, *(str(wheel) for wheel in sorted(dist.glob("*.whl"))))
    with session.chdir(session.create_tmp()):
        session.run("python", "-c", "import moelora, moelora_kernels, moelora_cli; print(moelora.__version__)")
        session.run("moelora", "--help")
