"""How backends are found by name."""

import pytest
import torch

from moelora.backends import backend_names, get_backend
from moelora.backends.torch_reference import TorchBackend
from moelora.errors import ConfigError
from moelora.options import EngineOptions, choose_backend


def test_the_built_in_reference_is_found():
    assert "torch" in backend_names()
    assert type(get_backend("torch")) is TorchBackend


def test_module_and_class_name_a_backend_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "own_backend_9f3.py").write_text(
        "from moelora.backends.torch_reference import TorchBackend\nclass Mine(TorchBackend): pass\nnumber = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert type(get_backend("own_backend_9f3:Mine")).__name__ == "Mine"
    with pytest.raises(ConfigError, match="no subclass of"):
        get_backend("own_backend_9f3:number")
    with pytest.raises(ConfigError, match=r"'own_backend_9f3:Absent' needs own_backend_9f3.*no attribute 'Absent'"):
        get_backend("own_backend_9f3:Absent")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tritn", "Did you mean 'triton'"),
        ("no_such_module_9f3:X", "No module named 'no_such_module_9f3'"),
        (":X", "cannot be imported"),
        ("torch:", "no attribute"),
    ],
)
def test_what_is_not_there_is_refused_by_name(name, says):
    with pytest.raises(ConfigError, match=says):
        get_backend(name)


def test_a_kernel_of_attention_that_a_backend_lacks_is_refused_with_the_backends_name():
    options = EngineOptions(device="cpu", backend="torch", attention="fa4")
    with pytest.raises(ConfigError, match="backend 'torch' has no attention kernel 'fa4'; valid with it: auto"):
        choose_backend(options, torch.device("cpu"))
