"""A foreign address and an unknown device are errors at once, without a retry."""

from __future__ import annotations

import pytest

from baton.cli.host import check_address
from baton.cli.main import main
from baton.core.errors import ConfigError


def test_an_address_of_another_machine_is_refused_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    """192.0.2.0/24 is reserved for documentation."""
    assert main(["host", "--join", "http://127.0.0.1:1", "--mixed", "1", "--listen", "192.0.2.7"]) == 2
    said = capsys.readouterr().err
    assert "cannot listen on 192.0.2.7" in said
    assert "give --listen an address of this machine" in said


def test_a_device_that_is_none_is_refused_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["host", "--join", "http://127.0.0.1:1", "--mixed", "1", "--device", "gpu"]) == 2
    assert "--device is 'gpu', but must be auto, cpu, cuda or cuda:N" in capsys.readouterr().err


@pytest.mark.parametrize("listen", ["", "127.0.0.1", "127.0.0.1:9000", "[::1]", "::1", "[::1]:9000"])
def test_an_address_of_this_machine_may_have_brackets_and_a_port(listen: str) -> None:
    check_address(listen)


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:99999"):
        check_address("127.0.0.1:99999")
