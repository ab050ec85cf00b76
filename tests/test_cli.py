"""`hf-specdec`: what `env` tells, and that wrong commands are refused before anything heavy is loaded."""

import subprocess
import sys

import pytest

import hf_specdec
from hf_specdec import cli


def facts(capsys) -> dict[str, str]:
    assert cli.main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_env_names_versions_device_and_verification(capsys):
    import torch
    import transformers

    found = facts(capsys)
    assert found["transformers"] == transformers.__version__
    assert found["torch"] == torch.__version__
    assert found["hf_specdec"] == hf_specdec.__version__
    assert {"triton", "optimum", "accelerate", "python", "platform"} <= found.keys()
    assert found["device"].startswith(("CPU", "CUDA", "ROCm"))
    assert found["verification"].startswith(("torch: ", "triton"))


def test_env_tells_whether_the_dispatcher_is_installed(capsys):
    hf_specdec.install()
    assert facts(capsys)["dispatcher"].startswith("installed in transformers 5.")
    hf_specdec.uninstall()
    try:
        assert facts(capsys)["dispatcher"].startswith("not installed in transformers 5.")
    finally:
        hf_specdec.install()


def test_env_names_a_missing_package(capsys, monkeypatch):
    monkeypatch.setattr(cli.env, "PACKAGES", ("no-such-package",))
    assert facts(capsys)["no-such-package"] == "not installed"


@pytest.mark.parametrize("arguments", [[], ["nope"], ["env", "--nope"]])
def test_a_wrong_command_line_is_a_usage_error(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments, prog="optimum-cli specdec")
    assert stopped.value.code == 2
    assert "optimum-cli specdec" in capsys.readouterr().err


def test_help_lists_every_command_with_its_purpose(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for command in cli.COMMANDS:
        assert command.__doc__.partition("\n")[0] in text


def test_optimum_learns_the_command_without_loading_the_package():
    code = (
        "import sys; from optimum.commands.register import register_specdec as module; "
        "print(module.REGISTER_COMMANDS[0].COMMAND.name, 'hf_specdec' in sys.modules, 'torch' in sys.modules)"
    )
    pytest.importorskip("optimum.commands.optimum_cli")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["specdec", "False", "False"]
