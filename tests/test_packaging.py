"""What a user installs works away from the checkout: the package, its command, and optimum's command line."""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what is packaged, so that building leaves no trace in the checkout."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("hf_specdec", "optimum"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source, cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module", params=["wheel", "editable"])
def environment(request, source, wheel, tmp_path_factory) -> Path:
    """The scripts folder of a fresh environment with the package in it; its dependencies are the running one's."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)}, scheme="venv")
    scripts = Path(paths["scripts"])
    # Python adds the folder that a .pth file names but reads no .pth files there: an editable install of the checkout
    # in the running environment stays out of sight.
    Path(paths["purelib"], "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    what = [wheel] if request.param == "wheel" else ["--no-build-isolation", "--editable", source]
    pip = [sys.executable, "-m", "pip", "--python", scripts / "python"]
    run(*pip, "install", "--no-deps", "--no-index", "--ignore-installed", *what, cwd=folder)
    return scripts


def test_the_wheel_carries_the_package_and_one_file_for_optimum(source, wheel):
    packaged = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {path.relative_to(source).as_posix() for path in (source / "hf_specdec").rglob("*.py")}
    tables = {path.relative_to(source).as_posix() for path in (source / "hf_specdec/_kernels").rglob("*.json")}
    data = {"hf_specdec/py.typed", "hf_specdec/training/openings.txt"} | tables
    assert packaged == modules | data | {"optimum/commands/register/register_specdec.py"}
    assert "hf_specdec/_kernels/_row_sample.py" in packaged


def test_the_package_is_imported_from_the_installation(environment, source, tmp_path):
    printed = run(environment / "python", "-c", "import hf_specdec; print(hf_specdec.__file__)", cwd=tmp_path)
    location = Path(printed.splitlines()[-1])
    assert location.is_relative_to(environment.parent) or location.is_relative_to(source)


def test_the_kernels_run_from_the_installation(environment, tmp_path):
    pytest.importorskip("triton")
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, hf_specdec._kernels as kernels\n"
        "found = kernels.row_sample(torch.tensor([[[0.0, 3.0, 1.0]]]), 'greedy')\n"
        "print(kernels.__file__, int(found.token))\n"
    )
    location, token = run(environment / "python", program, cwd=tmp_path).split()[-2:]
    assert token == "1"
    assert "site-packages" in location or environment.name == "bin"


def test_both_command_lines_say_the_same(environment, tmp_path):
    own = run(environment / "hf-specdec", "env", cwd=tmp_path)
    assert own.startswith("hf_specdec:")
    optimum = "from optimum.commands.optimum_cli import main; main()"
    assert run(environment / "python", "-c", optimum, "specdec", "env", cwd=tmp_path) == own
