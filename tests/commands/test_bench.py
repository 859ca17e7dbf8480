"""Arguments of ``dpx bench``."""

import pytest

from lightning_dpx.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step", "--devices", "0"], "0 is not allowed; give 1 or more"),
        (["step", "--models", "huge"], "invalid choice: 'huge'"),
        (["plan", "--compile", "1.5"], "1.5 is not allowed; give 0 to 1"),
        (["plan", "--zoo", "alexnet"], "invalid choice: 'alexnet'"),
        ([], "required: bench"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", *arguments])
    assert message in capsys.readouterr().err
